"""Communicators of NCCL, which a GpuTransport has for tensors: how they are made and ended, and what they need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zbkern.pipeline.transport.process_groups import FOREVER, place_of_group

_CTAS = 4  # blocks of a kernel of NCCL
_QUEUES = 8  # of a GPU


def new_nccl(ranks: Sequence[int]) -> Any:
    """A communicator of these global ranks; collective among them. Two of them connect in their first message."""
    with _environ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):  # else its watchdog ends a process whose peer is gone
        return dist.ProcessGroupNCCL(*place_of_group(ranks), _nccl_options())


def _nccl_options() -> Any:
    """A message's kernel waits for the other rank on at most _CTAS multiprocessors: NCCL would take 16 or more."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    options.config.max_ctas = _CTAS
    return options


@contextlib.contextmanager
def _environ(name: str, value: str) -> Iterator[None]:
    """An environment variable that torch reads inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def close_nccl(groups: Iterable[Any], abort: bool = False) -> None:
    """Ends communicators, which hold on to their device until then; those of another kind stay as they are.

    abort: what is under way ends, with whatever is in memory then. Otherwise it is waited for, which never ends where a
    rank will not answer.
    """
    for group in groups:
        if dist.is_nccl_available() and isinstance(group, dist.ProcessGroupNCCL):
            group.abort() if abort else group.shutdown()


def check_backend(group: dist.ProcessGroup | None) -> None:
    """Raises ValueError where a process group has not NCCL for GPUs; a group may have a backend for each device."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backend = dict(pair.split(":", 1) for pair in config.split(",")).get("cuda")
    if backend != "nccl":
        raise ValueError(
            f"Pipeline: tensors travel between GPUs over NCCL, and the process group has {backend or 'no backend'} for "
            f"them ({config}); call torch.distributed.init_process_group() without a backend, or with "
            '"cpu:gloo,cuda:nccl"'
        )


def check_hardware_queues(environ: Mapping[str, str]) -> None:
    """Raises ValueError where a GPU has so few queues that a message waits behind one that waits for it.

    environ: the environment of this process. Under MPS a process has two queues where it does not ask for more.
    """
    folder = environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    under_mps = "CUDA_MPS_PIPE_DIRECTORY" in environ or os.path.exists(os.path.join(folder, "control"))
    given = environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    queues = int(given) if given and given.isdecimal() else 2 if under_mps else _QUEUES
    if queues < _QUEUES:
        found = f"got CUDA_DEVICE_MAX_CONNECTIONS={given}" if given else "the default under MPS is 2"
        raise ValueError(
            f"Pipeline: a GPU needs {_QUEUES} hardware queues or more, or ranks wait for each other for ever; {found}; "
            "set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process first uses its GPU, such as in the command of "
            "torchrun"
        )
