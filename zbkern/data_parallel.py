"""FSDP2 and deferred W: reduce-scatter a group's gradients when its last W has run, while other W still run.

`fully_shard` reduces in its own post-backward, which comes with B; the gradients that wait in a queue are not there
yet. Here the same post-backward runs once more for every group that W completes. DistributedDataParallel needs nothing
of this: its reducer hooks into the accumulation of gradients, which W goes through. A Pipeline does this by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zbkern.wgrad import WGradQueue, WGradTask, fsdp


class ShardedReduction:
    """Reduces the gradients of a `fully_shard`-ed model as the W of `queue` completes its groups.

    >>> reduction = ShardedReduction(model, queue)      # doctest: +SKIP
    >>> with queue.defer():
    ...     loss.backward()
    >>> queue.run()                                     # reduce-scatters start while other W run
    >>> reduction.finish()                              # now the sharded parameters have their gradients

    model: the root that `fully_shard` was applied to. Raises TypeError when it is not such a model.
    """

    def __init__(self, model: torch.nn.Module, queue: WGradQueue) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not isinstance(model, FSDPModule):
            raise TypeError(
                f"ShardedReduction: model must have been through fully_shard; got {type(model).__name__}. "
                "DistributedDataParallel needs no ShardedReduction"
            )
        self._model = model
        self._queue = queue
        queue.listeners.append(self._after_wgrad)

    def finish(self) -> None:
        """Reduces what is left and waits for it. Call it after the W of a step, before the optimizer's step."""
        end_backward(self._model)

    def detach(self) -> None:
        """The queue's W no longer start reductions."""
        self._queue.listeners.remove(self._after_wgrad)

    def _after_wgrad(self, tasks: Sequence[WGradTask]) -> None:
        complete = {id(p) for task in tasks for p in task.parameters if p is not None}
        waiting = {id(p) for task in self._queue.tasks() for p in task.parameters if p is not None}
        for group in parameter_groups(self._model):
            mine = {id(parameter) for parameter in unsharded(group)}
            if mine & complete and not mine & waiting:
                group.post_backward()


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` was applied to the module itself."""
    library = sys.modules.get("torch.distributed.fsdp")  # whoever has such a module has imported it
    return library is not None and isinstance(module, library.FSDPModule)


def frees_after_forward(module: Any) -> bool:
    """Whether FSDP2 frees the weights that it gathers for a sharded module as its forward ends."""
    return any(group._reshard_after_forward for group in fsdp.groups_of(state_of(module)))


def state_of(root: Any) -> Any:
    """The state that FSDP2 keeps of a module which `fully_shard` was applied to."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(root)  # type: ignore[attr-defined]


def end_backward(root: Any) -> None:
    """Runs FSDP2's end of a backward once more: it reduces what is left under this root, and waits for it."""
    state = state_of(root)
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        # torch 2.15 sets it where a backward begins and clears it where one ends, as the one before W has
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def parameter_groups(root: Any) -> list[Any]:
    """The groups that FSDP2 gathers and reduces under this root, in the order of the model; none before it has run."""
    return [group for state in state_of(root)._state_ctx.all_states for group in fsdp.groups_of(state)]


def unsharded(group: Any) -> list[Tensor]:
    """The gathered parameters of a group: those that layers compute with, and whose gradients W writes."""
    return [part._unsharded_param for part in group.fsdp_params if hasattr(part, "_unsharded_param")]
