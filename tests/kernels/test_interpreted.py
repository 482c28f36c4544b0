"""Runs interpreted.py in a process that interprets Triton kernels: a process interprets them or compiles them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("part", [pytest.param("test_every_launch", marks=pytest.mark.slow), "not test_every_launch"])
def test_interpreted(part: str) -> None:
    file = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", part, str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=file.parents[2], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
