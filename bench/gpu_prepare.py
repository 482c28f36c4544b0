"""What a session on a GPU need not compile: Triton's cache, filled on a machine without one (bench/gpu_session.py).

    python -m bench.gpu_prepare FOLDER [--capability 90]

FOLDER/triton is the cache: kernels, and the C part of their launches. FOLDER/extension has what is built here of the
launcher, the planner and the CUDA extension (`make cuda`). FOLDER/prepared.json says for which GPU, of which commit and
by which Triton: another compiles anew. --rehearse makes every launch with what FOLDER has, and compiles nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from zbkern import reporting

ROOT = Path(__file__).resolve().parents[1]

Run = tuple[str, Callable[[], object]]


def prepare(folder: Path, capability: int, only: str) -> int:
    """Compiles what a session would compile on a GPU of that capability, and makes every launch over a driver that
    checks it; prints what it is. Returns 1 where something does not compile, or where the driver would refuse it."""
    cache = folder / "triton"
    cache.mkdir(parents=True, exist_ok=True)
    settings = {"TRITON_CACHE_DIR": str(cache.resolve()), "TRITON_STORE_BINARY_ONLY": "1", "TRITON_INTERPRET": "0"}
    os.environ |= settings
    import torch

    from bench import ahead
    from tests.emulator.gpu import gpu

    with gpu(capability, runs=False), mock.patch.object(torch, "mm"), ahead.Compilers() as compilers:
        found = [(name, run) for name, run in runs() if matches(only, name)]
        count = compilers.compile((run for _, run in found), work=compile_with_launcher)
        problems = stale() + compilers.problems + errors(found)
    made = {"capability": capability, "triton": _triton_key(), "commit": reporting.environment()["commit"]}
    (folder / "prepared.json").write_text(json.dumps(made) + "\n")
    (folder / "extension").mkdir(exist_ok=True)
    for path in (built := _built()):
        shutil.copy2(path, folder / "extension")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print("\n".join(problems), end="\n" if problems else "")
    extensions = " and ".join(path.name for path in built) or "no extension, as none is built here"
    print(f"{count} kernels and {extensions}: {size / 2**20:.1f} MiB in {folder}")
    return 1 if problems else 0


def runs() -> Iterator[Run]:
    """(name, run): every kernel as tests run it in three dtypes, then the rows of `bench.gpu` and what the stages of
    `bench.virtual_stages` launch, on operands without values."""
    import torch

    from bench import gpu, gpu_rows, virtual_stages, w_sweep
    from bench.gpu_case import Bench, Sizes
    from tests.support import every_launch
    from zbkern.kernels.triton import kernels

    class Unwritten(Bench):
        def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
            return self.empty(*shape)

        def zeros(self, *shape: int) -> torch.Tensor:
            return self.empty(*shape, dtype=torch.float32)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, case in every_launch.cases(kernels, every_launch.Random(dtype, "cpu")).items():
            yield f"{name} {str(dtype)[6:]}", case.run
    bench = Unwritten(torch.device("cpu"), torch.bfloat16, "triton", Sizes())
    for row in gpu_rows.ROWS:
        if not row.name.endswith("ceiling"):
            yield from ((row.name, run) for run in gpu.ours(row, bench))
    yield from (("W designs", run) for run in w_sweep.launches(torch.device("cpu")))
    yield from (("virtual stages", run) for run in virtual_stages.launches(kernels))


def stale() -> list[str]:
    """Extensions that are built of other sources than those here, and would not be used, or be wrong, on a GPU."""
    from build_tools import cuda
    from zbkern.kernels.cuda import wgrad
    from zbkern.planning.planner import native

    built = {path.name.partition(".")[0] for path in _built()}
    problems = []
    if "_planner" in built and native.core is None:
        problems.append("_planner is built of other sources: build it again (ZBKERN_BUILD=cpu pip install -e .)")
    if "_cuda" in built and (wgrad._cuda is None or cuda.sources_hash() != wgrad._cuda.SOURCES_HASH):
        problems.append("_cuda is built of other sources: build it again (make cuda), or delete it")
    return problems


def errors(found: Sequence[Run]) -> list[str]:
    """What the driver, or a kernel's own Python, says against these."""
    return [f"{name}: {error}" for name, run in found if (error := _error_of(run))]


def rehearse(capability: int) -> int:
    """Makes every launch, with Triton's cache as it is, and says how many kernels, or C parts of launches, were not in
    it. Returns 1 where there are any."""
    import torch

    from tests.emulator.gpu import gpu

    cache = Path(os.environ["TRITON_CACHE_DIR"])
    before = {*cache.glob("*/*.cubin"), *cache.glob("*/*.so")}
    with gpu(capability, runs=False), mock.patch.object(torch, "mm"):
        problems = errors(list(runs()))
    compiled = {*cache.glob("*/*.cubin"), *cache.glob("*/*.so")} - before
    print("\n".join([*problems, f"{len(before)} files prepared, {len(compiled)} compiled"]))
    return 1 if problems or compiled else 0


def compile_with_launcher(job: Any) -> None:
    """A kernel, and the C part of its launch: as Triton looks it up with the command `file` on PATH, and without."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import build

    from build_tools.kernels.jobs import compile_job
    from tests.emulator import library

    library.load()
    compiled = compile_job(job)
    for format_of_programs in ("ELF", ""):
        with mock.patch.object(platform, "architecture", return_value=("64bit", format_of_programs)):
            if hasattr(build.platform_key, "cache_clear"):
                build.platform_key.cache_clear()
            nvidia.CudaUtils()
            nvidia.CudaLauncher(compiled.src, compiled.metadata)


def adopt(folder: Path, package: Path = ROOT / "zbkern") -> str:
    """Makes Triton's cache there that of the programs that this one starts, and puts extensions where a build would put
    them; says what becomes of both. Triton wrote down where its cache was, which may have moved."""
    cache = (folder / "triton").resolve()
    for group in cache.glob("*/__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in names}}))
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    made = json.loads((folder / "prepared.json").read_text())
    fits = "taken" if made["triton"] == _triton_key() else "not used: another Triton, or one built for another Python"
    extensions = sorted((folder / "extension").glob("_*.so"))
    for path in extensions:
        beside = package / f"{path.name}.new"
        shutil.copy2(path, beside)
        beside.replace(package / path.name)  # a process that has it loaded keeps the old file
    taken = ", ".join(path.name.partition(".")[0] for path in extensions) or "none"
    return f"kernels for {made['capability']} of commit {made['commit']}: {fits}; extensions: {taken}"


def matches(only: str, name: str) -> bool:
    return re.search(only, name) is not None


def _error_of(run: Callable[[], object]) -> str | None:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _triton_key() -> str:
    from triton.runtime import cache

    return cache.triton_key()


def _built() -> list[Path]:
    """The extensions that are built here for this Python."""
    found = (importlib.util.find_spec(f"zbkern.{name}") for name in ("_launcher", "_planner", "_cuda"))
    return [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that is not here")
    parser.add_argument("--only", default="", help="kernels and rows with this regular expression")
    parser.add_argument("--rehearse", action="store_true", help="launch what is there, and compile nothing")
    arguments = parser.parse_args(argv)
    if not arguments.rehearse:
        return prepare(arguments.folder, arguments.capability, arguments.only)
    print(adopt(arguments.folder))
    return rehearse(arguments.capability)


if __name__ == "__main__":
    sys.exit(main())
