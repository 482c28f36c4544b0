"""Several gloo ranks for tests: started once, they run any module-level function of the tests on every rank; and the
device meshes that these make."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

GRACE = 60  # seconds that ranks get to end after another one has failed
ENDED = "its process ended"
PRELOAD = ["tests.support.preloaded"]  # of the process that ranks are forked from


@contextlib.contextmanager
def closing_transports() -> Iterator[None]:
    """Closes what pipelines have connected inside, where it is still there, in one order on all ranks. A peer that is
    late is waited for: threads that were left would count as leaks."""
    from zbkern.pipeline.transport import distributed
    from zbkern.pipeline.transport.distributed import DistributedTransport

    opened: list[weakref.ref[DistributedTransport]] = []
    usual = DistributedTransport.__init__

    def init(self: DistributedTransport, *arguments: Any) -> None:
        usual(self, *arguments)
        opened.append(weakref.ref(self))

    try:
        with (
            mock.patch.object(DistributedTransport, "__init__", init),
            mock.patch.object(distributed, "_TOGETHER", GRACE),
        ):
            yield
    finally:
        for each in opened:
            if (transport := each()) is not None:
                transport.close()


class Ranks:
    """`run(function, *arguments)` calls function(*arguments) on all ranks and returns their results, by rank."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._start()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        """Raises AssertionError with the traceback of every rank that raised or did not answer in time.

        Where one has died or does not answer, the next call has new ones; so it has where one has begun a collective
        that others of its group have not: the next test's, of a mesh that torch takes for the same, would meet it.
        """
        if not self._processes:
            self._start()
        self._send((function, arguments))
        values: dict[int, Any] = {}
        failed: dict[int, str] = {}
        collectives: dict[str, set[int]] = {}  # how many each rank has begun, by group
        deadline = time.monotonic() + timeout
        while len(values) + len(failed) < self._size and time.monotonic() < deadline:
            for rank, pipe in enumerate(self._pipes):
                if rank in values or rank in failed or not pipe.poll(0.02):
                    continue
                try:
                    good, answer, begun = pipe.recv()
                except EOFError:
                    good, answer, begun = False, ENDED, {}
                for name, number in begun.items():
                    collectives.setdefault(name, set()).add(number)
                if good:
                    values[rank] = answer
                else:
                    failed[rank] = answer
                    deadline = min(deadline, time.monotonic() + GRACE)
        silent = [rank for rank in range(self._size) if rank not in values and rank not in failed]
        failed.update(dict.fromkeys(silent, f"no answer from {function.__name__}"))
        # who is silent waits for somebody, and always will
        if silent or ENDED in failed.values() or any(len(numbers) > 1 for numbers in collectives.values()):
            self._kill()
        if failed:
            raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failed.items())))
        return [values[rank] for rank in range(self._size)]

    def run_each(
        self, function: Callable[..., Any], cases: dict[str, tuple[Any, ...]], timeout: float = 300
    ) -> dict[str, list[Any]]:
        """`run` with the arguments of each case, by its name: where imports of ranks take longer than their cases.

        Raises AssertionError with the names of all that failed, after the last one.
        """
        values, failed = {}, []
        for name, arguments in cases.items():
            try:
                values[name] = self.run(function, *arguments, timeout=timeout)
            except AssertionError as error:
                failed.append(f"case {name!r}:\n{error}")
        if failed:
            raise AssertionError("\n".join(failed))
        return values

    def close(self) -> None:
        self._send(None)
        for process in self._processes:
            process.join(60)
        self._kill()

    def _send(self, task: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a test has ended that rank
                pipe.send(task)

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        # here, not on rank 0: its port is then its own from the start, whatever else runs on this machine
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, ends = zip(*(context.Pipe() for _ in range(self._size)), strict=True)
        self._processes = [
            context.Process(target=_serve, args=(rank, self._size, self._store.port, end), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for process, end in zip(self._processes, ends, strict=True):
            process.start()
            end.close()  # so that a process that ends closes the pipe

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._processes = self._pipes = ()


def _serve(rank: int, size: int, port: int, end: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while (task := end.recv()) is not None:
        gc.collect()  # communicators of an earlier pipeline, whose threads wake up all the time
        gc.freeze()  # the next collection need not visit the modules that there are now
        function, arguments = task
        try:
            with closing_transports():
                good, answer = True, function(*arguments)
        except BaseException:
            good, answer = False, traceback.format_exc()
        groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) == "gloo"]
        begun = {group.group_name: group._get_sequence_number_for_group() for group in groups}
        try:
            end.send((good, answer, begun))
        except Exception:  # an answer that cannot be pickled
            end.send((False, traceback.format_exc(), begun))
    dist.destroy_process_group()


# ---- each mesh is made once: torch keeps its groups, and their threads wake up all the time


@functools.cache
def named_mesh(**sizes: int) -> DeviceMesh:
    """Of all ranks: `named_mesh(stage=2, tensor=2)`."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@functools.cache
def cpu_mesh() -> DeviceMesh:
    """Of all ranks, in one dimension without a name."""
    return init_device_mesh("cpu", (dist.get_world_size(),))
