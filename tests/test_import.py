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


def test_what_needs_neither_loads_neither_torch_pipelining_nor_triton() -> None:
    code = "import sys, torch, zbkern; zbkern.WGradQueue; zbkern.nn; zbkern.convert; zbkern.functional\n"
    code += "from zbkern.kernels import dispatch; dispatch.resolve('linear', 'auto', 'cpu', torch.float32)\n"
    assert (
        run_python(code + "print([m for m in ('torch.distributed.pipelining', 'triton') if m in sys.modules])") == "[]"
    )


@pytest.mark.parametrize("name", zbkern.__all__)
def test_public_names_resolve(name: str) -> None:
    if name in zbkern._MODULES and importlib.util.find_spec(f"zbkern.{name}") is None:
        pytest.fail(f"zbkern.__all__ promises {name}, which does not exist")
    assert getattr(zbkern, name) is not None
    assert name in dir(zbkern)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = zbkern.no_such_name
