from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_replayed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every call works out its launches, which tests look at and change; test_replay.py has the others."""
    pytest.importorskip("triton", reason="triton is not installed")
    from tests.support.interpreter import quicken
    from zbkern.kernels.triton.replay import replay

    quicken()
    if request.module.__name__.endswith("test_replay"):
        yield
        replay.forget()
    else:
        with replay.paused():
            yield
