"""What setup.py decides to build, and that its error names the command."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zbkern_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("mode", "compiler", "parts"),
    [("auto", "/usr/bin/g++", ["planner"]), ("auto", None, []), ("off", "/usr/bin/g++", []), ("off", None, [])],
)
def test_builds_what_there_is_a_compiler_for(
    script: ModuleType, mode: str, compiler: str | None, parts: list[str]
) -> None:
    assert script.parts_to_build(mode, compiler) == parts


@pytest.mark.parametrize("mode", ["", "on", "AUTO", "cuda"])
def test_refuses_a_mode_it_cannot_follow(script: ModuleType, mode: str) -> None:
    with pytest.raises(ValueError, match="ZBKERN_BUILD"):
        script.parts_to_build(mode, "/usr/bin/g++")


def test_finds_the_compiler_that_is_named(script: ModuleType, tmp_path: Path) -> None:
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert script.find_compiler({"CXX": f"{compiler} -pipe"}, "linux") == str(compiler)
    assert script.find_compiler({"CXX": str(tmp_path / "absent")}, "linux") is None


def test_planner_sources_need_no_torch(script: ModuleType) -> None:
    sources = sorted((ROOT / "csrc").glob("planner*"))
    assert len(sources) >= 4
    assert all("torch/" not in path.read_text() for path in sources)


def test_error_names_the_command(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **options: object) -> None:
        raise OSError("exit code 1")

    build = script.LoudBuild.__new__(script.LoudBuild)
    build.compiler = SimpleNamespace(spawn=fail)

    def compile_one(self: object, ext: object) -> None:
        build.compiler.spawn(["g++", "-c", "a b.cpp"])

    monkeypatch.setattr(script.build_ext, "build_extension", compile_one)
    with pytest.raises(RuntimeError, match=r"g\+\+ -c 'a b.cpp'"):
        build.build_extension(SimpleNamespace(name="zbkern._planner"))
