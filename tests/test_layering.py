"""Holds every import of the package against the list in the section "Who may import whom" of docs/design.md."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zbkern"


def rules() -> tuple[dict[str, set[str]], set[str]]:
    """Room (a folder, or a module with a rule of its own) -> what it may import; and the rooms without torch."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = re.search(r"### Who may import whom\n.*?```text\n(.*?)```", page, re.DOTALL)
    assert block is not None, "docs/design.md has no list under 'Who may import whom'"
    permitted, pure = {}, set()
    for line in block[1].splitlines():
        rooms, _, right = line.partition("->")
        for room in names(rooms):
            permitted[room] = names(right.replace("no torch", ""))
            if "no torch" in right:
                pure.add(room)
    return permitted, pure


def names(text: str) -> set[str]:
    return set(re.findall(r"[\w.]+", text))


MAY_IMPORT, WITHOUT_TORCH = rules()


@functools.cache
def modules() -> dict[str, Path]:
    """Name below zbkern -> file; a folder stands for its __init__.py."""
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(files)
    }


def room(module: str) -> str:
    """The folder of a module, or the module itself where it has a rule of its own; "" where there is no rule."""
    while module and module not in MAY_IMPORT:
        module, _, _ = module.rpartition(".")
    return module


@functools.cache
def imports(module: str, typed: bool = False) -> frozenset[str]:
    """Full names of what a module imports, inside functions too; typed: also what only type checkers see."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and not typed and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the layers"
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                found.add(name if name.removeprefix("zbkern.") in modules() else str(node.module))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(modules()[module].read_text(encoding="utf-8")))
    return frozenset(found)


def imports_of_zbkern(module: str, typed: bool = False) -> set[str]:
    return {name.removeprefix("zbkern.") for name in imports(module, typed) if name.startswith("zbkern.")}


def test_every_module_is_under_a_rule() -> None:
    folders = {name for name, path in modules().items() if path.name == "__init__.py"}
    alone = {name for name in modules() if "." not in name}
    missing = sorted((folders | alone) - MAY_IMPORT.keys())
    assert not missing, f"add these to 'Who may import whom' in docs/design.md: {missing}"
    named = MAY_IMPORT.keys() | set().union(*MAY_IMPORT.values())
    gone = sorted(named - modules().keys())
    assert not gone, f"'Who may import whom' in docs/design.md names what does not exist: {gone}"


@pytest.mark.parametrize("module", [*filter(room, modules())])
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    own = room(module)
    permitted = MAY_IMPORT[own]
    wrong = {
        name for name in imports_of_zbkern(module) if name not in permitted and room(name) not in {own, *permitted}
    }
    assert not wrong, f"zbkern.{module} imports {wrong}; {own} may import {permitted or 'nothing of zbkern'}"


@pytest.mark.parametrize("module", [name for name in modules() if room(name) in WITHOUT_TORCH])
def test_rooms_without_torch(module: str) -> None:
    heavy = {name for name in imports(module) if name.split(".")[0] in ("torch", "triton", "numpy")}
    assert not heavy, f"zbkern.{module} imports {heavy}"


def test_rooms_without_torch_import_only_each_other() -> None:
    assert not {name for own in WITHOUT_TORCH for name in MAY_IMPORT[own]} - WITHOUT_TORCH


def test_there_is_no_import_circle() -> None:
    """Imports for types alone count, too."""
    graph = {module: imports_of_zbkern(module, typed=True) for module in modules()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_test_imports_another() -> None:
    """What several share is in tests/support."""
    pattern = re.compile(r"^(?:from|import) tests\.\S*\btest_\S+", re.MULTILINE)
    wrong = {path.name: found for path in ROOT.glob("tests/**/*.py") if (found := pattern.findall(path.read_text()))}
    assert not wrong
