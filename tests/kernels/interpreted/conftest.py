from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # tests/conftest.py says so


@pytest.fixture(autouse=True)
def nothing_replayed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every call works out its launches, which tests look at and change; test_replay.py has the others."""
    from tests.support.interpreter import quicken
    from zbkern.kernels.triton.replay import replay

    quicken()
    if request.module.__name__.endswith("test_replay"):
        yield
        replay.forget()
    else:
        with replay.paused():
            yield
