"""Which waiting W run together: tasks of one weight as one sum, groups of several weights as one kernel."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from zbkern.wgrad.task import WGradTask

Batch = list[list[WGradTask]]  # groups that one kernel takes, each of tasks that are summed up


def batches(selected: Sequence[WGradTask], merge: bool) -> Iterator[tuple[Batch, bool]]:
    """The tasks as they run, oldest first, and whether hooks wait for what a batch computes.

    merge: as in WGradQueue. Without it a batch is a task, or tasks that must run together (`by_weight`).
    """
    groups, hooked = by_weight(selected, merge)
    return by_kernel(groups, hooked) if merge else (([group], group[0] in hooked) for group in groups)


def by_weight(selected: Sequence[WGradTask], merge: bool) -> tuple[Iterable[list[WGradTask]], set[WGradTask]]:
    """The tasks in groups that run together, oldest group first; and those for which hooks wait.

    May: the same weight, when merging. Must: tasks of one key that share a parameter with hooks, because autograd
    runs those once per backward, after all its contributions (DistributedDataParallel relies on it).
    """
    groups: dict[Hashable, list[WGradTask]] = {}
    hooked: set[WGradTask] = set()
    joined: dict[tuple[Hashable, int], Hashable] = {}  # (key, parameter) -> its group, where there are hooks
    for task in selected:
        label: Hashable = task._weight if merge else task
        if not task._has_hooks:
            if label in groups:
                groups[label].append(task)
            else:
                groups[label] = [task]
            continue
        hooked.add(task)
        shares = [(task.key, id(p)) for p in task.parameters if p is not None]
        labels = list(dict.fromkeys(joined[share] for share in shares if share in joined))
        label = labels[0] if labels else task
        groups.setdefault(label, []).append(task)
        for other in labels[1:]:
            groups[label] += groups.pop(other)
            joined.update((share, label) for share, group in joined.items() if group is other)
        joined.update((share, label) for share in shares)
    return groups.values(), hooked


def by_kernel(groups: Iterable[list[WGradTask]], hooked: set[WGradTask]) -> Iterator[tuple[Batch, bool]]:
    """Neighbouring groups that their kernel takes at once (`kernel.run_many`): on one device, no parameter in two."""
    batch: Batch = []
    kind: Any = None
    taken: set[int] = set()
    for group in groups:
        task = group[0]
        run_many = task.kernel.run_many
        if run_many is None or task in hooked:
            if batch:
                yield batch, False
                batch, taken = [], set()
            yield [group], task in hooked
            continue
        parameters = {id(p) for p in task.parameters if p is not None}
        if batch and (kind != (run_many, task.tensors[0].device) or parameters & taken):
            yield batch, False
            batch, taken = [], set()
        batch.append(group)
        kind, taken = (run_many, task.tensors[0].device), taken | parameters
    if batch:
        yield batch, False
