"""Seeds of random cases: fixed, so that every run has the same; `ZBKERN_SEED=3 python -m pytest` takes another, and
ZBKERN_SEED=random draws one."""

from __future__ import annotations

import os
import time


def seed(default: int) -> int:
    """Printed, which pytest shows where a test fails."""
    given = os.environ.get("ZBKERN_SEED", default)
    chosen = time.time_ns() if given == "random" else int(given)
    print(f"ZBKERN_SEED={chosen}")
    return chosen
