"""What the build decides to build, that its errors name the command, and that its cache goes by content."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from setuptools import Distribution, Extension

from build_tools import cuda, decision
from build_tools.decision import Decision, Machine, decide

ROOT = Path(__file__).parent.parent
GCC, NVCC = "/usr/bin/g++", "/usr/local/cuda/bin/nvcc"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zbkern_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executable(path: Path, text: str = "#!/bin/sh\n") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


CPU = ("planner", "launcher")


@pytest.mark.parametrize(
    ("mode", "change", "parts"),
    [
        (None, {"nvcc": None}, CPU),
        (None, {}, CPU),  # nvcc and no GPU: minutes that nobody has asked for
        (None, {"compiler": None, "nvcc": None}, ()),
        (None, {"compiler": None}, ()),  # nvcc needs a C++ compiler
        (None, {"nvcc": None, "platform": "win32"}, ("planner",)),  # the launcher is for Linux
        ("auto", {}, CPU),
        ("cpu", {}, CPU),
        ("cpu", {"compiler": None}, ()),
        ("cuda", {}, (*CPU, "cuda")),
        ("off", {}, ()),
        ("off", {"compiler": None, "nvcc": None}, ()),
        ("auto", {"visible": ("9.0",)}, (*CPU, "cuda")),
        ("auto", {"visible": ("8.6", "9.0")}, (*CPU, "cuda")),
        ("auto", {"visible": ("12.0",)}, CPU),
        ("cuda", {"visible": ("12.0",)}, (*CPU, "cuda")),
    ],
)
def test_builds_what_there_is_a_compiler_and_a_gpu_for(
    mode: str | None, change: dict[str, Any], parts: tuple[str, ...]
) -> None:
    environment = {} if mode is None else {"ZBKERN_BUILD": mode}
    assert decide(dataclasses.replace(Machine(environment, GCC, NVCC), **change)).parts == parts


@pytest.mark.parametrize("mode", ["", "on", "AUTO"])
def test_refuses_a_mode_that_is_none(mode: str) -> None:
    with pytest.raises(ValueError, match="ZBKERN_BUILD must be one of auto, cpu, cuda, off"):
        decide(Machine({"ZBKERN_BUILD": mode}, GCC, NVCC))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nvcc": None}, "no nvcc in CUDA_HOME"),
        ({"compiler": None}, "install g"),
        ({"cuda": (11, 8)}, "is of CUDA 11.8 and the kernels need 12.1"),
        ({"cuda": (0, 0)}, "is of CUDA 0.0"),
        ({"platform": "win32"}, "Linux only"),
    ],
)
def test_asking_for_cuda_where_it_cannot_be_says_why(change: dict[str, str | None], words: str) -> None:
    machine = dataclasses.replace(Machine({"ZBKERN_BUILD": "cuda"}, GCC, NVCC), **change)
    with pytest.raises(ValueError, match=f"(?s){words}.*ZBKERN_BUILD=cpu"):
        decide(machine)
    assert "cuda" not in decide(dataclasses.replace(machine, environment={})).parts


def test_number_of_jobs() -> None:
    assert decide(Machine({}, GCC, NVCC, ("9.0",), cores=6)) == Decision(("planner", "launcher", "cuda"), 6)
    assert decide(Machine({"MAX_JOBS": "2"}, GCC, NVCC, cores=6)).jobs == 2
    for wrong in ("0", "-1", "many"):
        with pytest.raises(ValueError, match="MAX_JOBS must be a positive number"):
            decide(Machine({"MAX_JOBS": wrong}, GCC, NVCC))


def test_finds_the_compiler_that_is_named(tmp_path: Path) -> None:
    compiler = executable(tmp_path / "my-c++")
    assert decision.find_compiler({"CXX": f"{compiler} -pipe"}, "linux") == compiler
    assert decision.find_compiler({"CXX": str(tmp_path / "absent")}, "linux") is None


def test_finds_nvcc_in_order(tmp_path: Path) -> None:
    home, path, on_path, default = (tmp_path / name for name in ("home", "path", "on_path", "default"))
    environment = {"CUDA_HOME": str(home), "CUDA_PATH": str(path), "PATH": f"{tmp_path}:{on_path}"}
    assert decision.find_nvcc(environment, str(default)) is None
    for where in (default / "bin", on_path, path / "bin", home / "bin"):  # the later, the more it counts
        nvcc = executable(where / "nvcc")
        assert decision.find_nvcc(environment, str(default)) == nvcc


def test_asks_nvcc_for_its_version(tmp_path: Path) -> None:
    assert decision.cuda_version(executable(tmp_path / "nvcc", FAKE_NVCC.format(log=tmp_path / "log"))) == (13, 0)
    assert decision.cuda_version(executable(tmp_path / "other", "#!/bin/sh\necho 1.2\n")) == (0, 0)
    assert decision.cuda_version(str(tmp_path / "absent")) == (0, 0)


def test_objects_are_named_by_what_they_are_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SOURCES", tmp_path)
    source, header, other = (tmp_path / name for name in ("cuda_a.cu", "cuda_a.h", "cuda_b.h"))
    header.write_text('#include "cuda_b.h"\n')
    other.write_text("int b;\n")
    source.write_text('#include "cuda_a.h"\nint a;\n')
    toolkit = cuda.Toolkit("/x/nvcc", "13.0", Path("/x/cutlass"), "4.2.0")

    def name(toolkit: cuda.Toolkit = toolkit, flags: tuple[str, ...] = ("-O3", "-I/x")) -> str:
        return cuda.content_hash(source, [toolkit.nvcc, *flags, str(source)], toolkit)

    first = name()
    assert name(dataclasses.replace(toolkit, nvcc="/y/nvcc"), ("-O3", "-I/y")) == first  # where things lie is no matter
    assert name(flags=("-O2", "-I/x")) != first
    assert name(dataclasses.replace(toolkit, version="13.1")) != first
    assert name(dataclasses.replace(toolkit, cutlass_version="4.3.0")) != first
    other.write_text("int c;\n")  # included by what it includes
    assert name() != first
    bindings, found = source.with_suffix(".cpp"), []
    bindings.write_text(source.read_text())
    for suffix in (".cpython-311-x.so", ".cpython-312-x.so"):
        monkeypatch.setattr(cuda, "SUFFIX", suffix)
        found.append([cuda.content_hash(file, ["c++"], toolkit) for file in (source, bindings)])
    assert found[0][0] == found[1][0]  # the same kernels for every Python
    assert found[0][1] != found[1][1]


FAKE_NVCC = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;; esac
echo "$@" >> {log}
case "$*" in *broken*) echo "error: it is broken"; exit 2;; esac
while [ "$1" != -o ]; do shift; done; echo compiled > "$2"
"""


@pytest.fixture
def toolkit_of_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A compiler that writes down how it was called, and sources for it."""
    sources, log = tmp_path / "csrc", tmp_path / "log"
    sources.mkdir()
    for name in ("cuda_one.cu", "cuda_two.cu"):
        (sources / name).write_text(f"int {name[5:8]};\n")
    nvcc = executable(tmp_path / "nvcc", FAKE_NVCC.format(log=log))
    monkeypatch.setattr(cuda, "SOURCES", sources)
    monkeypatch.setattr(cuda, "REPORT", tmp_path / "report")
    monkeypatch.setattr(cuda, "find_toolkit", lambda nvcc, version: cuda.Toolkit(nvcc, "13.0", Path("/x"), "4.2.0"))
    told: list[str] = []
    monkeypatch.setattr(cuda, "tell", told.append)
    environment = {"ZBKERN_BUILD_CACHE": str(tmp_path / "cache"), "PATH": os.environ["PATH"]}
    machine = Machine(environment, GCC, nvcc, ("9.0",))

    def build() -> list[str]:
        log.write_text("")
        cuda.build(tmp_path / "lib" / "_cuda.so", machine)
        return [next((word for word in ("one", "two") if f"{word}.cu" in line), "link") for line in log.open()]

    return SimpleNamespace(build=build, sources=sources, cache=tmp_path / "cache", told=told, machine=machine, log=log)


def test_compiles_only_what_the_cache_lacks(toolkit_of_shell: SimpleNamespace) -> None:
    build, source = toolkit_of_shell.build, toolkit_of_shell.sources / "cuda_one.cu"
    before = source.read_text()
    assert sorted(build()) == ["link", "one", "two"]
    assert build() == ["link"]
    source.write_text("int changed;\n")
    assert sorted(build()) == ["link", "one"]
    source.write_text(before)
    assert build() == ["link"]


def test_says_what_takes_minutes_and_how_to_skip_it(toolkit_of_shell: SimpleNamespace) -> None:
    toolkit_of_shell.build()
    (line,) = toolkit_of_shell.told
    assert "compiling 2 CUDA sources" in line
    assert "ZBKERN_BUILD=cpu" in line
    toolkit_of_shell.build()  # all is in the cache
    assert toolkit_of_shell.told == [line]


def test_a_line_goes_to_the_terminal_or_else_where_pip_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = tmp_path / "tty"
    cuda.tell("minutes", str(terminal))
    assert terminal.read_text() == "\nminutes\n"
    assert capsys.readouterr().out == ""
    cuda.tell("minutes", str(tmp_path / "absent" / "tty"))
    assert capsys.readouterr().out == "minutes\n"


def test_a_failing_compile_names_its_command_and_leaves_nothing_half_built(toolkit_of_shell: SimpleNamespace) -> None:
    (toolkit_of_shell.sources / "cuda_broken.cu").write_text("no\n")
    with pytest.raises(RuntimeError, match=r"(?s)-c \S*cuda_broken.cu.*error: it is broken.*ZBKERN_BUILD=cpu"):
        toolkit_of_shell.build()
    assert not list(toolkit_of_shell.cache.glob("*broken*"))


def test_without_cutlass_headers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install 'nvidia-cutlass"):
        cuda.find_toolkit(NVCC, (13, 0))


def test_sources_need_no_torch() -> None:
    sources = sorted((ROOT / "csrc").glob("*.*"))
    assert len(sources) >= 4
    assert all("torch/" not in path.read_text() for path in sources)


@pytest.fixture
def planner_build(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """setup.py's build of an extension of one source; `compiled` counts how often."""
    source, found = tmp_path / "a b.cpp", SimpleNamespace(compiled=0, fails=False, source=tmp_path / "a b.cpp")
    source.write_text("int a;\n")
    monkeypatch.setenv("ZBKERN_BUILD_CACHE", str(tmp_path / "cache"))
    build = script.LoudBuild(Distribution({"ext_modules": [Extension("zbkern._planner", [str(source)])]}))
    build.build_lib, build.build_temp = str(tmp_path / "lib"), str(tmp_path / "temp")
    build.ensure_finalized()
    found.target = Path(build.get_ext_fullpath("zbkern._planner"))

    def compile_one(self: object, ext: object) -> None:
        assert build.force
        if found.fails:
            raise OSError("exit code 1")
        found.compiled += 1
        found.target.parent.mkdir(parents=True, exist_ok=True)
        found.target.write_text(source.read_text())

    def run() -> None:
        build.compiler = SimpleNamespace(compiler_so_cxx=["g++"])
        build.build_extension(build.extensions[0])

    found.run = run
    monkeypatch.setattr(script.build_ext, "build_extension", compile_one)
    return found


def test_a_failing_compile_says_how_to_do_without(planner_build: SimpleNamespace) -> None:
    planner_build.fails = True
    with pytest.raises(RuntimeError, match=r"(?s)zbkern\._planner failed: exit code 1.*ZBKERN_BUILD=off"):
        planner_build.run()
    assert not planner_build.target.exists()


def test_the_planner_is_compiled_again_only_where_it_changed(planner_build: SimpleNamespace) -> None:
    for text, compiled in (("int a;\n", 1), ("int a;\n", 1), ("int b;\n", 2), ("int a;\n", 2)):
        planner_build.source.write_text(text)
        planner_build.target.unlink(missing_ok=True)
        planner_build.run()
        assert planner_build.compiled == compiled
        assert planner_build.target.read_text() == text


def test_a_wheel_has_nothing_of_an_earlier_build(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.build, "run", lambda self: None)
    command = script.FreshBuild(Distribution())
    command.build_base = str(tmp_path)
    command.ensure_finalized()
    left = [Path(command.build_lib, "zbkern", name) for name in ("_cuda.so", "removed.py")]
    left[0].parent.mkdir(parents=True)
    for path in left:
        path.touch()
    command.run()
    assert not any(path.exists() for path in left)
