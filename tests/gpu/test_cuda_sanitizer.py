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
from zbkern.kernels.cuda import fp8, wgrad

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

def quantised(rows, r, block=1):
    values = random(rows, -(-r // 16) * 16).to(torch.float8_e4m3fn)[:, :r]
    return values, random(-(-r // 128), -(-rows // block), dtype=torch.float32)

for p, q, r in ((132, 136, 264), (260, 72, 16), (1024, 1024, 640)):
    for dtype in (torch.bfloat16, torch.float16):
        y, bias = random(p, q, dtype=dtype), random(q, dtype=dtype)
        assert fp8.product(quantised(p, r), quantised(q, r, 128), bias, y, False)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for add in (False, True):
            assert fp8.product(quantised(p + 1, r), quantised(q, r), None, random(p + 1, q, dtype=dtype), add)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool: str) -> None:
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "1", sys.executable, "-c", SMALL_RUN]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # the end of each tensor's memory is seen
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-2000:]
