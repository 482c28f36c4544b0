"""What is compiled ahead is what the launcher would compile: it finds it in Triton's cache. For a GPU that is not here,
in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import types
import torch, triton
from triton.backends.compiler import GPUTarget
from bench import ahead
from zbkern.kernels.triton import common, kernels

def compiled():
    import pathlib, os
    return sorted(path.name for path in pathlib.Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin"))

def here(self, grid, arguments, constants, warps, stages):  # everything but the launch itself
    self.function.run(*arguments, *constants, grid=grid, warmup=True, **common.compile_options(warps, stages))

if __name__ == "__main__":
    gpu = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(gpu)
    z = torch.ones(32, 64)
    runs = [lambda: kernels.activation_fwd(z, "silu", z), lambda: 1 / 0]
    runs += [lambda: kernels.activation_fwd(z[:, ::2], "silu", z[:, ::2])] * 2
    with ahead.Compilers(1) as compilers:
        assert compilers.compile(runs) == 2
        assert compilers.compile(runs) == 0
    found = compiled()
    assert len(found) == 2, found
    common.Kernel.__call__ = here
    runs[0](), runs[2]()
    assert compiled() == found
    kernels.activation_fwd(z, "relu", z)
    assert len(compiled()) == 3
"""


@pytest.mark.slow
def test_the_launcher_finds_what_was_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(root)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
