"""Communicators of a pipeline's own, which torch.distributed does not register.

torch.distributed.new_group names a group after the number of groups that this process is in (before torch 2.15): ranks
that are in different numbers of them wait for each other for ever; and a name comes back when a group is destroyed,
with what the store still has under it. These count their openings, and end with `close_groups` and the last reference.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zbkern.pipeline.transport.mailbox import PipelineError

FOREVER = timedelta(days=365)
_CTAS = 4  # blocks of a kernel of NCCL
_calls: collections.Counter[str] = collections.Counter()


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int] | None:
    """This rank in a group, None for all ranks, and their number; None where torch.distributed does not run."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(group), dist.get_world_size(group)


def new_communicator(ranks: Sequence[int], backend: str) -> Any:
    """A communicator of these global ranks; collective among them. Has send and recv; `finish` waits for their works.

    Raises PipelineError where one of them ends while they connect.
    """
    name = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}.get(backend)
    if name is None:
        return dist.new_group(ranks, timeout=FOREVER, backend=backend, use_local_synchronization=True)
    kind = getattr(dist, name)
    place = place_in_store(ranks, "group"), ranks.index(dist.get_rank()), len(ranks)
    if backend == "nccl":  # two ranks connect in their first message
        with _environ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):  # else its watchdog ends a process whose peer is gone
            return kind(*place, _nccl_options())
    try:  # gloo has one time-out to connect and for messages: `finish` has another for these
        return kind(*place, timedelta(seconds=rendezvous_timeout()))
    except RuntimeError as error:
        raise PipelineError(
            f"Pipeline: {_missing(error, ranks)} ended, or froze, while ranks connected; start all again "
            f"({str(error).splitlines()[0]})"
        ) from error


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


def _missing(error: RuntimeError, ranks: Sequence[int]) -> str:
    """Whose address gloo waited for, by the key in the store that it names: "keys: /.../3"."""
    key = re.search(r"keys: \S*/(\d+)$", str(error).splitlines()[0])
    return f"global rank {ranks[int(key[1])]}" if key and int(key[1]) < len(ranks) else "a rank"


class ConnectionLost(RuntimeError):
    """gloo's connection to a peer has ended."""


def post_receive(group: Any, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work:
    """Of what the peer sends next under this tag by gloo. Raises ConnectionLost when the connection has ended."""
    try:
        return group.recv([buffer], peer, tag)
    except RuntimeError as error:
        raise ConnectionLost(str(error)) from error


def finish_receive(work: dist.Work) -> None:
    """Waits for what gloo receives as long as it takes, or raises ConnectionLost."""
    try:
        work.wait(FOREVER)
    except RuntimeError as error:
        raise ConnectionLost(str(error)) from error


@contextlib.contextmanager
def not_profiled() -> Iterator[None]:
    """What gloo begins inside is in no profile: where it ends after one, torch 2.13 writes into freed memory."""
    profiled = torch.autograd._profiler_enabled()
    if profiled:
        torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        if profiled:
            torch._C._autograd._enable_record_function(True)


def rendezvous_timeout() -> float:
    """Seconds that ranks wait for each other before they connect: the time-out of init_process_group."""
    return dist.distributed_c10d._get_default_store().timeout.total_seconds()  # type: ignore[attr-defined]


def place_in_store(ranks: Sequence[int], what: str) -> dist.PrefixStore:
    """A part of the job's store for these ranks' n-th call with this `what`; all make such calls in one order."""
    name = f"zbkern/{'_'.join(map(str, ranks))}/{what}"
    _calls[name] += 1
    return dist.PrefixStore(f"{name}/{_calls[name]}", dist.distributed_c10d._get_default_store())


def close_groups(groups: Iterable[Any], abort: bool = False) -> None:
    """Ends communicators. gloo's close their connections once nobody refers to them; NCCL's hold on to the device.

    abort: what is under way ends, with whatever is in memory then. Otherwise it is waited for, which never ends where a
    rank will not answer.
    """
    for group in groups:
        if dist.is_nccl_available() and isinstance(group, dist.ProcessGroupNCCL):
            group.abort() if abort else group.shutdown()


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend of this group's tensors on this device; a group may have one for each kind of device."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backends = dict(pair.split(":", 1) for pair in config.split(","))
    if device.type not in backends:
        raise ValueError(
            f"Pipeline: the process group has no backend for {device.type} tensors ({config}); call "
            f"torch.distributed.init_process_group() without a backend, or with one for {device.type}"
        )
    if device.type == "cuda" and backends["cuda"] == "gloo":  # it would read the addresses as the host's
        raise ValueError(
            f"Pipeline: gloo cannot send CUDA tensors from one rank to another, and the process group has it for them "
            f'({config}); call torch.distributed.init_process_group() without a backend, or with "cpu:gloo,cuda:nccl"'
        )
    return backends[device.type]
