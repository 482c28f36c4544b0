"""The planner keeps to its time limit, also when something else keeps the machine busy."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from zbkern.pipeline import Costs, plan
from zbkern.pipeline.planner import native

SLACK = 0.6  # seconds of one core: published schedules are always made, and the plan is simulated


@pytest.fixture(scope="module")
def busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def check(limit: float, stages: int, microbatches: int, chunks: int, jitter: float = 0.0) -> None:
    begin, cpu = time.perf_counter(), time.process_time()
    costs, memory = Costs(92, 90, 46, 6), 1.25 * stages * chunks
    plan(costs, stages, microbatches, chunks, memory_limit=memory, time_limit=limit, jitter=jitter)
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    share = wall / cpu  # how many processes had this core meanwhile
    assert wall <= 1.2 * limit + SLACK * max(1.0, share)


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("limit", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_time_limit_holds(limit: float, chunks: int) -> None:
    check(limit, 16, 48, chunks)


@pytest.mark.usefixtures("busy")
def test_the_time_limit_holds_with_jitter() -> None:
    check(2.0, 8, 24, 1, jitter=0.1)


@pytest.mark.parametrize("limit", [0.3, 1.0])
def test_the_time_limit_holds_without_the_compiled_core(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "core", None)
    check(limit, 8, 24, 2)


@pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")
def test_the_time_there_is_is_used() -> None:
    """Where the plan is not yet the best possible."""
    begin = time.perf_counter()
    found = plan(Costs(92, 90, 46, 6), 8, 16, 2, memory_limit=12, time_limit=1.0)
    assert found.optimal or time.perf_counter() - begin >= 0.9
