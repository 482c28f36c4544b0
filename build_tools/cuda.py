"""Compiles csrc/cuda_* with nvcc and links zbkern._cuda.

An object is named by a hash of everything that made it: its source, the headers beside it, the flags, nvcc and the
CUTLASS headers. What is in the cache is not compiled again, in whichever checkout or build it was made. The
compiler's report on registers and spills is kept beside each object, and that of the last build in REPORT.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from build_tools.decision import Machine, decide

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
CACHE = ROOT / "build" / "cuda"
REPORT = ROOT / "build" / "cuda_report.txt"

# asserts would serialise wgmma; -Xptxas -v makes the report
FLAGS = "-std=c++17 -O3 -DNDEBUG --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a -Xptxas -v"
HOST_FLAGS = "-std=c++17 -O2"
LIBRARY_FLAGS = ("-Xcompiler", "-fPIC,-fvisibility=hidden")

SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX")
"""Of an extension module's file, for this Python."""

HOW_TO_SKIP = "to install without the CUDA kernels: ZBKERN_BUILD=cpu"


@dataclass(frozen=True)
class Toolkit:
    """nvcc: its path. version: such as "13.0". cutlass: the headers' folder, and their version."""

    nvcc: str
    version: str
    cutlass: Path
    cutlass_version: str


def build(target: Path, machine: Machine) -> None:
    """Makes the extension module `target`. Raises RuntimeError with the failing command and the compiler's words."""
    assert machine.nvcc is not None
    toolkit = find_toolkit(machine.nvcc, machine.cuda)
    objects = compile_objects(toolkit, decide(machine).jobs, cache_folder(machine))
    target.parent.mkdir(parents=True, exist_ok=True)
    _run([toolkit.nvcc, "-shared", "-cudart", "static", "-o", str(target), *map(str, objects)], "linking")
    reports = [path.with_suffix(".txt").read_text() for path in objects]
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join([sources_hash(), *reports]))


def cache_folder(machine: Machine) -> Path:
    return Path(machine.environment.get("ZBKERN_BUILD_CACHE") or CACHE)


def compile_objects(toolkit: Toolkit, jobs: int, cache: Path) -> list[Path]:
    """The objects of every source, compiled where the cache lacks them, so many at a time."""
    cache.mkdir(parents=True, exist_ok=True)
    commands = {}
    for source in sources():
        command = [toolkit.nvcc, *flags(source, toolkit), "-c", str(source)]
        commands[cache / f"{source.stem}-{content_hash(source, command, toolkit)}.o"] = command
    missing = {path: command for path, command in commands.items() if not path.exists()}
    if missing:
        tell(f"zbkern: compiling {len(missing)} CUDA sources, which takes minutes; {HOW_TO_SKIP}")
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(_compile, missing, missing.values()))
    return list(commands)


def tell(line: str, terminal: str = "/dev/tty") -> None:
    """Prints a line where a user sees it: pip shows what a build prints with -v only, so it goes to the terminal."""
    try:
        with open(terminal, "w") as screen:
            screen.write(f"\n{line}\n")  # pip may be in the midst of a line
    except OSError:  # there is none
        print(line, flush=True)


def sources() -> list[Path]:
    """The files to compile, kernels first: they take the longest."""
    return [*sorted(SOURCES.glob("cuda_*.cu")), *sorted(SOURCES.glob("cuda_*.cpp"))]


def with_headers(source: Path) -> list[Path]:
    """A source and what it includes of ours, itself or through another."""
    files = [source]
    for path in files:
        names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        files += [SOURCES / name for name in names if SOURCES / name not in files]
    return files


def sources_hash() -> str:
    """Tells whether a built extension is of the sources at hand."""
    files = sorted({path for source in sources() for path in with_headers(source)})
    return hash_of(*(path.read_bytes() for path in files))


def content_hash(source: Path, command: list[str], toolkit: Toolkit) -> str:
    """A hash of everything that an object depends on, without paths of this machine."""
    words = [word for word in command if not word.startswith(("-I", "/"))]
    texts = [path.read_bytes() for path in with_headers(source)]
    versions = [toolkit.version, toolkit.cutlass_version]
    if source.suffix == ".cpp":  # kernels are the same for every Python
        versions.append(SUFFIX)
    return hash_of(*texts, " ".join(words).encode(), " ".join(map(str, versions)).encode())


def flags(source: Path, toolkit: Toolkit) -> list[str]:
    """The compiler's options for one source. Only bindings see Python; only kernels see CUTLASS."""
    if source.suffix == ".cpp":
        import pybind11

        built = {
            "ZBKERN_CUTLASS_VERSION": toolkit.cutlass_version,
            "ZBKERN_SOURCES_HASH": sources_hash(),
        }
        return [
            *HOST_FLAGS.split(),
            *LIBRARY_FLAGS,
            *(f'-D{name}="{value}"' for name, value in built.items()),
            *(f"-I{path}" for path in (SOURCES, pybind11.get_include(), sysconfig.get_paths()["include"])),
        ]
    return [*FLAGS.split(), *LIBRARY_FLAGS, f"-I{SOURCES}", f"-I{toolkit.cutlass}"]


def find_toolkit(nvcc: str, cuda: tuple[int, int]) -> Toolkit:
    """The compiler and the CUTLASS headers. Raises RuntimeError when the headers are not there."""
    package = importlib.util.find_spec("cutlass_library")
    if package is None or package.origin is None:
        raise RuntimeError(
            "the CUDA kernels need the CUTLASS headers at build time: pip install 'nvidia-cutlass==4.2.*' "
            f"(pip does so itself without --no-build-isolation); {HOW_TO_SKIP}"
        )
    folder = Path(package.origin).parent / "source" / "include"
    version = (folder / "cutlass" / "version.h").read_text()
    numbers = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", version)
    return Toolkit(nvcc, f"{cuda[0]}.{cuda[1]}", folder, ".".join(numbers))


def _compile(path: Path, command: list[str]) -> None:
    """Makes an object, which appears under its name only when it is whole, and the report beside it."""
    part = path.with_suffix(f".{os.getpid()}")
    path.with_suffix(".txt").write_text(_run([*command, "-o", str(part)], "compiling the CUDA kernels"))
    os.replace(part, path)
    print(f"nvcc {path.stem}", flush=True)  # pip shows it with -v


def _run(command: list[str], doing: str) -> str:
    """The output of the command. Raises RuntimeError with it where the command fails."""
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if process.returncode:
        raise RuntimeError(
            f"{doing} failed: exit code {process.returncode}\n  command: {shlex.join(command)}\n"
            f"{process.stdout[-20000:]}\n  {HOW_TO_SKIP}"
        )
    return process.stdout


def hash_of(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
