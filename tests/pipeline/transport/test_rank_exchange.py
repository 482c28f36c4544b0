"""Stages that ranks come to together: what they give each other, and how an error on one reaches all."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.patience import patiently
from tests.support.ranks import Ranks
from zbkern.pipeline import PipelineError
from zbkern.pipeline.transport import rank_exchange
from zbkern.pipeline.transport.mailbox import described
from zbkern.pipeline.transport.process_groups import place_in_store
from zbkern.pipeline.transport.rank_exchange import RankExchange

pytestmark = pytest.mark.dist


def test_one_process_is_all_ranks() -> None:
    with RankExchange("call", None, 5.0) as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
        assert ranks.exchange("there", 3, lambda values: [2 * value for value in values]) == 6
        assert ranks.exchange("there", 3) is None
    with pytest.raises(ZeroDivisionError), RankExchange("call", None, 5.0):
        raise ZeroDivisionError


def give_and_take(sizes: list[int]) -> list[tuple[int, bool]]:
    found = []
    with RankExchange("call", None, 60.0) as ranks:
        for size in sizes:
            mine = "ab"[ranks.rank] * size
            both = ranks.exchange("there", mine, lambda values: ["".join(values)] * len(values))
            found.append((len(both), both == "a" * size + "b" * size))
        keys = dist.distributed_c10d._get_default_store().num_keys()
        ranks.exchange("keys counted")
    return [*found, (keys, True)]


def test_values_of_any_size_reach_all_and_are_gone_then(two_ranks: Any) -> None:
    """A TCPStore takes no more than 8 MiB at once."""
    sizes = [0, (4 << 20) - 2, (8 << 20) + 1]
    small, large = two_ranks.run(give_and_take, [0, 1, 2]), two_ranks.run(give_and_take, sizes)
    for of_rank in large:
        assert of_rank[:-1] == [(2 * size, True) for size in sizes]
    # rank 1 counts when it has taken its last answer; what rank 0 gives to the next exchange may be there
    assert abs(large[1][-1][0] - small[1][-1][0]) <= 2


def caught(timeout: float, action: Any, call: str = "call") -> tuple[str, str, float]:
    """(kind, message, seconds) of what this rank raises; the next call must be whole again."""
    start, kind, message = time.monotonic(), "nothing", ""
    try:
        with RankExchange(call, None, timeout) as ranks:
            ranks.exchange("first")
            action(ranks)
            ranks.exchange("second")
    except BaseException as error:
        kind, message = described(error).split(": ", 1)
    seconds = time.monotonic() - start
    check_the_next_call()
    return kind, message, seconds


def check_the_next_call() -> None:
    with RankExchange("call", None, 60.0) as ranks:
        total = ranks.exchange("after", ranks.rank + 1, lambda values: [sum(values)] * len(values))
    assert total == sum(range(1, dist.get_world_size() + 1))


class Failing:
    """As much of a Transport as an exchange reads."""

    def __init__(self, failure: str | None) -> None:
        self.failure = failure


def exchange_beside(
    failures: list[tuple[str | None, str | None]], comes: list[bool], timeout: float
) -> tuple[str, float]:
    """What this rank raises. failures: of each rank's transport, before and in the call; comes: who makes the call."""
    rank = dist.get_rank()
    before, within = failures[rank]
    transport: Any = Failing(before)
    start, said = time.monotonic(), "nothing"
    try:
        exchange = RankExchange("call", None, timeout, transport=transport)
        if comes[rank]:
            with exchange as ranks:
                transport.failure = within
                ranks.exchange("there")
    except PipelineError as error:
        said = str(error)
    seconds = time.monotonic() - start
    dist.barrier()
    return said, seconds


@pytest.mark.parametrize(
    ("failures", "comes", "timeout", "said"),
    [
        ([(None, "rank 1 died"), (None, None)], [True, False], 600, ["call: rank 1 died", "nothing"]),
        ([(None, None), (None, "rank 0 died")], [False, True], 600, ["nothing", "call: rank 0 died"]),
        ([("rank 1 died", "rank 1 died"), (None, None)], [True, False], 1, ["call: rank 1 died", "nothing"]),
        ([("over", "over"), ("over", "over")], [True, True], 600, ["nothing", "nothing"]),
        ([(None, None), (None, None)], [True, False], 1, ["call: rank 1 did not come to 'there' in 1 s", "nothing"]),
    ],
)
def test_a_failure_that_a_pipeline_knows_of_is_named_and_nobody_beside_it(
    two_ranks: Any, failures: Any, comes: list[bool], timeout: float, said: list[str]
) -> None:
    """At once where it is new; one that was there before may have been caught, and ranks may come all the same."""
    found = two_ranks.run(exchange_beside, failures, comes, timeout)
    assert [message for message, _ in found] == said
    assert max(seconds for _, seconds in found) < 60


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Unsendable(Exception):
    def __str__(self) -> str:
        return "\ud800"


def raise_on(failing: int, error: type[BaseException]) -> tuple[str, str, float]:
    def action(ranks: RankExchange) -> None:
        if ranks.rank == failing:
            raise error("broken")

    return caught(600.0, action)


@pytest.mark.parametrize(
    ("failing", "error", "text"),
    [
        (0, ValueError, "broken"),
        (1, ValueError, "broken"),
        (0, KeyboardInterrupt, "broken"),
        (1, SystemExit, "broken"),
        (1, Wordless, "(its text cannot be made)"),
        (0, Unsendable, r"\ud800"),
    ],
)
def test_an_error_on_one_rank_is_one_on_all(
    two_ranks: Any, failing: int, error: type[BaseException], text: str
) -> None:
    found = two_ranks.run(raise_on, failing, error)
    assert found[failing][:2] == (error.__name__, text)
    assert found[1 - failing][:2] == ("PipelineError", f"call: rank {failing}: {error.__name__}: {text}")
    assert found[1 - failing][2] < 60


def late(failing: int) -> str:
    """Time passes when all others have come; the rank that fails comes when they have raised."""
    message, minutes = "nothing", itertools.count()
    try:
        with pytest.MonkeyPatch.context() as patch, RankExchange("call", None, 60.0) as ranks:
            ranks.exchange("first")
            others, store = [f"2/value/{rank}" for rank in range(ranks.size) if rank != failing], ranks._store
            clock = SimpleNamespace(monotonic=lambda: 100.0 * next(minutes) if store.check(others) else 0.0)
            patch.setattr(rank_exchange, "time", clock)
            while ranks.rank == failing and not store.check([rank_exchange._FAILED]):
                time.sleep(0.01)
            ranks.exchange("second")
    except PipelineError as error:
        message = str(error)
    check_the_next_call()
    return message


@pytest.mark.parametrize("failing", [0, 3])
def test_a_rank_that_does_not_come_is_named_on_all(four_ranks: Any, failing: int) -> None:
    for message in four_ranks.run(late, failing):
        assert message == f"call: rank {failing} did not come to 'second' in 60 s"


def different_calls() -> tuple[str, str, float]:
    return caught(60.0, lambda ranks: None, call=f"call {dist.get_rank()}")


def test_ranks_in_different_calls_are_told(two_ranks: Any) -> None:
    for kind, message, _ in two_ranks.run(different_calls):
        assert kind == "PipelineError"
        assert "ranks make different calls; rank 0 is at 'call 0: first', rank 1 at 'call 1: first'" in message


@contextlib.contextmanager
def store_of_rank_0() -> Iterator[None]:
    """Inside, rank 0 hosts torch's store, as without torchrun; elsewhere the process of the tests does."""
    outside = place_in_store(range(dist.get_world_size()), "store of rank 0")
    if dist.get_rank() == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outside.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(outside.get("port")), is_master=False)

    def meet(where: str) -> None:
        outside.set(f"{dist.get_rank()} {where}", "")
        outside.wait([f"{rank} {where}" for rank in range(dist.get_world_size())])

    meet("is connected")  # before rank 0 stops itself
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        yield
    meet("is done")  # the store ends with what rank 0 has of it


STOP = """
until_there() { n=0; while [ ! -e "$1" ] && [ $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done; }
until_there read; kill -STOP $0; touch stopped; until_there ended; kill -CONT $0
"""


def host_stopped(folder: Path) -> str:
    """Rank 0 is stopped when rank 1 is about to come to the second stage, and goes on when that has raised."""
    message = "nothing"
    with store_of_rank_0():
        try:
            with pytest.MonkeyPatch.context() as patch, RankExchange("call", None, 60.0) as ranks:
                ranks.exchange("first")
                if ranks.rank == 0:
                    subprocess.run(["sh", "-c", STOP, str(os.getpid())], cwd=folder, check=True)
                (folder / "read").touch()
                while not (folder / "stopped").exists():
                    time.sleep(0.01)
                patch.setattr(rank_exchange, "_GRACE", 0.6)
                ranks._timeout = 0.7
                try:
                    ranks.exchange("second")
                finally:
                    (folder / "ended").touch()
        except PipelineError as error:
            message = str(error)
        check_the_next_call()
    return message


def test_a_host_of_the_store_that_is_stopped_ends_the_others_in_time(two_ranks: Any, tmp_path: Path) -> None:
    """Clients of the store wait for its answer for ever."""
    message = two_ranks.run(host_stopped, tmp_path)[1]
    host = "the host of torch.distributed's store (rank 0, or torchrun)"
    assert message == f"call: {host} did not answer rank 1 in 1.3 s"


def host_killed(log: Path, scale: float) -> None:
    start = time.monotonic()
    try:
        with store_of_rank_0(), RankExchange("call", None, 1.5 * scale) as ranks:
            ranks.exchange("first")
            if ranks.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.exchange("second")
    except PipelineError as error:
        log.write_text(f"{time.monotonic() - start} {error}")
        raise


def test_a_host_of_the_store_that_is_killed_ends_the_others_in_time(tmp_path: Path) -> None:
    """Killed and stopped ranks beside it: test_fault_matrix.py."""

    def check(scale: float) -> None:
        ranks, log = Ranks(2), tmp_path / f"{scale:g}"
        with pytest.raises(AssertionError, match="its process ended"):
            ranks.run(host_killed, log, scale)
        ranks.close()
        seconds, _, message = log.read_text().partition(" ")
        assert float(seconds) < 5 * scale
        assert "rank 1 has lost the host of torch.distributed's store (rank 0, or torchrun)" in message

    patiently(check)
