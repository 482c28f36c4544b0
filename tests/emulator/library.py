"""The emulator of PTX: a libcuda.so.1 whose launches run on this machine's CPU, and what it says of them.

Modules are PTX text. It takes a minute to compile, from src/, into the user's cache.
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
from concurrent.futures import ThreadPoolExecutor
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
    shared = b"".join(file.read_bytes() for file in sorted(SOURCES.glob("*.h")))
    machine = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    key = " ".join([*FLAGS, machine]).encode() + shared

    def compiled(source: Path) -> Path:
        made = kept_in() / "emulator" / f"{source.stem}-{_digest(key + source.read_bytes())}.o"
        _once(made, [*FLAGS, f"-I{headers()}", "-c", str(source)])
        return made

    folder = kept_in() / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one compiles
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"), key=lambda file: -file.stat().st_size)))
        names = "".join(sorted(file.name for file in objects))
        library = folder / _digest(names.encode()) / "libcuda.so.1"
        _once(library, ["-shared", f"-Wl,-soname,{library.name}", "-Wl,-Bsymbolic", *map(str, objects)])
    return library.parent


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _once(made: Path, arguments: list[str]) -> None:
    if made.exists():
        return
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the emulator is compiled from C++, and there is no compiler: install g++")
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as beside:
        new = Path(beside, made.name)
        subprocess.run([compiler, *arguments, "-o", str(new)], check=True)
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
