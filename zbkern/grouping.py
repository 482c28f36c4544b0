"""Which waiting W run together: tasks of one weight as one sum, groups of several weights as one launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbkern.task import WGradTask


def by_weight(selected: Iterable[WGradTask], merge: bool) -> list[list[WGradTask]]:
    """The tasks in groups that run together, oldest group first.

    May: the same weight, when merging. Must: tasks of one key that share a parameter whose hooks listen, because
    autograd calls those once per backward, after all its contributions (DistributedDataParallel relies on it).
    """
    groups: dict[Hashable, list[WGradTask]] = {}
    joined: dict[tuple[Hashable, int], Hashable] = {}  # (key, parameter) -> its group, where hooks listen
    for task in selected:
        if not task.delivers:
            groups.setdefault(task.weight if merge else task, []).append(task)
            continue
        shares = [(task.key, id(p)) for p in task.parameters if p is not None]
        found = list(dict.fromkeys(joined[share] for share in shares if share in joined))
        label = found[0] if found else task
        groups.setdefault(label, []).append(task)
        for other in found[1:]:
            groups[label] += groups.pop(other)
            joined.update((share, label) for share, group in joined.items() if group is other)
        joined.update((share, label) for share in shares)
    return list(groups.values())


def by_launch(groups: Iterable[list[WGradTask]]) -> Iterator[list[list[WGradTask]]]:
    """Neighbouring groups that their launch takes at once (`launch.several`): on one device, no parameter in two."""
    batch: list[list[WGradTask]] = []
    kind, taken = None, set()  # type: ignore[var-annotated]
    for group in groups:
        task = group[0]
        several = getattr(task.launch, "several", None)
        if several is None or task.delivers:
            if batch:
                yield batch
                batch, taken = [], set()
            yield [group]
            continue
        parameters = {id(p) for p in task.parameters if p is not None}
        if batch and (kind != (several, task.tensors[0].device) or parameters & taken):
            yield batch
            batch, taken = [], set()
        batch.append(group)
        kind, taken = (several, task.tensors[0].device), taken | parameters
    if batch:
        yield batch
