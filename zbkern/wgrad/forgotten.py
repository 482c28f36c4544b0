"""A warning where an optimizer steps while W of its parameters still wait: the step lacks their gradients."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zbkern.wgrad import fsdp

_queues: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(queue: Any) -> None:
    """Steps of torch optimizers from now on look at what waits in this queue; the first to find something warns."""
    _register()
    _queues.add(queue)


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    # Without the queues' locks: threads whose hooks step could wait for each other's. Tasks with hooks may step inside
    # of a hook, a parameter at a time, with another backward of it still to come.
    waiting = [(task, queue) for queue in [*_queues] for task in [*queue._tasks] if not task._has_hooks]
    if not waiting:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    stepped |= {gathered for gathered, shard in fsdp.shards().items() if id(shard) in stepped}
    lost = [(task, queue) for task, queue in waiting if stepped.intersection(map(id, task.parameters))]
    if lost:
        _queues.difference_update(queue for _, queue in lost)
        warnings.warn(
            f"{type(optimizer).__name__}.step: {len(lost)} W of its parameters still wait in a WGradQueue (first: "
            f"{lost[0][0]}), so this step lacks their gradients; call the queue's run() before the step, or discard() "
            "to drop them on purpose",
            RuntimeWarning,
            stacklevel=3,
        )
