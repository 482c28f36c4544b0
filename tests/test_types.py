"""The annotations that users' type checkers read."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_program_that_uses_everything_passes_mypy_strict() -> None:
    """Some seconds the first time: .cache keeps what mypy knows of torch."""
    options = ("--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={ROOT / '.cache' / 'mypy'}")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "tests/support/typed_user.py"],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "zbkern" / "py.typed").exists()
