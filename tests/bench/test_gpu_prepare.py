"""What a GPU elsewhere needs, made without one: within a size, for several Pythons, and taken where it fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from bench import gpu_prepare
from build_tools import cuda

ROOT = Path(__file__).parents[2]

SOME = "^(activation_|attention_fwd|replayed)"
"""The name of attention's kernel in Triton's cache depends on what a process has compiled before (name_kernels)."""


def session(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "bench.gpu_session", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_a_session_takes_what_was_prepared_and_moved_since(tmp_path: Path) -> None:
    made, moved, out = tmp_path / "made", tmp_path / "moved", tmp_path / "out"
    done = session("--prepare", "--out", str(made), "--python", sys.executable, "--only", SOME)
    assert done.stdout.splitlines()[-1].startswith("10 kernels, "), done.stdout + done.stderr
    assert not list(made.glob("triton/*/*.ptx"))  # only what is loaded
    assert len(list(made.glob(f"triton/*/*{sysconfig.get_config_var('EXT_SUFFIX')}"))) >= 2
    made.rename(moved)
    done = session("--rehearse", "--out", str(out), "--prepared", str(moved), "--only", SOME, "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "session.json").read_text())
    assert found["environment"]["prepared kernels"] == "for 90, compiled by this Triton"
    built = any(ROOT.glob("zbkern/_cuda*.so"))  # the others are made only where everything is
    said = "not taken: one is built here" if built else "there is no _cuda"
    assert found["environment"]["prepared extension"].startswith(said)
    compiled = [job["compiled"] for job in found["jobs"] if job["kind"] in ("probe", "kernel")]
    assert compiled == [{"from the cache": 1}] * 10  # nor was a launcher built


THIS = {"version": "3.6.0", "library": "b", "key": "3.6.0a-b-c", "but": "3.6.0a--c"}


@pytest.mark.slow
def test_what_tells_two_tritons_apart() -> None:
    found = gpu_prepare.triton_identity()
    assert found["key"].replace(found["library"], "") == found["but"] != found["key"]
    assert found["key"].startswith(found["version"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "for 90, compiled by this Triton"),
        ({"key": "of another build"}, "for 90, compiled by this Triton for another Python"),
        ({"key": "of another build", "but": "y", "version": "3.5.0"}, "not used: by Triton 3.5.0, and this is"),
    ],
)
def test_kernels_of_the_same_triton_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, said: str
) -> None:
    monkeypatch.setattr(gpu_prepare, "triton_identity", lambda: THIS)
    (tmp_path / "prepared.json").write_text(json.dumps({"capability": 90, **THIS, **changes}))
    key, answer = gpu_prepare.key_of(tmp_path)
    assert answer.startswith(said)
    assert (key == "of another build") == ("another Python" in said)
    assert key in ("of another build", THIS["key"])


def test_triton_looks_kernels_up_by_that_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import cache

    monkeypatch.setattr(cache, "triton_key", lambda: "of this build")
    parts = [SimpleNamespace(hash=lambda: "same")] * 3
    before = cache.get_cache_key(*parts, env_vars={})
    gpu_prepare.use_key("of another build")
    assert cache.get_cache_key(*parts, env_vars={}) == before.replace(before.partition("-same")[0], "of another build")


def test_nothing_was_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_prepare, "triton_identity", lambda: THIS)
    assert "there is no" in gpu_prepare.key_of(tmp_path)[1]
    assert gpu_prepare.key_of(None)[1] == "none"


def test_the_extension_goes_where_a_build_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    package, folder = tmp_path / "zbkern", tmp_path / "prepared" / "extension"
    name = f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    package.mkdir()
    folder.mkdir(parents=True)
    assert gpu_prepare.adopt(folder.parent, package) == f"there is no {name}"
    (folder / name).write_text("built elsewhere")
    assert gpu_prepare.adopt(folder.parent, package) == f"taken: {name}"
    assert (package / name).read_text() == "built elsewhere"
    assert gpu_prepare.adopt(folder.parent, package) == "not taken: one is built here"


FAKE_NVCC = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;; esac
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done; echo compiled > "$2"
"""


def test_another_python_links_what_was_compiled_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take minutes, and CUTLASS; a machine with a GPU often has nvcc, and neither the minutes nor CUTLASS."""
    pytest.importorskip("ninja")
    nvcc, log = tmp_path / "bin" / "nvcc", tmp_path / "log"
    nvcc.parent.mkdir()
    nvcc.write_text(FAKE_NVCC.format(log=log))
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("ZBKERN_BUILD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "pybind11", SimpleNamespace(get_include=lambda: "/pybind11"))
    monkeypatch.setattr(gpu_prepare, "_find_build_tools", lambda folder: None)
    monkeypatch.setattr(cuda, "tell", lambda line: None)
    monkeypatch.setattr(cuda, "find_toolkit", lambda nvcc, _: cuda.Toolkit(nvcc, "13.0", tmp_path, "4.2.1"))
    prepared = tmp_path / "prepared"
    assert gpu_prepare._build_extension(prepared / "extension", [], 90) == []
    assert (prepared / "extension" / gpu_prepare.module_name()).exists()  # this Python's in any case
    moved = tmp_path / "moved"
    prepared.rename(moved)

    def nothing(nvcc: str, version: tuple[int, int]) -> cuda.Toolkit:
        raise RuntimeError("the CUDA kernels need the CUTLASS headers")

    log.write_text("")
    monkeypatch.setattr(cuda, "find_toolkit", nothing)
    monkeypatch.setattr(cuda, "this_interpreter", lambda: cuda.Interpreter("/include", ".cpython-399-x.so"))
    module = tmp_path / "package" / "_cuda.cpython-399-x.so"
    gpu_prepare.build_extension(moved, module, 90)
    assert module.exists()
    assert {Path(word).name for word in log.read_text().split() if word.startswith("/") and "." in word} == {
        *("cuda_bindings.cpp", "cuda_wgrad.cpp", module.name, *(path.name for path in moved.rglob("*.o")))
    }
    assert not gpu_prepare.module_loads(module)  # it is no module
    with pytest.raises(RuntimeError, match="CUTLASS headers"):
        gpu_prepare.build_extension(None, module, 90)


def test_interpreters_that_are_not_there_are_named(tmp_path: Path) -> None:
    found, problems = gpu_prepare._interpreters([sys.executable, str(tmp_path / "python3.99"), sys.executable])
    assert found == [cuda.this_interpreter()]
    assert len(problems) == 1
    assert problems[0].startswith(f"no extension for {tmp_path / 'python3.99'}: ")


def test_the_kernels_compiled_last_are_left_out(tmp_path: Path) -> None:
    for age, name in enumerate(("first", "second", "third")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "kernel.cubin").write_bytes(bytes(1000))
        os.utime(folder, (age, age))
    assert gpu_prepare.drop_youngest(tmp_path, 3000) == 0
    assert gpu_prepare.drop_youngest(tmp_path, 1500) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    assert gpu_prepare.drop_youngest(tmp_path, 100) == 1
