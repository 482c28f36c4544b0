"""What all transports share: a mailbox, calls that ranks make together, values of all ranks, and who is stuck."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from zbkern.pipeline.transport.framing import CallNotice, Notice, StallAnswer, StallQuery, decode, encode
from zbkern.pipeline.transport.mailbox import Call, Mailbox, Note, Values
from zbkern.pipeline.transport.mailbox import PipelineError as PipelineError
from zbkern.pipeline.transport.mailbox import Tag as Tag
from zbkern.pipeline.transport.whereabouts import whereabouts

LONGEST_TIMEOUT = 365 * 86400  # seconds; waits for a lock end in an OverflowError from some 300 years on
_GRACE = 2.0  # seconds in which a rank that is asked why it sends nothing answers


class Transport(ABC):
    """What the engine needs of the connection of one rank to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.awaits: int | None = None  # the rank a message of which is waited for
        self._device_awaits: int | None = None  # the same, where it is the device that waits
        self.begin_action("none")
        self._join(Mailbox(rank))

    def _join(self, mailbox: Mailbox) -> None:
        """Begins anew, with nothing under way."""
        self._mailbox = mailbox
        self._gathers = 0

    @property
    def failure(self) -> str | None:
        """Why every call raises, None while no rank has failed."""
        return self._mailbox.failure

    def begin(self, call: str) -> None:
        """Begins this rank's next call, such as a step. Raises PipelineError when a rank has failed.

        Messages carry the call that they are sent in: where another rank makes a different one, both fail.
        """
        difference = self._mailbox.begin(call)
        if difference is not None:
            self.fail(difference)
            raise PipelineError(difference)

    def end(self) -> None:  # noqa: B027
        """Ends this rank's call, or a part of it: what it has received is to arrive though a later one fails."""

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:  # noqa: B027
        """Before the first message: these pairs of ranks will send each other tensors. The same pairs on every rank."""

    def check_received(self) -> None:  # noqa: B027
        """After a wait for the device: raises PipelineError where messages that it waited for did not come."""

    def announce(self) -> None:
        """Tells the other ranks which call this one is in; those that are in another one fail, as this one does."""
        for peer in self.peers:
            self._tell(peer, CallNotice(*self._mailbox.call))

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def begin_action(self, action: object) -> None:
        """Sets what this rank does from now on, for messages of errors."""
        self.action = action
        self._action_start = time.monotonic()
        self._thread = threading.get_ident()

    @abstractmethod
    def send(self, peer: int, tag: Any, message: Any) -> None:
        """Starts sending a pytree of tensors and bytes to `peer` and returns; the tensors must stay as they are.

        peer: also this rank, whose neighbouring chunks hand tensors over directly. Raises PipelineError when the peer
        is gone.
        """

    def ready(self, tag: Any) -> bool:
        """True when `receive` would return at once."""
        message = self._mailbox.peek(tag)
        return message is not None and (not message[1] or all(work.is_completed() for work in message[1]))

    def receive(self, peer: int, tag: Any, timeout: float | None) -> Any:
        """The message from `peer`. Raises PipelineError when a rank has failed, or is stuck for `timeout` seconds."""
        self.wait_for(peer, tag, timeout)
        message, works = self._mailbox.take(tag)
        if works:
            self._watch(peer, tag, works, timeout)
            self._settle(message, works)
        return message

    def wait_for(self, peer: int, tag: Any, timeout: float | None, instead: Any = None) -> None:
        """Returns once `receive` would, or one of the tag `instead`. Raises as `receive`."""
        self.awaits = peer
        try:
            self._mailbox.wait_for(peer, tag, timeout, instead)
        except (TimeoutError, PipelineError) as error:  # of a peer that closed, perhaps: the others hear that it did
            is_late = isinstance(error, TimeoutError)
            self.fail(self._why_nothing_comes(peer, f"{tag} was awaited for {timeout:g} s") if is_late else str(error))
            raise PipelineError(self._mailbox.failure) from None
        finally:
            self.awaits = None

    def _settle(self, message: Any, works: Sequence[Any]) -> None:  # noqa: B027
        """Sees to it that a message is there for whoever uses it; without works it is."""

    def _watch(self, peer: int, tag: Any, works: Sequence[Any], timeout: float | None) -> None:  # noqa: B027
        """Fails, from another thread, where a message that is announced and not there yet does not come."""

    def forget(self, step: int) -> None:
        """Drops messages to this rank of steps before `step`, arrived or not: nobody will ask for them."""
        self._mailbox.forget(step)  # torch keeps memory that NCCL still writes into

    def gather(self, value: Any, timeout: float | None = None, call: str = "gather") -> list[Any]:
        """One value of every rank, by rank: numbers, strings, and containers and NamedTuples of them; collective.

        Raises TypeError for other values, PipelineError as `receive` does. timeout: None for as long as ranks wait for
        each other to start. call: what ranks that do something else are told that this one does.
        """
        self.begin(call)  # of messages: a collective would wait for a frozen rank, and never name it
        self._gathers += 1
        ours = encode(value)
        decode(ours)  # what others could not read is an error here
        for peer in self.peers:
            self.send(peer, self._given_by(self.rank), ours)
        return [
            decode(ours if rank == self.rank else self.receive(rank, self._given_by(rank), timeout))
            for rank in range(self.size)
        ]

    def broadcast(self, source: int, message: Any, timeout: float | None) -> Any:
        """A pytree of tensors of rank `source`, on every rank; collective. Raises PipelineError as `receive` does."""
        self.begin("broadcast")  # from rank to rank, between which NCCL has connections already
        self._gathers += 1
        if self.rank != source:
            message = self.receive(self.rank + (1 if source > self.rank else -1), self._given_by(source), timeout)
        for peer in (self.rank - 1, self.rank + 1):  # away from the source
            if 0 <= peer < self.size and abs(peer - source) > abs(self.rank - source):
                self.send(peer, self._given_by(source), message)
        return message

    def _given_by(self, rank: int) -> Values:
        return Values(self._gathers, f"what rank {rank} gives to gather or broadcast {self._gathers}")

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Tells every rank that this one has failed; the first reason that a rank hears or tells stays."""

    @abstractmethod
    def reopen(self) -> None:
        """Makes a transport that has failed usable again, without the messages that were under way; collective.

        Raises PipelineError when a rank was lost: only a restart brings it back.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the transport; collective."""

    # ---- who is stuck

    def _why_nothing_comes(self, peer: int, awaited: str) -> str:
        """Asks `peer`; where it waits for another rank itself, that one, and so on. Who does not wait says so to all.

        Ranks answer from another thread than the one that is stuck. A rank that is frozen gives no answer.
        """
        asked, ours = [self.rank], f"rank {self.rank}, action {self.action}: waits for rank"
        while peer not in asked:
            asked.append(peer)
            self._tell(peer, StallQuery(awaited))
            try:
                self._mailbox.wait_for(peer, _answer_of(peer), _GRACE)
            except TimeoutError:
                return f"{ours} {peer}, which does not answer; {awaited}"
            except PipelineError as error:
                return str(error)
            peer = self._mailbox.take(_answer_of(peer))[0]
        both = "waits, too: all ranks must make the same calls, optimizer.step() also"
        return f"{ours} {asked[-1]}, which {both}; {awaited}"

    def _hear(self, sender: int, message: Notice) -> None:
        """The call that the sender is in, a question why this rank sends nothing, or the answer to one."""
        if isinstance(message, StallQuery):
            awaits = self._device_awaits if self.awaits is None else self.awaits
            if awaits is not None:
                self._tell(sender, StallAnswer(awaits))
                return
            seconds, place = time.monotonic() - self._action_start, whereabouts(self._thread)
            self._stop(f"rank {self.rank}, action {self.action}: stuck for {seconds:.1f} s{place}; {message.awaited}")
        elif isinstance(message, StallAnswer):
            self._mailbox.put(_answer_of(sender), (message.awaits, ()), sender, self._mailbox.call)
        elif (difference := self._mailbox.compare(sender, Call(*message))) is not None:
            self._stop(difference)

    @abstractmethod
    def _tell(self, peer: int, message: Notice) -> None:
        """Sends what the peer's `_hear` is called with; no error where it is gone."""

    def _stop(self, reason: str) -> None:
        """`fail`, where no call of this rank is about to raise."""
        self.fail(reason)


def _answer_of(rank: int) -> Note:
    return Note(rank, f"an answer of rank {rank}")


def check_timeout(function: str, timeout: float) -> float:
    """`timeout`, seconds to wait for one message. Raises ValueError for one out of range.

    function: what the caller is called in errors. There is no "for ever": a rank that is stuck would never be named.
    """
    if not 0 < timeout <= LONGEST_TIMEOUT:  # False for NaN, too
        raise ValueError(
            f"{function}: timeout must be a number of seconds above 0 and at most {LONGEST_TIMEOUT} (a year); "
            f"got {timeout!r}"
        )
    return timeout
