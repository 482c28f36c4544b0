"""From what users name their ranks by, a process group or a Transport, to the Transport that runs."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zbkern.pipeline.actions import Schedule
from zbkern.pipeline.transport import DistributedTransport, Transport
from zbkern.pipeline.warmup import chain

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def is_transport(group: Any) -> TypeIs[Transport]:
    return hasattr(group, "deliver")


def place(group: Any) -> tuple[int, int]:
    """This rank and the number of ranks; raises ValueError where torch.distributed does not run."""
    if is_transport(group):
        return group.rank, group.size
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "Pipeline: torch.distributed is not initialised; call torch.distributed.init_process_group() "
            "in a script that torchrun starts"
        )
    return dist.get_rank(group), dist.get_world_size(group)


def connect(group: Any, schedule: Schedule, device: torch.device) -> Transport:
    """To the ranks that this one exchanges activations with, or the optimizer's norms."""
    if is_transport(group):
        return group
    rank = dist.get_rank(group)
    edges = {*pairwise(schedule.placement), *pairwise(chain(schedule))}
    return DistributedTransport(group, {b for edge in edges for a, b in (edge, edge[::-1]) if a == rank}, device)


def connect_row(group: Any, device: torch.device) -> Transport:
    """To the ranks before and after this one."""
    if is_transport(group):
        return group
    rank, size = place(group)
    return DistributedTransport(group, {rank - 1, rank + 1} & set(range(size)), device)
