"""Compiles the kernels that some runs would launch, on all cores, into Triton's cache: no GPU waits for a compiler.

One process compiles a kernel in one or two seconds, and half of the programs here would otherwise be that.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor

from build_tools.kernels.jobs import Job
from build_tools.kernels.jobs import compile_job as compile_job
from build_tools.kernels.jobs import jobs as jobs


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
