from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import threading
import time
import warnings
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "0"  # kernels are compiled, for the emulator too
# One thread for torch in each process: more processes than cores run tests, and threads that wait for others spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Collecting garbage after every 700 new objects, as Python does, took a tenth of the tests' time.
gc.set_threshold(50_000, 20, 20)

# Of `make test-all`, see tests/support/examples.py; on a machine with a GPU hypothesis may be missing.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("thorough", settings.get_profile("ci"))

RANKS = {"two_ranks", "fresh_ranks", "four_ranks"}
_BEGIN = time.perf_counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take long, too")
    parser.addoption("--seconds", type=float, default=float("inf"), help="tests that begin later than this are skipped")


def pytest_report_header(config: pytest.Config) -> list[str]:
    left_out = []
    if not config.getoption("--slow"):
        left_out.append("tests that take long are left out: run them with --slow")
    if importlib.util.find_spec("triton") is None:
        left_out.append("triton is not installed: tests/emulator is left out")
    return left_out


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.perf_counter() - _BEGIN > item.config.getoption("--seconds"):
        pytest.skip("no time left: --seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        slow = [item for item in items if "slow" in item.keywords]
        items[:] = [item for item in items if "slow" not in item.keywords]
        config.hook.pytest_deselected(items=slow)  # to report each as skipped took seconds
    # First those of ranks, so that one worker of pytest-xdist gets them: each that has some starts six processes
    items.sort(key=lambda item: RANKS.isdisjoint(getattr(item, "fixturenames", ())))


def pytest_collection_finish() -> None:
    """Modules and tests stay: a test that collects garbage need not visit them, which takes a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def pipelines_are_closed() -> Iterator[None]:
    """Warns of a test whose Pipeline stays open: its threads go on beside the tests that come after it."""
    before = {*threading.enumerate()}
    yield
    left = sorted(t.name for t in threading.enumerate() if t not in before and t.name.startswith("zbkern"))
    if left:
        warnings.warn(f"a Pipeline was left open; use it in a with statement: {left}", stacklevel=1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator:
    """Two gloo processes for the whole session: starting them costs more than most tests."""
    yield from _ranks(2)


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator:
    """Two gloo processes whose memory no other file's tests have used."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator:
    """Four gloo processes, for two stages of two replicas."""
    yield from _ranks(4)


def _ranks(size: int) -> Iterator:
    from tests.support.ranks import Ranks

    ranks = Ranks(size)
    yield ranks
    ranks.close()
