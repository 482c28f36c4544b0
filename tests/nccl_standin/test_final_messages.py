"""Messages over gloo beside NCCL's: what a rank says last reaches every other one, whoever is slow, stopped or gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from tests.nccl_standin.ranks import Run
from zbkern.pipeline import PipelineError
from zbkern.pipeline.transport.framing import CallNotice, FinalMessage, Incoming, Message
from zbkern.pipeline.transport.gpu import GpuTransport
from zbkern.pipeline.transport.mailbox import Note

UNREAD = 5  # messages, for which fewer receives are posted


def wait(run: Run, seconds: float, until: Callable[[], Any] = lambda: False) -> None:
    run.scheduler.wait_until([], until, seconds)


def failure_of(run: Run, transport: Any) -> str:
    """What the next call raises, once another rank has failed."""
    while transport.failure is None:
        wait(run, 0.01)
    with pytest.raises(PipelineError) as caught:
        transport.begin("call")
    return str(caught.value)


def fill(transport: Any, peer: int) -> None:
    for number in range(UNREAD):
        transport.send(peer, Note(number, "a message"), ())


@contextmanager
def reading_late(run: Run, seconds: dict[int, float]) -> Iterator[None]:
    """Ranks, by their numbers, read each message of rank 0 so many seconds after the one before it."""
    receive = Incoming.receive

    def receive_late(incoming: Incoming) -> Any:
        if incoming._peer == 0:
            wait(run, seconds.get(run.scheduler.current.rank, 0.0))
        return receive(incoming)

    with mock.patch.object(Incoming, "receive", receive_late):
        yield


@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_that_reads_late_hears_the_cause(closes: bool) -> None:
    """Also where another one, which has closed, reads still later: a wait for it that ran out of time would end both
    connections.
    """
    run = Run(3)

    def rank(transport: Any) -> str:
        if transport.rank == 0:
            fill(transport, 1)
            fill(transport, 2)
            wait(run, 0.1)
            transport.fail("the cause")
        told = "" if closes and transport.rank == 2 else failure_of(run, transport)
        transport.close()
        return told

    with reading_late(run, {1: 1.4, 2: 1.5}):
        assert run.run(rank) == ["the cause", "the cause", "" if closes else "the cause"]


def test_a_rank_that_closes_reads_the_last_message_late() -> None:
    """That rank 0 has its last message does not say that it has rank 0's, for which it waits."""
    run, took = Run(2), []

    def rank(transport: Any) -> None:
        if transport.rank == 0:
            fill(transport, 1)
            wait(run, 0.01)
            transport.fail("the cause")
            wait(run, 30, lambda: took)  # it closes later
        start = run.scheduler.now
        transport.close()
        took.append(run.scheduler.now - start)

    with reading_late(run, {1: 0.1}):
        run.run(rank)
    assert took[0] < 1, "it was not sent, or forgotten"


def test_a_rank_that_ends_when_its_call_raises_has_told_the_others() -> None:
    """Rank 2 is stopped when it has told rank 1; rank 0 can hear the cause from rank 1 alone."""
    run, send = Run(3), GpuTransport._start_send

    def send_once(transport: Any, peer: int, message: Message, tensors: Any = ()) -> Any:
        if isinstance(message, FinalMessage):
            assert transport.failure is None, "a call may have raised"
        works = send(transport, peer, message, tensors)
        if isinstance(message, FinalMessage) and transport.rank == 2:
            run.freeze(2)
        return works

    def rank(transport: Any) -> str:
        if transport.rank == 2:
            transport.fail("the cause")
        told = failure_of(run, transport)
        if transport.rank == 1:
            run.kill(1)
        return told

    with mock.patch.object(GpuTransport, "_start_send", send_once):
        assert run.run(rank) == ["the cause", None, None]


def test_a_rank_that_is_interrupted_while_it_tells_the_others_goes_on_with_it() -> None:
    run, interrupted = Run(2), []
    send = GpuTransport._start_send

    def interrupt(transport: Any, peer: int, message: Message, tensors: Any = ()) -> Any:
        if isinstance(message, FinalMessage) and transport.rank == 0 and not interrupted:
            interrupted.append(peer)
            raise KeyboardInterrupt
        return send(transport, peer, message, tensors)

    def rank(transport: Any) -> str:
        if transport.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                transport.fail("the cause")
            transport.close()
            return ""
        told = failure_of(run, transport)
        transport.close()
        return told

    with mock.patch.object(GpuTransport, "_start_send", interrupt):
        assert run.run(rank) == ["", "the cause"]
    assert interrupted == [1]


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_two_threads_do_not_mix(seed: int) -> None:
    """A receiver sends notices while its rank sends messages; longer headers come in two parts."""
    run, notes = Run(2, seed=seed), [Note(number, f"{number}" * 2000) for number in range(9)]

    def notify(transport: Any) -> None:
        for number in range(9):
            transport._tell(1, CallNotice(100 + number, f"{number}" * 3000))

    def rank(transport: Any) -> list[Any]:
        if transport.rank == 0:
            run.scheduler.spawn(0, "notices", lambda: notify(transport))
            for note in notes:
                transport.send(1, note, (note.what,))
        found = [transport.receive(0, note, 10.0) for note in notes] if transport.rank == 1 else []
        wait(run, 1.0)
        transport.close()
        return found

    assert run.run(rank)[1] == [(note.what,) for note in notes]
