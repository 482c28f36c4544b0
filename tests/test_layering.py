"""Reads every import of the package and holds it against the section "Who may import whom" of docs/design.md."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zbkern"

# what of zbkern.pipeline needs torch; everything else there is the pure half
NEEDS_TORCH = (
    "arguments",
    "checkpoint",
    "checkpoint_folder",
    "checkpoint_format",
    "clock",
    "connection",
    "delegating",
    "engine",
    "failure",
    "framing",
    "groups",
    "mixed_precision",
    "named_state",
    "norms",
    "optimizer",
    "profiling",
    "rank_exchange",
    "recorder",
    "replicas",
    "stage",
    "tied",
    "torch_pipelining",
    "transport",
    "undo",
)

# module -> what it may import of zbkern; a name stands for itself and everything below it
MAY_IMPORT = {
    "conversion": {"nn", "functional", "recognition"},
    "recognition": {"nn"},
    "nn": {"functional"},
    "arguments": {"kernels.spec"},
    "functional": {"arguments", "compiled", "functions", "autograd", "kernels.dispatch", "kernels.spec"},
    "compiled": {"functions", "autograd", "wgrad", "kernels.dispatch", "kernels.reference"},
    "functions": {
        *("functions", "autograd", "wgrad"),
        *("kernels.spec", "kernels.product", "kernels.reference", "kernels.reference_attention", "kernels.measured"),
    },
    "autograd": {"wgrad", "landing"},
    "wgrad": {"grouping", "landing", "streams", "task"},
    "task": set(),
    "grouping": set(),
    "streams": set(),
    "data_parallel": {"wgrad"},
    "optim": {"kernels.dispatch", "kernels.spec"},
    "landing": set(),
    "kernels": {"kernels"},
}


def modules() -> list[str]:
    return sorted(
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" or path.parent != PACKAGE
    )


def path_of(module: str) -> Path:
    path = PACKAGE / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module: str, *, for_types_too: bool = False, nested: bool = True) -> set[str]:
    """Full names of what a module imports; those under `if TYPE_CHECKING` only when asked for."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types_too:
            return
        if not nested and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the layers"
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names = set(modules())
            found.update(name if name.removeprefix("zbkern.") in names else str(node.module) for name in below)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path_of(module).read_text()))
    return found


def of_zbkern(names: set[str]) -> set[str]:
    return {name.removeprefix("zbkern.") for name in names if name.startswith("zbkern.")}


def allowed(name: str, permitted: set[str]) -> bool:
    return any(name == permit or name.startswith(permit + ".") for permit in permitted)


@pytest.mark.parametrize("module", [m for m in modules() if m.split(".")[0] in MAY_IMPORT])
def test_layers_import_only_what_is_below_them(module: str) -> None:
    permitted = MAY_IMPORT.get(module, MAY_IMPORT[module.split(".")[0]])
    wrong = {name for name in of_zbkern(imports(module)) if not allowed(name, permitted)}
    assert not wrong, f"zbkern.{module} imports {wrong}; permitted: {permitted}"


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("kernels.")])
def test_implementations_never_import_each_other(module: str) -> None:
    def family(name: str) -> str | None:
        last = name.split(".")[-1]
        return next((f for f in ("reference", "triton", "cuda") if last == f or last.startswith(f + "_")), None)

    own = family(module)
    if own is None:
        return
    others = {name for name in of_zbkern(imports(module)) if family(name) not in (None, own)}
    assert not others, f"zbkern.{module} imports {others}"


@pytest.mark.parametrize(
    "module", [m for m in modules() if m.startswith("pipeline.") and m.split(".")[1] not in NEEDS_TORCH]
)
def test_the_pure_half_of_the_pipeline_needs_no_torch(module: str) -> None:
    names = imports(module, nested=False)
    heavy = {name for name in names if name.split(".")[0] in ("torch", "triton", "numpy")}
    assert not heavy, f"zbkern.{module} imports {heavy}"
    wrong = {n for n in of_zbkern(names) if not n.startswith("pipeline.") or n.split(".")[1] in NEEDS_TORCH}
    assert not wrong, f"zbkern.{module} imports {wrong}, which is not in the pure half"


def test_the_pure_half_of_the_pipeline_has_no_import_circles() -> None:
    """Nor imports inside of functions that hide one, but for those that save a timeline by its suffix."""
    pure = [m for m in modules() if m.startswith("pipeline.") and m.split(".")[1] not in NEEDS_TORCH]
    graph = {m: {n for n in of_zbkern(imports(m, nested=False)) if n in pure} for m in pure}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
    hidden = {(m, n) for m in pure for n in of_zbkern(imports(m)) - of_zbkern(imports(m, nested=False))}
    assert hidden == {("pipeline.timeline", "pipeline.draw"), ("pipeline.timeline", "pipeline.trace")}


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("pipeline")])
def test_pipeline_meets_kernels_only_through_the_queue(module: str) -> None:
    if module.split(".")[-1].startswith(("profil", "torch_pipelining")):
        return  # these build layers, through the public modules
    wrong = {n for n in of_zbkern(imports(module)) if n.split(".")[0] in ("kernels", "autograd", "functional", "nn")}
    assert not wrong, f"zbkern.{module} imports {wrong}"


def test_every_module_is_under_a_rule() -> None:
    free = {"__main__", "info", "testing"}
    unknown = [m for m in modules() if m.split(".")[0] not in {*MAY_IMPORT, "pipeline", *free}]
    assert not unknown, f"add these to tests/test_layering.py and docs/design.md: {unknown}"
