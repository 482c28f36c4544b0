"""Several gloo ranks for tests: started once, they run any module-level function of the tests on every rank."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Ranks:
    """`run(function, *arguments)` calls function(*arguments) on all ranks and returns their results, by rank."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._pipes, ends = zip(*(context.Pipe() for _ in range(size)), strict=True)
        self._processes = [
            context.Process(target=_serve, args=(rank, size, port, end), daemon=True) for rank, end in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} did not answer {function.__name__} within {timeout} s")
            answers.append(pipe.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, size: int, port: int, end: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    while (task := end.recv()) is not None:
        function, arguments = task
        try:
            end.send((True, function(*arguments)))
        except BaseException:
            end.send((False, traceback.format_exc()))
    dist.destroy_process_group()
