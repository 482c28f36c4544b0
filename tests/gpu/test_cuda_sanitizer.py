"""compute-sanitizer finds nothing in a small run of every CUDA kernel: reads and writes out of bounds, races."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from zbkern.kernels.cuda import wgrad as cuda_wgrad

SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(cuda_wgrad.why_not() is not None, reason=str(cuda_wgrad.why_not())),
    pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer; it comes with CUDA's toolkit"),
]

SMALL_RUN = """
import torch
from zbkern.kernels.cuda import wgrad

def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)

for dtype in (torch.bfloat16, torch.float16):
    for out in (torch.float32, dtype):
        for n, k in ((136, 264), (264, 72), (1024, 1024)):  # ragged tiles, the narrow tile, the wide one
            segments = [(random(m, k, dtype=dtype), random(m, n, dtype=dtype)) for m in (65, 128, 1)]
            dweight, dbias = random(n, k, dtype=out), random(n, dtype=out)
            for places, options in ((2, {}), (132, {}), (132, {"max_tiles": 1})):
                wgrad._processors = lambda device: places
                for outputs in ((dweight, dbias), (dweight, None)):
                    wgrad.linear_wgrads([(segments, outputs)], True, **options)
                    wgrad.linear_wgrads([(segments, outputs)], False, **options)
products = [([(random(m, k), random(m, n))], (random(n, k, dtype=torch.float32), random(n, dtype=torch.float32)))
            for m, n, k in ((64, 136, 264), (100, 512, 256), (1, 8, 8), (70, 256, 128), (64, 128, 128))]
wgrad.linear_wgrads(products, True)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "1", sys.executable, "-c", SMALL_RUN]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # the end of each tensor's memory is seen
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-2000:]
