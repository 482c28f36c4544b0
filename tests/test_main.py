from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import zbkern
from zbkern import __main__, info
from zbkern.kernels import dispatch, spec


def test_info_names_every_op_and_what_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"zbkern {zbkern.__version__}" in text
    assert all(op in text for op in spec.OPS)
    assert "run through torch on" in text


def test_info_says_what_else_runs_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "why_not", lambda op, impl, *_: None if impl != "cuda" else "not here")
    assert "run through torch on cpu, where named through triton" in "\n".join(info.lines())


def test_info_says_what_of_the_cuda_kernels_was_built_and_why_not_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "zbkern._cuda", None)  # importing it fails as for a module that is not there
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert f"not built, but {nvcc} is here: install zbkern again with ZBKERN_BUILD=cuda" in "\n".join(info.lines())
    monkeypatch.setattr(info.shutil, "which", lambda *args, **options: None)
    assert "nvcc was not found; install the CUDA toolkit or set CUDA_HOME" in "\n".join(info.lines())
    built = SimpleNamespace(CUDA_VERSION=13010, CUTLASS_VERSION="4.2.0")
    monkeypatch.setitem(sys.modules, "zbkern._cuda", built)
    assert "built with CUDA 13.1 and CUTLASS 4.2.0 for compute capability 9.0" in "\n".join(info.lines())


@pytest.mark.parametrize("built", [None, SimpleNamespace(CUDA_VERSION=13010, CUTLASS_VERSION="4.2.0")])
@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)])
def test_info_tells_nobody_to_build_what_their_gpu_cannot_run(
    capability: tuple[int, int], built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zbkern.kernels import dispatch
    from zbkern.kernels.cuda import wgrad as cuda_wgrad

    monkeypatch.setitem(sys.modules, "zbkern._cuda", built)
    monkeypatch.setattr(cuda_wgrad, "_cuda", built)
    visible = {"is_available": True, "device_count": 1, "get_device_name": "A GPU", "get_device_capability": capability}
    for name, answer in visible.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    for remembered in (dispatch.why_not, dispatch.resolve):
        monkeypatch.setattr(dispatch, remembered.__name__, remembered.__wrapped__)
    text = "\n".join(info.lines())
    assert ("ZBKERN_BUILD=cuda" in text or "CUDA_HOME" in text) == (capability == (9, 0) and built is None)
    if capability != (9, 0):
        assert "written for compute capability 9.0 and this GPU has {}.{}".format(*capability) in text
    assert ("and W over one microbatch: cuBLAS" in text) == (capability == (10, 0))


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("planner", "the best published schedule is the plan"),
        ("launcher", "each launch of a Triton kernel takes the host tens of microseconds"),
    ],
)
def test_info_says_what_is_compiled(name: str, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"zbkern._{name}", SimpleNamespace())
    assert f"{name:<15} compiled" in info.lines()
    monkeypatch.setitem(sys.modules, f"zbkern._{name}", None)
    assert f"{without}: install a C++ compiler, then install zbkern again" in "\n".join(info.lines())


def test_info_without_torch_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec, version = importlib.util.find_spec, info._version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else find_spec(name, *a))
    monkeypatch.setattr(info, "_version", lambda package: None if package == "torch" else version(package))
    lines = info.lines()
    assert any(line.startswith("torch") and "pip install torch" in line for line in lines)
    assert lines[-1].endswith("layers and pipelines need torch.")


def test_a_layer_without_torch_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(zbkern.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"zbkern.functional needs torch 2.8 or later: pip install torch"):
        zbkern.__getattr__("functional")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        __main__.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"zbkern {zbkern.__version__}\n"


def test_an_unknown_command_is_refused() -> None:
    process = subprocess.run([sys.executable, "-m", "zbkern", "fly"], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "invalid choice: 'fly'" in process.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = "plan --stages 8 --microbatches 64 --schedule zb_v --compare"
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "zbkern", *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
    process.stderr.close()


class Interrupted(ModuleType):
    """Ctrl-C while modules are imported."""

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "main", interrupted)
    assert __main__.main(["info"]) == 130
    monkeypatch.setitem(sys.modules, "zbkern.planning.command", Interrupted("zbkern.planning.command"))
    assert __main__.main(["info"]) == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is full")
def test_output_that_a_full_device_does_not_take_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "zbkern", "info"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "zbkern: the output could not be written: No space left on device"
    assert "Traceback" not in done.stderr
