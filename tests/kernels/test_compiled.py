"""Runs tests/kernels/compiled in a process that compiles kernels."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("compiled")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver is compiled from C, and there is no gcc")
def test_compiled() -> None:
    pytest.importorskip("zbkern._launcher", reason="the launcher is not built: there was no C++ compiler")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=FOLDER.parents[2], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
