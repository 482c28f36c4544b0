"""What importing zbkern costs, and that its public names are there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import zbkern


def run_python(code: str) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_neither_torch_nor_triton() -> None:
    heavy = (
        "import sys, zbkern; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules], zbkern.__version__)"
    )
    assert run_python(heavy) == f"[] {zbkern.__version__}"


def test_a_choice_on_a_cpu_loads_no_triton_and_the_layers_no_torch_pipelining() -> None:
    code = "import sys, torch, zbkern; from zbkern.kernels import dispatch\n"
    code += "dispatch.resolve('linear', 'auto', torch.device('cpu'), torch.float32); print('triton' in sys.modules)\n"
    code += "zbkern.WGradQueue; zbkern.nn; zbkern.convert; zbkern.functional\n"
    code += "print('torch.distributed.pipelining' in sys.modules)"
    assert run_python(code).split() == ["False", "False"]


@pytest.mark.parametrize("name", zbkern.__all__)
def test_public_names_resolve(name: str) -> None:
    if name in zbkern._MODULES and importlib.util.find_spec(f"zbkern.{name}") is None:
        pytest.fail(f"zbkern.__all__ promises {name}, which does not exist")
    assert getattr(zbkern, name) is not None
    assert name in dir(zbkern)
