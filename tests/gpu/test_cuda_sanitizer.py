"""compute-sanitizer finds nothing in a small run of every CUDA kernel: reads and writes out of bounds, races."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.cuda_extension import SMALL_RUN
from zbkern.kernels.cuda import wgrad as cuda_wgrad

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(cuda_wgrad.why_not() is not None, reason=str(cuda_wgrad.why_not())),
    pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer; it comes with CUDA's toolkit"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "1", sys.executable, "-c", SMALL_RUN]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # the end of each tensor's memory is seen
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-2000:]
