from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def two_ranks() -> Iterator:
    """Two gloo processes for the whole session: starting them costs more than most tests."""
    from ranks import Ranks

    ranks = Ranks(2)
    yield ranks
    ranks.close()
