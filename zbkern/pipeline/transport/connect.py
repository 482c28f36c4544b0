"""Connects the ranks of a process group; a Transport that a user passes is taken as it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.distributed import DistributedTransport
from zbkern.pipeline.transport.gpu import GpuTransport
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.pipeline.transport.mailbox import PipelineError, described
from zbkern.pipeline.transport.process_groups import place_in, rendezvous_timeout
from zbkern.pipeline.transport.rank_exchange import RankExchange
from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.schedule import Schedule


def place(group: Any) -> tuple[int, int]:
    """This rank and the number of ranks; raises ValueError where torch.distributed does not run."""
    if isinstance(group, Transport):
        return group.rank, group.size
    if (rank_and_size := place_in(group)) is None:
        raise ValueError(
            "Pipeline: torch.distributed is not initialised; call torch.distributed.init_process_group() "
            "in a script that torchrun starts"
        )
    return rank_and_size


def connect(group: Any, device: torch.device) -> Transport:
    """Connects this rank to the others of a group; without torch.distributed a process that is alone."""
    group = or_alone(group)
    if isinstance(group, Transport):
        return group
    place(group)
    return DistributedTransport(group) if device.type == "cpu" else GpuTransport(group, device)


@contextlib.contextmanager
def telling_on_error(group: Any) -> Iterator[None]:
    """Inside, before a constructor connects ranks, or uses what connects them, its error reaches the others."""
    try:
        yield
    except BaseException as error:
        if isinstance(group, Transport):
            if group.size > 1:
                group.fail(f"rank {group.rank}: {described(error)}")
        elif place_in(group) is not None:
            with RankExchange("Pipeline", group, rendezvous_timeout()):
                raise
        raise


@contextlib.contextmanager
def closing_on_error(transport: Transport, owned: bool, what: str) -> Iterator[None]:
    """Inside, an error of a constructor reaches the other ranks, and closes the transport where the object owns it.

    what: the object in the message, as in "its Pipeline".
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, (PipelineError, ScheduleError)):  # which all ranks raise
            transport.fail(f"rank {transport.rank}, constructing {what}: {described(error)}")
        if owned:
            transport.close()
        raise


def check_same_plan(schedule: Schedule, transport: Transport) -> None:
    """Raises ScheduleError on all ranks where they have different schedules, and would wait for each other in vain."""
    plans = transport.gather((schedule.checksum, repr(schedule)))
    others = [rank for rank, (checksum, _) in enumerate(plans) if checksum != plans[0][0]]
    if others:
        raise ScheduleError(
            f"Pipeline: all ranks must have one schedule; rank 0 has {plans[0][1]}, rank {others[0]} another "
            f"{plans[others[0]][1]}, as have {len(others)} ranks in all: a search that a clock ends may find something "
            "else on every rank, so plan on one and send the schedule with torch.distributed.broadcast_object_list"
        )


def or_alone(group: Any) -> Any:
    """The group; of one process without torch.distributed a Transport of its own."""
    alone = group is None and place_in(None) is None and os.environ.get("WORLD_SIZE", "1") == "1"
    return LocalTransport.ring(1)[0] if alone else group
