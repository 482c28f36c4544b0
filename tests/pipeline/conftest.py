from __future__ import annotations

import pytest

from tests.support import recorded_graphs
from tests.support.recorded_graphs import RecordedGraphs


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[RecordedGraphs]:
    """CUDA graphs are recorded operations in this test; counts graphs and replays."""
    return recorded_graphs.install(monkeypatch)
