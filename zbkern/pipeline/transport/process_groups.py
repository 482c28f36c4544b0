"""Communicators of a pipeline's own, which torch.distributed does not register.

torch.distributed.new_group names a group after the number of groups that this process is in (before torch 2.15): ranks
that are in different numbers of them wait for each other for ever; and a name comes back when a group is destroyed,
with what the store still has under it. These count their openings. Those of gloo, which are made here, end with the
last reference; those of NCCL are in nccl.py.
"""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zbkern.pipeline.transport.mailbox import PipelineError

FOREVER = timedelta(days=365)
_calls: collections.Counter[str] = collections.Counter()


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int] | None:
    """This rank in a group, None for all ranks, and their number; None where torch.distributed does not run."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(group), dist.get_world_size(group)


def new_communicator(ranks: Sequence[int]) -> Any:
    """One of gloo, of these global ranks; collective among them. `finish_receive` waits for what its recv begins.

    Raises PipelineError where one of them ends while they connect.
    """
    try:  # gloo has one time-out to connect and for messages: a wait has another for these
        return dist.ProcessGroupGloo(*place_of_group(ranks), timedelta(seconds=rendezvous_timeout()))
    except RuntimeError as error:
        raise PipelineError(
            f"Pipeline: {_missing(error, ranks)} ended, or froze, while ranks connected; start all again "
            f"({str(error).splitlines()[0]})"
        ) from error


def place_of_group(ranks: Sequence[int]) -> tuple[dist.PrefixStore, int, int]:
    """What a communicator of these global ranks is made of: its part of the store, this rank, and their number."""
    return place_in_store(ranks, "group"), ranks.index(dist.get_rank()), len(ranks)


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
