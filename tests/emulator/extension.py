"""Runs the kernels of the CUDA extension (csrc/cuda_*) in the emulator: W, and merged W with biases, in clusters.

    python -m tests.emulator.extension --seeds 0 1 2

nvcc makes PTX of them instead of machine code, in minutes, which is kept; the extension is linked without the CUDA
runtime, for which the emulator stands in. Returns 1 where a case has a fault, 2 where there is no nvcc.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from build_tools import cuda, decision
from build_tools.kernels.aot import kept_in
from tests.emulator import library
from tests.emulator.cases import BF16, FP32, Case, faults
from tests.support import launch_checks as checks


def build() -> tuple[Path, list[Path]]:
    """The extension and the PTX of its kernels. Raises RuntimeError or ValueError where it cannot be built."""
    machine = decision.this_machine()
    if reason := decision.why_no_cuda(machine):
        raise ValueError(reason)
    assert machine.nvcc is not None
    toolkit = cuda.find_toolkit(machine.nvcc, machine.cuda)
    folder = kept_in() / "emulator" / f"extension-{cuda.sources_hash()}-{cuda.SUFFIX.strip('.')}"
    made = folder / f"_cuda{cuda.SUFFIX}"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for source in cuda.sources():
            flags = [flag.replace("code=sm_90a", "code=compute_90a") for flag in cuda.flags(source, toolkit)]
            keep = ["--keep", "--keep-dir", str(folder)] if source.suffix == ".cu" else []
            part = folder / f"{source.stem}.o"
            if not part.exists():
                subprocess.run([toolkit.nvcc, *flags, *keep, "-c", str(source), "-o", str(part)], check=True)
        objects = sorted(map(str, folder.glob("cuda_*.o")))
        subprocess.run([machine.compiler or "g++", "-shared", *objects, "-o", str(made)], check=True)
    return made, sorted(folder.glob("*.ptx"))


def load(made: Path, texts: list[Path]) -> ModuleType:
    """The extension as zbkern._cuda, whose launches run in the emulator."""
    import zbkern

    emulator = library.load()
    spec = importlib.util.spec_from_file_location("zbkern._cuda", made)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    sys.modules["zbkern._cuda"] = zbkern._cuda = extension  # type: ignore[attr-defined]
    spec.loader.exec_module(extension)
    for path in texts:
        if emulator.emu_load_file(str(path).encode()):
            raise RuntimeError(f"{path}: {emulator.emu_error().decode()}")
    from zbkern.kernels.cuda import wgrad

    wgrad._processors = lambda device: 4
    wgrad.raw_stream = lambda device: 0
    return wgrad


@contextlib.contextmanager
def tile_of(wgrad: ModuleType, columns: int) -> Iterator[None]:
    """Inside, all tiles have 128 or 256 columns, whatever would be chosen."""
    with mock.patch.object(wgrad._cuda, "wgrad", partial(wgrad._cuda.wgrad, tile_k=columns)):
        yield


def cases(device: str = "cpu") -> Iterator[Case]:
    """Of the emulator, and of tests/gpu/test_cuda_wgrad.py: each with either tile."""
    for case, columns in itertools.product(_cases(device), (128, 256)):

        def run(wgrad: ModuleType, case: Case = case, columns: int = columns) -> None:
            with tile_of(wgrad, columns):
                case.run(wgrad)

        yield Case(f"{case.name}, {columns} columns", run)


def _cases(device: str) -> Iterator[Case]:

    def random(dtype: torch.dtype, scale: float = 0.5) -> checks.Random:
        return checks.Random(dtype, device, scale=scale)

    shapes = (
        (128, 256, [64]),
        (8, 8, [1]),
        (136, 264, [63, 65]),
        (264, 520, [100, 1, 300, 64, 7]),
        (512, 128, [130, 0]),
    )
    kinds = ((BF16, FP32), (BF16, BF16), (torch.float16, FP32))
    for (n, k, rows), (dtype, out), bias, add in itertools.product(shapes, kinds, (False, True), (False, True)):
        name = f"W {n}x{k} {rows} {str(dtype)[6:]} to {str(out)[6:]}{' bias' * bias}{' add' * add}"
        given = (rows, n, k, ("padded",) * 3, out, add, bias)
        yield Case(name, lambda wgrad, d=dtype, g=given: checks.linear_wgrad(wgrad, random(d), *g))  # type: ignore[misc]
    for layouts in (("odd", "transposed", "transposed"), ("plain", "expanded", "plain")):  # operands are copied first
        given = ([100], 128, 256, layouts, FP32)
        yield Case(f"W {layouts}", lambda wgrad, g=given: checks.linear_wgrad(wgrad, random(BF16), *g))  # type: ignore[misc]
    several = [(256, 128, [150, 64]), (136, 264, [77, 130]), (8, 8, [1, 2])]
    for add, bias in itertools.product((False, True), (False, True)):
        given = (several, ("plain",) * 3, add, bias)
        name = f"3 W merged{' bias' * bias}{' add' * add}"
        yield Case(name, lambda wgrad, g=given: checks.linear_wgrads(wgrad, random(BF16, 1), *g))  # type: ignore[misc]
    yield Case(
        "W of 21 segments", lambda wgrad: checks.linear_wgrad(wgrad, random(BF16), [32] * 21, 256, 256, out=FP32)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    try:
        wgrad = load(*build())
    except (RuntimeError, ValueError) as error:
        print(f"the CUDA extension is left out: {error}")
        return 2
    counts = {"ok": 0, "bad": 0}
    for case in (case for case in cases() if arguments.only in case.name):
        found, launched, seconds = faults(case, 90, arguments.seeds, wgrad)
        counts["bad" if found else "ok"] += 1
        print(f"{case.name:<66} {launched:>4} launches {seconds:>7.2f} s  {'; '.join(found) or 'ok'}", flush=True)
        for kind, text in found.items():
            print(f"        {kind}: {text[:700]}", flush=True)
    print(counts)
    return int(counts["bad"] > 0)


if __name__ == "__main__":
    sys.exit(main())
