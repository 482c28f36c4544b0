"""The emulator of PTX: a libcuda.so.1 whose launches run on this machine's CPU, and what it says of them.

Modules are PTX text. It is compiled from src/ into the user's cache, in 15 seconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from build_tools.kernels.aot import kept_in

SOURCES = Path(__file__).with_name("src")
FLAGS = ["-std=c++20", "-O3", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-march=native"]
FLAGS += ["-Wall", "-Wextra"]


class Finding(NamedTuple):
    """Something wrong in a launch. kind: "race", "out of bounds", "deadlock" and so on."""

    kernel: str
    kind: str
    text: str


class Launched(NamedTuple):
    kernel: str
    seconds: float


def headers() -> Path:
    """Where cuda.h is: Triton brings one."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None, "the emulator needs triton's cuda.h"
    assert triton.origin is not None
    return Path(triton.origin).parent / "backends" / "nvidia" / "include"


@functools.cache
def library_folder() -> Path:
    """Where libcuda.so.1 is, compiled when it is not there. Raises RuntimeError without a C++ compiler then."""
    files = sorted(SOURCES.iterdir())
    machine = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    key = b"\0".join([" ".join([*FLAGS, machine]).encode(), *(file.read_bytes() for file in files)])
    made = kept_in() / "emulator" / hashlib.sha256(key).hexdigest()[:16] / "libcuda.so.1"
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one compiles
        if not made.exists():
            _compile([file for file in files if file.suffix == ".cpp"], made)
    return made.parent


def _compile(sources: list[Path], made: Path) -> None:
    """All files as one, since the headers that each includes take most of its time."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the emulator is compiled from C++, and there is no compiler: install g++")
    with tempfile.TemporaryDirectory(dir=made.parent) as beside:
        whole, new = Path(beside, "emulator.cpp"), Path(beside, made.name)
        whole.write_text("".join(f'#include "{source}"\n' for source in sources))
        link = ["-shared", f"-Wl,-soname,{made.name}", "-Wl,-Bsymbolic"]
        subprocess.run([compiler, *FLAGS, f"-I{headers()}", *link, str(whole), "-o", str(new)], check=True)
        new.replace(made)


@functools.cache
def load() -> ctypes.CDLL:
    """The library, which this process takes for the driver from now on."""
    folder = library_folder()
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    found = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    found.emu_options.argtypes = [ctypes.c_ulonglong, ctypes.c_int, ctypes.c_int]
    found.emu_findings.restype = found.emu_launches.restype = ctypes.c_long
    found.emu_error.restype, found.emu_given.restype = ctypes.c_char_p, ctypes.c_void_p
    importlib.import_module("torch")  # whose allocator must be there for emu_watch
    found.emu_watch()
    return found


def given_to_driver(call: Callable[[], object]) -> bytes:
    """What the driver is given by a call: functions, grids, threads, shared memory, streams, parameters."""
    library, count = load(), ctypes.c_size_t()
    library.emu_keep(1)
    call()
    kept = ctypes.string_at(library.emu_given(ctypes.byref(count)), count.value)
    library.emu_keep(0)
    return kept


def _lines(function: Callable[..., int], *arguments: object) -> list[str]:
    size = 1 << 20
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = function(*arguments, buffer, ctypes.c_long(size))
        if needed <= size:
            return buffer.value.decode(errors="replace").splitlines()
        size = needed


def findings() -> list[Finding]:
    """Since the last call."""
    return [Finding(*line.split("\t")) for line in _lines(load().emu_findings)]


def launches() -> list[Launched]:
    """Since the last call."""
    rows = [line.split("\t") for line in _lines(load().emu_launches)]
    return [Launched(kernel, float(seconds)) for kernel, seconds in rows]
