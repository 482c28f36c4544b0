"""Schedules with offload and recomputation, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from zbkern.pipeline import Action, Schedule


def schedule_of(*rows: str, microbatches: int, placement: Sequence[int] | None = None) -> Schedule:
    """Of one row of actions per rank, as text; a chunk on every rank unless placement says otherwise."""
    actions = [[Action.parse(text) for text in row.split()] for row in rows]
    return Schedule.build(actions, [*range(len(rows))] if placement is None else [*placement], microbatches)


class Wide(nn.Module):
    """Wide enough that a few small tensors do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def with_actions(schedule: Schedule, choose: Callable[[Action], str | None]) -> Schedule:
    """The schedule with what `choose` says of an F or B saved: "copied" right after it until right before the next
    pass of its microbatch, or (of an F) "recomputed" right before it."""
    rows = []
    for row in schedule.actions:
        found: list[Action] = []
        saved: dict[tuple[int, int], str] = {}
        for action in row:
            key = action.chunk, action.microbatch
            how = saved.pop(key, None)
            if how is not None:
                found.append(Action("L" if how == "copied" else "R", *key))
            found.append(action)
            how = choose(action) if action.kind in ("F", "B") else None
            if how is not None:
                saved[key] = how
                if how == "copied":
                    found.append(Action("O", *key))
        rows.append(found)
    cut = {"slices": schedule.slices, "own_slices": schedule.own_slices}
    return Schedule.build(rows, schedule.placement, schedule.microbatches, **cut)


def saved_in_turn(*how: str | None) -> Callable[[Action], str | None]:
    return lambda action: how[action.microbatch % len(how)] if action.kind == "F" else None
