"""Compiles the kernels that some runs would launch, on all cores, into Triton's cache: no GPU waits for a compiler.

One process compiles a kernel in one or two seconds, and half of the programs here would otherwise be that.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Job:
    """A variant of a kernel as Triton's launcher would compile it; kernel: its module and its name there."""

    kernel: tuple[str, str]
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    target: Any
    options: dict[str, Any]


class Compilers:
    """Processes that compile, from the first call of `compile` until `close`."""

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None
        self._jobs: dict[str, Future] = {}
        self.problems: list[str] = []

    def compile(self, runs: Iterable[Callable[[], object]], work: Callable[[Job], object] | None = None) -> int:
        """Compiles the kernels that the runs would launch, and waits; returns how many variants are new.

        work: what a process does with each, `compile_job` when not given.

        Our kernels do not run meanwhile, but everything else that the runs do happens. What goes wrong is left for the
        run itself to say; it is in `problems`, too.
        """
        fresh = []
        for job in jobs(runs):
            if repr(job) not in self._jobs:
                if self._pool is None:
                    context = multiprocessing.get_context("spawn")
                    self._pool = ProcessPoolExecutor(self.processes, mp_context=context)
                future = self._jobs[repr(job)] = self._pool.submit(work or compile_job, job)
                fresh.append(future)
        errors = [future.exception() for future in fresh]
        self.problems += [f"{type(error).__name__}: {error}" for error in errors if error is not None]
        return len(fresh)

    def close(self) -> None:
        """Ends the processes; the next `compile` would start new ones."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def jobs(runs: Iterable[Callable[[], object]]) -> list[Job]:
    """What the runs would compile; none where kernels are interpreted."""
    from zbkern.kernels.triton.common import INTERPRETED, Kernel, compile_options
    from zbkern.kernels.triton.replay import replay

    found: list[Job] = []
    seen = set()

    def record(
        self: Any, grid: Any, arguments: Any, constants: Any, warps: int, stages: int, key: tuple | None = None
    ) -> None:
        job = _job(self, arguments, constants, compile_options(warps, stages))
        if repr(job) not in seen:
            seen.add(repr(job))
            found.append(job)

    if INTERPRETED:
        return found
    with replay.paused(), mock.patch.object(Kernel, "__call__", record):
        for run in runs:
            try:
                run()
            except Exception:  # it will say so when it is measured
                continue
    return found


def _job(kernel: Any, arguments: Any, constants: Any, options: dict[str, Any]) -> Job:
    """As triton.runtime.jit.JITFunction.run finds it out (3.6): another variant there would be compiled again."""
    from triton import knobs
    from triton.runtime import driver

    function = kernel.function
    _, _, target, backend, binder = function.device_caches[driver.active.get_current_device()]
    options |= {
        "debug": function.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    bound, specialization, _ = binder(*arguments, *constants, **options)
    parsed, signature, fixed, attributes = function._pack_args(backend, options, bound, specialization, None)
    name = next(name for name, value in vars(sys.modules[function.module]).items() if value is kernel)
    return Job((function.module, name), signature, fixed, attributes, target, dict(parsed.__dict__))


def compile_job(job: Job) -> Any:
    """Compiles one, into Triton's cache; returns Triton's CompiledKernel."""
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    module, name = job.kernel
    function = getattr(importlib.import_module(module), name).function
    source = ASTSource(function, job.signature, job.constants, job.attributes)
    return triton_compile(source, target=job.target, options=job.options)
