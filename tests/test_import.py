"""What importing zbkern costs, and that its public names are there."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from types import ModuleType

import pytest

import zbkern
from zbkern import functional, nn, pipeline, testing, wgrad
from zbkern.pipeline import checkpoint


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


@pytest.mark.parametrize("module", [functional, nn, testing, checkpoint], ids=lambda module: module.__name__)
def test_a_star_brings_what_a_module_defines_and_nothing_that_it_imports(module: ModuleType) -> None:
    found = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    assert {name for name in found if not name.startswith("_")} - {*module.__all__} <= made_by_convert
    assert all(hasattr(module, name) for name in module.__all__)


made_by_convert = {"Layer", "TransposedLinear", "ForeignRMSNorm", "eps_of"}  # and their base class


@pytest.mark.parametrize(
    "module", [zbkern, functional, nn, pipeline, testing, wgrad], ids=lambda module: module.__name__
)
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    """And every method and property of a public class; forward of a layer is described by its class."""
    without = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            own = vars(value).get("__doc__") or ""
            without += [name] * (not own or own.startswith(f"{name}("))  # what a dataclass writes by itself
            without += [f"{name}.{member}" for member in vars(value) if undescribed(value, member)]
        elif inspect.ismodule(value) or inspect.isfunction(value):
            without += [name] * (not value.__doc__)
    assert without == []


@pytest.mark.parametrize("module", [zbkern, functional, nn, pipeline, wgrad, checkpoint], ids=lambda m: m.__name__)
def test_many_arguments_do_not_share_a_paragraph(module: ModuleType) -> None:
    """More than six are a section, `Args:`."""
    for name in module.__all__:
        value = getattr(module, name)
        is_error = inspect.isclass(value) and issubclass(value, Exception)
        if is_error or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        arguments = {*inspect.signature(value).parameters}
        for paragraph in re.split(r"\n\s*\n", inspect.getdoc(value) or ""):
            described = re.findall(r"(?:^|[.;] |\n)((?:\w+, )*\w+): ", paragraph)
            found = arguments & {each for group in described for each in group.split(", ")}
            assert paragraph.startswith("Args:") or len(found) <= 6, f"{name}: {found}"


def undescribed(kind: type, member: str) -> bool:
    """inspect.getdoc also finds what a base class says of a method."""
    value = inspect.getattr_static(kind, member)
    is_method = isinstance(value, property | staticmethod | classmethod) or inspect.isfunction(value)
    is_field = member in getattr(kind, "__dataclass_fields__", ())  # the class's docstring has those
    is_forward = member == "forward" and hasattr(kind, "extra_repr")
    return not (member.startswith("_") or is_forward or is_field) and is_method and not inspect.getdoc(value)
