"""gloo ranks on this machine for benchmarks: a process each, with one thread for compute."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) on `size` ranks; what it returned on rank 0. function: of a module's top level."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.Manager().dict()
    mp.spawn(_rank, args=(size, port, function, arguments, results), nprocs=size)
    return results[0]


def _rank(rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    found = function(*arguments)
    if rank == 0:
        results[0] = found
    dist.destroy_process_group()
