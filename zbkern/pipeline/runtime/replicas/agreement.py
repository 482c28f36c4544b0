"""Before a call whose passes are collective over replicas: whether all of them make it, with the same passes.

Ranks of other pipelines that run other passes would wait for each other until the time-out of their process group.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbkern.data_parallel import is_sharded, state_of
from zbkern.pipeline.transport.base import PipelineError, Transport
from zbkern.wgrad import fsdp

_DDP = nn.parallel.DistributedDataParallel
_PAUSE = 0.0001  # seconds between looks at what has come


class Agreement:
    """The ranks with which these chunks communicate in their passes, and whether they do the same.

    They are the ranks that FSDP2 shards a chunk over, those of tensor parallelism (DTensor), and those of modules that
    say so, as ExpertParallel. roots: what `fully_shard` was applied to. Replicas of DistributedDataParallel are none of
    them: they meet when they reduce.
    """

    def __init__(self, modules: Iterable[nn.Module], roots: Iterable[Any]) -> None:
        self._roots = [*roots]
        groups: dict[str, dist.ProcessGroup] = {}
        modules = [*modules]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        for mesh in dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)):
            groups.update((group.group_name, group) for group in mesh.get_all_groups())
        parts = (part for module in modules for part in module.modules())
        exchanging = [part for part in parts if getattr(part, "collective_forward", False)]
        self.exchanges = bool(exchanging)  # whether the forward and B of a part are collective, as of ExpertParallel
        for part in exchanging:
            group: Any = getattr(part, "group", None) or dist.group.WORLD
            groups[group.group_name] = group
        self._groups = {name: group for name, group in groups.items() if group.size() > 1}
        groups.update((m.process_group.group_name, m.process_group) for m in modules if isinstance(m, _DDP))
        self._with_ddp = {name: group for name, group in groups.items() if group.size() > 1}
        self._device = next((p.device for p in parameters), torch.device("cpu"))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def check(self, call: str, passes: object, units: int, transport: Transport, timeout: float) -> None:
        """Raises ValueError on all of these ranks where some make another call, or run other passes than the others.

        passes: equal for the same ones. transport: this rank's pipeline, whose failure ends this, too.
        Collective. Raises RuntimeError where a rank does not come in `timeout` seconds.
        """
        once = self._gathered_once()
        numbers = [number_of(call), units, number_of(passes)]
        for group in self._groups.values():
            ranks = dist.get_process_group_ranks(group)
            local = [*numbers[:1], 0, 0] if tuple(ranks) in once else numbers
            rows = _gathered(local, group, self._device, transport, timeout)
            for rank, row in zip(ranks, rows, strict=True):
                if row[0] != rows[0][0]:
                    raise ValueError(
                        f"Pipeline.{call}: replicas must make the same calls in the same order, because a pass of one "
                        f"communicates with the others; ranks {ranks[0]} and {rank} make different ones: call step and "
                        "evaluate on all of them"
                    )
                if row != rows[0]:
                    raise ValueError(
                        f"Pipeline.{call}: replicas must run the same units in the same order, because every "
                        f"pass communicates with the others; got {rows[0][1]} units on rank {ranks[0]} and "
                        f"{row[1]} on rank {rank}: give all of them one schedule; fully_shard(..., "
                        "reshard_after_forward=False) gathers once a step, for any number"
                    )

    def any(self, flag: bool, transport: Transport, timeout: float) -> bool:
        """Whether it is true for this pipeline or one of its replicas, DDP's, too. Collective; raises as `check`."""
        for group in self._with_ddp.values():
            flag = any(of_rank == [1] for of_rank in _gathered([int(flag)], group, self._device, transport, timeout))
        return flag

    def _gathered_once(self) -> set[tuple[int, ...]]:
        """The ranks over which weights are gathered once a step, and not in every pass: equal meshes may have groups of
        other names, and torch keep the first of them."""
        once_by_ranks: dict[tuple[int, ...], bool] = {}
        for root in self._roots:
            for part in (part for part in root.modules() if is_sharded(part)):
                state = state_of(part)
                stays = part is root and getattr(
                    state, "_auto_reshard_after_forward", False
                )  # from its first forward on
                for group in fsdp.groups_of(state):
                    for process_group in group.mesh_info.mesh.get_all_groups():
                        once = stays or not group._reshard_after_forward
                        ranks = tuple(dist.get_process_group_ranks(process_group))
                        once_by_ranks[ranks] = once_by_ranks.get(ranks, True) and once
        return {ranks for ranks, once in once_by_ranks.items() if once}


def number_of(value: object) -> int:
    """A checksum of a value's text, the same on every rank."""
    return zlib.crc32(repr(value).encode())


def _gathered(
    numbers: list[int], group: dist.ProcessGroup, device: torch.device, transport: Transport, timeout: float
) -> list[list[int]]:
    """The numbers of all ranks of the group."""
    device = torch.device("cpu") if "cpu" in dist.get_backend_config(group) else device
    local = torch.tensor(numbers, device=device)
    rows: list[Tensor] = [torch.empty_like(local) for _ in range(group.size())]
    work, start = dist.all_gather(rows, local, group, async_op=True), time.monotonic()
    while not work.is_completed():  # no wait: this pipeline may fail meanwhile, and other replicas know nothing of that
        if transport.failure is not None:
            raise PipelineError(transport.failure)
        if time.monotonic() - start > timeout:
            ranks = dist.get_process_group_ranks(group)
            raise RuntimeError(f"not all of ranks {ranks}, with replicas of this chunk, came to it in {timeout:g} s")
        time.sleep(_PAUSE)
    work.wait()
    return torch.stack(rows).tolist()
