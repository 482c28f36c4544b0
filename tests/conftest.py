from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# A process either interprets Triton kernels or compiles them, from the first import of triton on. These tests interpret
# (nothing else in them uses triton); `make test-gpu` sets it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes; run it with --slow"))


@pytest.fixture(scope="session")
def two_ranks() -> Iterator:
    """Two gloo processes for the whole session: starting them costs more than most tests."""
    from ranks import Ranks

    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator:
    """Four gloo processes, for two stages of two replicas."""
    from ranks import Ranks

    ranks = Ranks(4)
    yield ranks
    ranks.close()
