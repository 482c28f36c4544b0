"""Compiles the kernels that some runs would launch, on all cores, into Triton's cache: no GPU waits for a compiler.

One process compiles a kernel in one or two seconds, and half of the programs here would otherwise be that.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor

from build_tools.kernels.jobs import CompileJob, compile_job, jobs, name_kernels

FOUND = 0.3
"""Seconds that a kernel in the cache takes at most."""


class Compilers:
    """Processes that compile, from the first kernel that is not in the cache until `close`."""

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None
        self._seen: set[str] = set()
        self.problems: list[str] = []

    def compile(self, runs: Iterable[Callable[[], object]], work: Callable[[CompileJob], object] | None = None) -> int:
        """Compiles the kernels that the runs would launch, and waits; returns how many variants are new.

        work: what a process does with each, `compile_job` when not given.

        Our kernels do not run meanwhile, but everything else that the runs do happens. What goes wrong is left for the
        run itself to say; it is in `problems`, too.
        """
        name_kernels()
        fresh = []
        for job in jobs(runs):
            if repr(job) not in self._seen:
                self._seen.add(repr(job))
                fresh.append(self._begin(work, job))
        errors = [future.exception() for future in fresh]
        self.problems += [f"{type(error).__name__}: {error}" for error in errors if error is not None]
        return len(fresh)

    def _begin(self, work: Callable[[CompileJob], object] | None, job: CompileJob) -> Future:
        """Here, as long as all are found in the cache, each in a moment: processes take seconds to start."""
        done: Future = Future()
        begin = time.perf_counter()
        if work is None and self._pool is None:
            try:
                done.set_result(compile_job(job))
            except Exception as error:
                done.set_exception(error)
            if time.perf_counter() - begin < FOUND:
                return done
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.processes, mp_context=multiprocessing.get_context("spawn"))
        return done if done.done() else self._pool.submit(work or compile_job, job)

    def close(self) -> None:
        """Ends the processes; the next `compile` would start new ones."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
