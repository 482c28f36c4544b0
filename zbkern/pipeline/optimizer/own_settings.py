"""What torch optimizers set in their own groups as they step, compared over ranks: a step size found from all gradients
(Prodigy, D-Adaptation) would be found on each rank from those of its own stages, and be another one there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zbkern.pipeline.optimizer.params import equal
from zbkern.pipeline.transport.tensors import local_part

COMPARED = 8  # steps, the first ones: some are skipped, or have a learning rate of 0 at the beginning of a warm-up

Settings = dict[str, dict[str, str]]  # by an optimizer and the numbers that it was given: what it has set


def settings_of_step(
    names: Iterable[str], before: Iterable[dict[str, Any]], after: Iterable[dict[str, Any]]
) -> Settings:
    """What a step has changed in each group. names: of the groups' optimizers. Groups that were given other numbers may
    become different ones, so these tell which are compared."""
    found: Settings = {}
    for name, old, new in zip(names, before, after, strict=True):
        changed = {key for key, value in new.items() if key not in old or not equal(value, old[key])}
        given = {key: text for key, value in new.items() if key not in changed and (text := _numbers(value))}
        key = f"{name} with {json.dumps(given, sort_keys=True)}"
        found.setdefault(key, {key: text for key in sorted(changed) if (text := _numbers(new[key]))})
    return found


def joined(rank: int, own: Settings, received: Iterable[Settings]) -> Settings:
    """Those of this rank and of others. Raises ValueError where they differ."""
    whole = dict(own)
    for settings in received:
        for key, theirs in settings.items():
            mine = whole.setdefault(key, theirs)
            name = next((name for name in sorted(mine.keys() & theirs) if mine[name] != theirs[name]), None)
            if name is not None:
                kind = key.partition(" with ")[0]
                raise ValueError(
                    "Optimizer: optimizer must set the same numbers on all ranks, or it is another one on each; the "
                    f"step of {kind} has set {name!r} of its groups to {mine[name]} on rank {rank}, and to "
                    f"{theirs[name]} on another: it follows from the gradients of one rank's parameters alone; use an "
                    "optimizer that updates each parameter by itself, such as AdamW"
                )
    return whole


def _numbers(value: Any) -> str:
    """A setting as text; empty for what is no number or numbers."""
    try:
        return json.dumps(value, default=_plain) if not isinstance(value, (str, type(None))) else ""
    except TypeError:
        return ""


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return local_part(value.detach()).tolist()
    raise TypeError
