"""The annotations that users' type checkers read; `make lint` checks tests/support/typed_user.py, which uses them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "zbkern" / "py.typed").exists()
