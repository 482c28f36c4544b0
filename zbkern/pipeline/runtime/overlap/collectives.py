"""overlap_collectives: a process group during whose collectives a rank goes on with other passes, and W.

It stands between whoever communicates and the group itself: functions of torch.distributed, functional collectives,
FSDP2, DTensor. All of them call a method of the group, which gives a work, and wait for that, now or later. The rank
goes on with something else where it is waited for, and not where it is started: what is started ahead of time, such as
the next all-gather, stops nobody.
"""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zbkern.wgrad import in_flight

_COLLECTIVES = (
    *("_allgather_base", "all_gather_single", "all_gather_single_coalesced", "allgather", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "all_to_all_single", "alltoall", "alltoall_base", "allreduce"),
    *("allreduce_coalesced", "broadcast", "gather", "reduce", "scatter", "_reduce_scatter_base", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "_end_coalescing"),
)
_OTHERS = (  # messages, too: not all ranks of a group wait for one, and all must have the same turns
    *("_get_backend", "_get_sequence_number_for_group", "_set_sequence_number_for_group", "_start_coalescing"),
    *("barrier", "recv", "recv_anysource", "send"),
)


def overlap_collectives(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A process group of the same ranks, whose collectives do not stop a rank that has something else to do.

    Give it to the modules in the place of `group` (None for all ranks), as a DeviceMesh where they take one:
    `DeviceMesh.from_group(overlap_collectives(group), "cuda")`. Where a pass waits for one of its collectives, passes
    beside it go on (`Schedule.beside`), and then W, as with `zbkern.in_flight`. The same calls on all ranks of the
    group, as for `torch.distributed.new_group`. Not for messages between stages.
    """
    group = c10d._get_default_group() if group is None else group
    if isinstance(group, _Overlapped):
        return group
    made = (each for each in c10d._world.pg_names if isinstance(each, _Overlapped) and each.is_of(group))
    return next(made, None) or _Overlapped(group)


class _Work(dist._Work):
    """The work of a collective; what a rank does in the meantime comes before the wait."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work
        self._waited = False

    def wait(self, *arguments: Any, **named: Any) -> Any:
        if not self._waited:
            self._waited = True
            return in_flight(lambda: self._work.wait(*arguments, **named), self._work.is_completed)
        return self._work.wait(*arguments, **named)

    def __getattribute__(self, name: str) -> Any:
        if name in ("wait", "_work", "_waited") or name.startswith("__"):
            return super().__getattribute__(name)
        return getattr(self._work, name)


class _Overlapped(dist.ProcessGroup):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._name = name = f"{group.group_name}, overlapped"
        world: Any = c10d._world
        for known in (world.pg_map, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
            if group in known:
                known[self] = known[group]
        world.pg_names[self] = name
        c10d._register_process_group(name, self)  # type: ignore[arg-type]

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Whether it stands before this one."""
        return self._group is group

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._group.group_desc

    @property
    def _device_types(self) -> Any:
        return self._group._device_types

    def shutdown(self) -> None:
        """Leaves the group itself, which has others to serve, to whoever made it."""

    def _forward(self, method: str, *arguments: Any, **named: Any) -> Any:
        result = getattr(self._group, method)(*arguments, **named)
        return _Work(result) if method in _COLLECTIVES and result is not None else result


for _name in (*_COLLECTIVES, *_OTHERS):
    setattr(_Overlapped, _name, partialmethod(_Overlapped._forward, _name))
