"""What a test needs that is not everywhere: a GPU, a newer torch, a framework from PyPI."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from zbkern.kernels import dispatch

OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)


def why_no_gpu() -> str | None:
    """Why the tests of Triton kernels on a GPU cannot run here."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return dispatch.why_not("linear", "triton", "cuda", torch.bfloat16)


GPU = [pytest.mark.gpu, pytest.mark.skipif(why_no_gpu() is not None, reason=str(why_no_gpu()))]
"""The marks of such tests."""


def installed(factory: pytest.TempPathFactory, module: str, *requirements: str) -> str:
    """The folder of a framework, to append to sys.path: "" where the module is here already. It uses the torch that is
    here, and is installed once for all workers of a run. Skips where it cannot be had."""
    if importlib.util.find_spec(module) is not None:
        return ""
    import fcntl  # not on Windows, where none of these runs

    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"installed-{module}"
    folder.mkdir(exist_ok=True)
    said = folder / "said.txt"  # by pip
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
            pip += ["--no-compile", "--target", str(folder)]  # most of its files are never imported
            done = subprocess.run([*pip, *requirements], capture_output=True, text=True)
            said.write_text(done.stderr[-200:] if done.returncode else "")
    if said.read_text():
        pytest.skip(f"{requirements[0]} could not be installed: {said.read_text()}")
    return str(folder)
