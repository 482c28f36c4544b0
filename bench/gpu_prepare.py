"""What a session on a GPU need not compile: made on a machine without one, and taken where it fits.

FOLDER/triton is Triton's cache: kernels, and the C part of their launches for each Python. FOLDER/extension has the
CUDA extension for each Python, and its kernels as objects, for another Python to link with bindings of its own.
FOLDER/prepared.json says what they are of.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")

DTYPES = ("bfloat16", "float16", "float32")
SHAPE = (1000, 528, 784)
"""M, N and K at which a session checks every kernel."""

PROBED = (512, 128, 256)
"""Tokens, N and K of the W that tells whether launches can be replayed."""

SOURCES = ROOT / "csrc"
TOOLS, OBJECTS, CUTLASS = "build-tools", "objects", "cutlass-version.txt"

Run = tuple[str, Callable[[], object]]


# ---- on the machine without a GPU ----


def prepare(
    folder: Path, capability: int, only: str, limit: int, pythons: Sequence[str] = PYTHONS, rows: Sequence[str] = ()
) -> int:
    """Compiles what a session would compile on a GPU of that capability; prints what it is, and how much.

    limit: bytes that may stay: kernels of the least worth are left out. pythons: interpreters that the extension is
    built for. Returns 1 where something cannot be built, or where the driver would refuse a launch.
    """
    cache = folder / "triton"
    cache.mkdir(parents=True, exist_ok=True)
    settings = {"TRITON_CACHE_DIR": str(cache.resolve()), "TRITON_STORE_BINARY_ONLY": "1", "TRITON_INTERPRET": "0"}
    os.environ |= settings
    from triton import knobs

    from bench import ahead, descriptors, fake_driver

    name_kernels()
    interpreters, problems = _interpreters(pythons)
    if only == "":
        problems += _build_extension(folder / "extension", interpreters, capability)
    os.environ["ZBKERN_LAUNCHERS"] = json.dumps([[each.include, each.suffix] for each in interpreters])
    machine = fake_driver.gpu(capability, answers=False)
    with mock.patch.object(knobs.build, "impl", _build_for_all), machine, ahead.Compilers() as compilers:
        runs = [(name, run) for name, run in to_prepare(rows) if re.search(only, name)]
        problems += [f"refused: {fault}" for fault in descriptors.faults_of_runs(runs)]
        count = compilers.compile((run for _, run in runs), work=compile_with_launcher)
        problems += compilers.problems
    identity = {"capability": capability, **triton_identity()}
    (folder / "prepared.json").write_text(json.dumps(identity, indent=1) + "\n")
    dropped = drop_youngest(cache, limit - (_size(folder) - _size(cache)))
    without = f", {dropped} left out" if dropped else ""
    for module in sorted((folder / "extension").glob("*.so")):
        print(f"{module.name}: {module.stat().st_size / 2**20:.1f} MiB")
    print(f"{count} kernels{without}, {_size(folder) / 2**20:.1f} MiB in {folder}")
    if _size(folder) > limit:
        problems.append(f"the extension alone takes more than {limit / 2**20:.1f} MiB")
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


def to_prepare(rows: Sequence[str] = ()) -> Iterator[Run]:
    """(name, run), the most worth first: a session's probe, every kernel as it checks it in bfloat16, then the rows,
    then the other dtypes."""
    import torch

    from bench import gpu
    from tests.support import every_launch
    from zbkern.kernels.triton import kernels as triton_kernels

    def kernels(dtype: str) -> Iterator[Run]:
        random = every_launch.Random(getattr(torch, dtype), "cpu")
        for name, case in every_launch.cases(triton_kernels, random, *SHAPE).items():
            yield f"{name} {dtype}", case.run

    tokens, n, k = PROBED
    x, dy, dweight = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((tokens, k), (tokens, n), (n, k)))
    yield "replayed launches", lambda: triton_kernels.linear_wgrad([(x, dy)], (dweight.float(), None), True)
    first, *others = DTYPES
    yield from kernels(first)
    for row in rows:
        if has_kernels(row):
            for run in gpu.ours(*row_and_bench(row, "cpu", "triton")):
                yield row, run
    for dtype in others:
        yield from kernels(dtype)


def has_kernels(row: str) -> bool:
    """Whether it runs kernels of Triton: the ceilings are torch's."""
    return not row.endswith("ceiling")


def row_and_bench(name: str, device: str, impl: str, tiny: bool = False, written: bool = False) -> tuple[list, Any]:
    """A row of `bench.gpu`, and what it runs on. written: operands have values, which only a measurement needs."""
    import torch

    from bench import gpu_rows
    from bench.gpu_case import Bench, Sizes

    class Unwritten(Bench):
        def random(self, *shape: int) -> torch.Tensor:
            return self.empty(*shape)

    sizes = Sizes.tiny() if tiny else Sizes()
    bench = (Bench if written else Unwritten)(torch.device(device), torch.bfloat16, impl, sizes)
    return [row for row in gpu_rows.ROWS if row.name == name], bench


@functools.cache
def name_kernels() -> None:
    """Asks Triton for the key of every kernel's source, in one order in every process: it depends on which kernels were
    asked for before (3.6: a function that calls one that is being asked for takes a placeholder for it), and what one
    process has compiled another would not find."""
    from build_tools.kernels import jobs
    from zbkern.kernels.triton.common import Kernel

    for module in sorted(jobs.kernel_modules()):
        for _, value in sorted(vars(importlib.import_module(module)).items()):
            if isinstance(value, Kernel):
                _ = value.function.cache_key


def compile_with_launcher(job: Any) -> None:
    """A kernel, and the C part of its launch for each Python: a second of a C compiler in each process, otherwise."""
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia

    from bench import ahead, fake_driver

    name_kernels()
    fake_driver.load()
    knobs.build.impl = _build_for_all
    nvidia.CudaUtils()
    compiled = ahead.compile_job(job)
    nvidia.CudaLauncher(compiled.src, compiled.metadata)


def _build_for_all(
    name: str, source: str, folder: str, library_folders: list[str], includes: list[str], libraries: list[str]
) -> str:
    """As triton.runtime.build._build (3.6), for all interpreters: into Triton's cache, and ours where Triton looks."""
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    compiler = os.environ.get("CC") or shutil.which("gcc") or "cc"
    ours = (sysconfig.get_paths()["include"], sysconfig.get_config_var("EXT_SUFFIX"))
    others = [tuple(each) for each in json.loads(os.environ.get("ZBKERN_LAUNCHERS", "[]"))]
    cache = get_cache_manager(hashlib.sha256((Path(source).read_text() + platform_key()).encode()).hexdigest())
    for include, suffix in dict.fromkeys((*others, ours)):  # with ours there, no other process begins
        target = Path(folder, name + suffix)
        paths = [*(f"-L{each}" for each in library_folders), *(f"-I{each}" for each in (*includes, folder, include))]
        needed = [f"-l:{each}" for each in libraries]
        options = ["-O3", "-s", "-shared", "-fPIC", "-Wno-psabi"]
        subprocess.run([compiler, source, *options, "-o", str(target), *needed, *paths], check=True)
        cache.put(target.read_bytes(), target.name, binary=True)
    return str(Path(folder, name + ours[1]))


def _interpreters(pythons: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Those that are there, and what is wrong with the others."""
    from build_tools import cuda

    found, problems = [], []
    for python in pythons:
        try:
            found.append(cuda.interpreter_at(python))
        except RuntimeError as error:
            problems.append(f"no extension for {python}: {error}")
    return list(dict.fromkeys(found)), problems


def _build_extension(folder: Path, interpreters: Sequence[Any], capability: int) -> list[str]:
    """The extension for each interpreter, for GPUs of that capability alone; what went wrong."""
    from build_tools import cuda
    from build_tools.decision import this_machine

    settings = {"ZBKERN_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": _architecture(capability)}
    machine = this_machine({**os.environ, **settings})
    targets = {each: folder / f"_cuda{each.suffix}" for each in (*interpreters, cuda.this_interpreter())}
    try:
        _find_build_tools(cuda.cache_folder(machine) / TOOLS)
        if machine.nvcc is None:
            raise ValueError("no nvcc was found")
        objects, *_ = cuda.build_for(targets, machine)
        _keep_objects(folder / OBJECTS, objects, cuda.find_toolkit(machine.nvcc, machine.cuda).cutlass_version)
    except (RuntimeError, ValueError, subprocess.CalledProcessError) as error:
        return [f"no CUDA extension: {error}"]
    return []


def _architecture(capability: int) -> str:
    return "9.0a" if capability == 90 else f"{capability // 10}.{capability % 10}"


def _keep_objects(folder: Path, objects: Sequence[Path], cutlass: str) -> None:
    """Of the kernels, which are the same for every Python."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in objects:
        if path.name.startswith(tuple(f"{source.stem}-" for source in SOURCES.glob("cuda_*.cu"))):
            shutil.copy2(path, folder)
            shutil.copy2(path.with_suffix(".txt"), folder)
    (folder / CUTLASS).write_text(cutlass)


def _find_build_tools(folder: Path) -> None:
    """Makes what the extension is built with importable, installed into a folder of its own where it is missing."""
    from build_tools.backend import CUDA_REQUIREMENTS

    if all(importlib.util.find_spec(name) for name in ("pybind11", "ninja", "cutlass_library")):
        return
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), "pybind11>=2.12", *CUDA_REQUIREMENTS], check=True)
    sys.path.append(str(folder))
    importlib.invalidate_caches()


def drop_youngest(folder: Path, limit: int) -> int:
    """Deletes kernels of Triton's cache, those compiled last first, until all files take at most so many bytes; how
    many. They were compiled in the order of their worth, so the last are worth least."""
    kernels = sorted({path.parent for path in folder.glob("*/*.cubin")}, key=lambda kernel: kernel.stat().st_mtime_ns)
    dropped, size = 0, _size(folder)
    while size > limit and kernels:
        youngest = kernels.pop()
        size -= _size(youngest)
        shutil.rmtree(youngest)
        dropped += 1
    return dropped


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ---- on the machine with one ----


@functools.cache
def triton_identity() -> dict[str, str]:
    """version; key: what Triton's cache is keyed by; but: the same without its library's hash, which differs between
    builds of one version for several Pythons."""
    import triton
    from triton.runtime import cache

    (library,) = Path(triton.__file__).parent.glob("_C/libtriton*.so")
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    key = cache.triton_key()
    return {"version": triton.__version__, "library": digest, "key": key, "but": key.replace(digest, "")}


def adopt(folder: Path, package: Path = ROOT / "zbkern") -> str:
    """Makes Triton's cache there this program's, and puts the extension for this Python into the package, where a build
    would put it; says what became of the extension. Triton wrote down where its cache was, which may have moved."""
    cache = (folder / "triton").resolve()
    for group in cache.glob("*/__grp__*.json"):
        paths = json.loads(group.read_text())["child_paths"]
        here = {name: str(group.parent / name) for name in paths}
        if here != paths:
            group.write_text(json.dumps({"child_paths": here}))
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    carried = folder / "extension" / module_name()
    if (package / carried.name).exists():
        return "not taken: one is built here"
    if not carried.exists():
        return f"there is no {carried.name}"
    shutil.copy2(carried, package / carried.name)
    return f"taken: {carried.name}"


def module_name() -> str:
    """Of the extension for this Python."""
    return f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"


def module_loads(module: Path) -> bool:
    """Whether this Python loads it as the extension, and it is of these sources. In a process of its own."""
    from build_tools import cuda

    text = f"""if True:
        import importlib.util
        found = importlib.util.spec_from_file_location("zbkern._cuda", {str(module)!r})
        made = importlib.util.module_from_spec(found)
        found.loader.exec_module(made)
        print(made.SOURCES_HASH)
    """
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    return module.exists() and done.returncode == 0 and done.stdout.strip() == cuda.sources_hash()


def build_extension(folder: Path | None, module: Path, capability: int) -> None:
    """The extension for this Python: its bindings are compiled, half a minute, and linked with the objects in `folder`;
    without those, all of it is. Raises RuntimeError or ValueError where that cannot be."""
    from build_tools import cuda
    from build_tools.decision import this_machine, why_no_cuda

    objects = None if folder is None else folder / "extension" / OBJECTS
    carried = objects is not None and (objects / CUTLASS).exists()
    environment = {**os.environ, "ZBKERN_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": _architecture(capability)}
    if carried:
        environment["ZBKERN_BUILD_CACHE"] = str(objects)
    machine = this_machine(environment)
    reason = why_no_cuda(machine)
    if reason is not None or machine.nvcc is None:
        raise ValueError(f"{module.name} is not built: {reason}")
    toolkit = None
    if objects is not None and carried:
        version = ".".join(map(str, machine.cuda))
        toolkit = cuda.Toolkit(machine.nvcc, version, Path("cutlass"), (objects / CUTLASS).read_text())
    cuda.build_for({cuda.this_interpreter(): module}, machine, toolkit)


def key_of(folder: Path | None) -> tuple[str, str]:
    """(what kernels are named by in Triton's cache, whether those that were prepared fit).

    Kernels that the same Triton compiled for another Python are the same kernels: only the hash of its library, which
    is in the name of each, is another.
    """
    ours = triton_identity()
    file = None if folder is None else folder / "prepared.json"
    if file is None or not file.exists():
        return ours["key"], f"none: there is no {file}" if file is not None else "none"
    theirs = json.loads(file.read_text())
    if theirs["key"] == ours["key"]:
        return ours["key"], f"for {theirs['capability']}, compiled by this Triton"
    if theirs["but"] == ours["but"]:
        return theirs["key"], f"for {theirs['capability']}, compiled by this Triton for another Python"
    return ours["key"], f"not used: by Triton {theirs['version']}, and this is {ours['version']}, or built differently"


def use_key(key: str) -> None:
    """In this process Triton need not read all of its files, hundreds of megabytes, to find it out."""
    from triton.runtime import cache

    cache.triton_key = lambda: key
