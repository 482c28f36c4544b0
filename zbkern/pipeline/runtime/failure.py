"""After a failure: hints for its message on memory and input, and whether ranks can go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zbkern.pipeline.transport.mailbox import PipelineError, described
from zbkern.pipeline.transport.tensors import kinds
from zbkern.schedules.actions import Action
from zbkern.wgrad import WGradQueue


def oom_hint(error: BaseException, planned: int, begun: int, queue: WGradQueue, device: torch.device) -> str:
    """What the message of an error for lack of memory adds, empty for others.

    planned: units that the schedule holds at its peak on this rank; begun: those that it held.
    """
    # on a CPU torch raises a RuntimeError of its allocator's
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "DefaultCPUAllocator" not in described(error):
        return ""
    held = f"; the schedule holds {planned} units at its peak on this rank, {begun} were begun"
    held += f", {queue.pending()} W pinned {queue.bytes / 2**20:.0f} MiB"
    if device.type == "cuda":
        held += f", {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB were allocated at most"
    return held + "; a plan with a lower memory_limit or max_wgrad_bytes needs less"


def input_of(error: BaseException, action: object, placement: Sequence[int], arrived: Any) -> str:
    """What the message of a forward's error adds: what arrived there, which another rank's model may have made wrong.

    placement: the rank of every chunk. Of an error in `loss_fn`, what that got.
    Empty for other errors that no wrong input raises.
    """
    if notes := getattr(error, "__notes__", None):  # of loss_fn
        return "; " + "; ".join(map(str, notes))
    if not (isinstance(error, (RuntimeError, TypeError, ValueError)) and isinstance(action, Action)):
        return ""
    hint = "; a chunk must not modify its input: let it change a clone" if "in-place operation" in str(error) else ""
    if action.kind != "F" or action.chunk == 0:
        return hint
    return f"; its input, of chunk {action.chunk - 1} on rank {placement[action.chunk - 1]}, was {kinds(arrived)}{hint}"


def check_same_step(calls: Sequence[tuple[str | None, int]]) -> None:
    """Raises PipelineError where ranks would go on differently after a failure.

    calls: by rank, what it is about to do, None where its arguments are wrong, which it says next; and how often it
    has. A rank hears of a failure wherever it is, which may be the call before or after the one that failed.
    """
    if len({call for call, _ in calls if call}) > 1 or len({completed for _, completed in calls}) > 1:
        raise PipelineError(
            "ranks are not at the same step after a failure, because some had completed it; load a checkpoint and make "
            "the same call on all; by rank, the call, and how many were completed before it: "
            + ", ".join(f"{call} after {completed}" for call, completed in calls)
        )
