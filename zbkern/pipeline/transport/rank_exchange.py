"""What ranks do together by way of torch.distributed's store: everybody waits within a time-out, errors reach all.

Collectives wait for a rank that has failed, is stopped or was killed until a time-out of their backend's, and do not
name it. Here each rank gives a value, rank 0 decides from all of them what each gets, and whatever raises on a rank
in between raises on all. Values travel as JSON: who reaches the store can disturb a job, and run no code in it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent import futures
from types import TracebackType
from typing import Any

import torch.distributed as dist

from zbkern.pipeline.transport.base import Transport, check_timeout
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.pipeline.transport.mailbox import PipelineError, described
from zbkern.pipeline.transport.process_groups import place_in, place_in_store

TIMEOUT = 1800.0
_GRACE = 10.0  # seconds beyond a time-out after which the store itself is taken for stuck
_PIECE = 4 << 20  # bytes; a TCPStore drops the connection of who sends 8 MiB at once
_FIRST_LOOK, _LONGEST_LOOK = 0.002, 0.5  # seconds between looks at what has come
_FAILED = "failed"


class RankExchange:
    """`with RankExchange("checkpoint.save", group, timeout) as ranks:` on all ranks, in the same order as other calls.

    call: its name in errors. group: the ranks that take part, None for all; without torch.distributed this process
    alone. timeout: seconds that ranks wait for each other in an `exchange`. hint: added where a rank does not come.
    transport: that of a Pipeline, if there is one: why it fails is why a rank does not come. Ranks that are its threads
    exchange through it.
    What the body raises on one rank, or a wrong timeout, ends it on all: that rank raises its own error, the others
    PipelineError with the rank and the error in its message. The next call finds all ranks together again.
    """

    def __init__(
        self,
        call: str,
        group: dist.ProcessGroup | None,
        timeout: float,
        hint: str = "",
        transport: Transport | None = None,
    ) -> None:
        self.call = call
        self._timeout, self._hint = timeout, hint
        self._transport = transport
        self._failed_before = None if transport is None else transport.failure
        self.rank, self.size = 0, 1
        self._store: dist.Store = dist.HashStore()
        if isinstance(transport, LocalTransport) and transport.size > 1:
            self.rank, self.size, self._store = transport.rank, transport.size, transport.store()
        elif (place := place_in(group)) is not None:
            self.rank, self.size = place
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            if self.rank < 0:
                raise ValueError(f"{call}: group must hold this rank; got ranks {ranks}")
            self._store = place_in_store(ranks, "exchange")
        self._stage = 0
        self._known = False  # whether all ranks know why this one raises
        self._over = threading.Event()

    def __enter__(self) -> RankExchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if error is not None and not self._known:
            reason = f"{self.call}: rank {self.rank}: {described(error)}"
            self._start(lambda: self._store.set(_FAILED, reason)).join(_GRACE)  # else when the store answers again

    def exchange(
        self, stage: str, value: Any = None, decide: Callable[[list[Any]], list[Any] | None] | None = None
    ) -> Any:
        """Waits for all ranks to come to this stage; returns what `decide` gives this rank.

        stage: what ranks have done when they come, as in "tensors written". value: as JSON has it. decide: called on
        rank 0 alone with the values by rank, gives what each rank gets, or None for nothing. Raises PipelineError on
        all ranks where one raises before it comes, or does not come within the time-out, and where ranks are in
        different calls.
        """
        check_timeout(self.call, self._timeout)
        self._stage += 1
        here = json.dumps((f"{self.call}: {stage}", value))
        if self.rank > 0:
            return self._bounded(lambda: self._give_and_get(here, stage))
        values = self._bounded(lambda: self._collect(here, stage))
        answers = (decide(values) if decide is not None else None) or [None] * self.size
        self._bounded(lambda: self._answer([json.dumps(answer) for answer in answers]))
        return answers[0]

    # ---- in the store, from a thread

    def _give_and_get(self, here: str, stage: str) -> Any:
        self._put(self._value_of(self.rank), here)
        answer = self._get(f"{self._stage}/answer/{self.rank}", stage)
        self._remove(f"{self._stage}/answer/{self.rank}")
        return answer

    def _collect(self, here: str, stage: str) -> list[Any]:
        self._put(self._value_of(0), here)  # for others to see that this rank has come
        labelled = [self._get(self._value_of(rank), stage) for rank in range(self.size)]
        for rank, (label, _) in enumerate(labelled):
            if label != labelled[0][0]:
                raise PipelineError(
                    f"ranks make different calls; rank 0 is at {labelled[0][0]!r}, rank {rank} at {label!r}"
                )
        return [value for _, value in labelled]

    def _answer(self, answers: list[str]) -> None:
        for rank in range(1, self.size):
            self._put(f"{self._stage}/answer/{rank}", answers[rank])
        for rank in range(self.size):  # not before: they say who has come
            self._remove(self._value_of(rank))

    def _value_of(self, rank: int) -> str:
        return f"{self._stage}/value/{rank}"

    def _put(self, key: str, text: str) -> None:
        for start in range(0, len(text), _PIECE):
            self._store.set(f"{key}/{start}", text[start : start + _PIECE])
        self._store.set(key, str(len(text)))

    def _get(self, key: str, stage: str) -> Any:
        self._wait(key, stage)
        return json.loads(b"".join(map(self._store.get, self._pieces(key))))

    def _remove(self, key: str) -> None:
        for each in (*self._pieces(key), key):
            self._store.delete_key(each)

    def _pieces(self, key: str) -> list[str]:
        return [f"{key}/{start}" for start in range(0, int(self._store.get(key)), _PIECE)]

    def _wait(self, key: str, stage: str) -> None:
        start = time.monotonic()  # no `wait` of the store: a TCPStore logs a warning whenever one times out
        while not self._over.is_set():
            if self._store.check([_FAILED]):
                self._known = True
                raise PipelineError(self._store.get(_FAILED).decode())
            waited = time.monotonic() - start
            if self._store.check([key]):
                return
            failure = None if self._transport is None else self._transport.failure
            if failure is not None and (failure != self._failed_before or waited > self._timeout):
                self._store.set(_FAILED, f"{self.call}: {failure}")  # a rank that failed in it will not come
                continue
            if waited > self._timeout:
                self._store.set(_FAILED, f"{self.call}: {self._missing(stage)} in {self._timeout:g} s{self._hint}")
                continue
            self._over.wait(min(max(waited / 10, _FIRST_LOOK), _LONGEST_LOOK))
        raise PipelineError(f"{self.call}: rank {self.rank} has left it")

    def _missing(self, stage: str) -> str:
        absent = [rank for rank in range(self.size) if not self._store.check([self._value_of(rank)])]
        ranks = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        return f"{ranks} did not come to {stage!r}" if absent else f"rank 0 did not go on after {stage!r}"

    # ---- threads

    def _bounded(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, done by a thread: calls of a store whose host is stopped never return."""
        result: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        self._start(run)
        host = "torch.distributed's store (rank 0, or torchrun)"
        try:
            return result.result(self._timeout + _GRACE)
        except PipelineError:
            raise
        except futures.TimeoutError as error:
            raise PipelineError(
                f"{self.call}: the host of {host} did not answer rank {self.rank} in {self._timeout + _GRACE:g} s"
            ) from error
        except RuntimeError as error:
            self._known = True  # to those who can be told
            raise PipelineError(
                f"{self.call}: rank {self.rank} has lost the host of {host}, and with it what ranks tell each other; "
                f"start all ranks again: {error}"
            ) from error

    def _start(self, work: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=work, name="zbkern-exchange", daemon=True)
        thread.start()
        return thread
