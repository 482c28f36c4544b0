"""A sequence-parallel linear that keeps this rank's shard of its gathered input; its W all-gathers the input again.

Such a W communicates: all ranks of the group must run the same W in the same order, see
`WGradQueue(regather_inputs=...)`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zbkern.ops.functions._shapes import ShardLayout, as_rows
from zbkern.ops.functions.collectives import arrived
from zbkern.wgrad import Segment, WGradKernel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def part_of(x: DTensor) -> DTensor | None:
    """This rank's part of a gathered x [..., K], as it was before; None where x was not gathered along its tokens.

    All layers that take the same x share one part, in memory of its own.
    """
    spec = getattr(x.grad_fn, "current_spec", None)  # of the redistribution that made x
    if spec is None or not all(placement.is_replicate() for placement in x.placements):
        return None
    if not any(placement.is_shard() for placement in spec.placements):
        return None
    if any(p.is_partial() or p.is_shard(x.dim() - 1) for p in spec.placements):
        return None
    node: Any = x.grad_fn
    kept = node.metadata.get("zbkern_part", lambda: None)()
    if kept is None:
        with torch.no_grad():
            kept = x.redistribute(placements=spec.placements)  # copies: no view that keeps all of x
        node.metadata["zbkern_part"] = weakref.ref(kept)
    return kept


@functools.cache
def gathering(kernel: WGradKernel, parts: ShardLayout, whole: tuple[Placement, ...]) -> WGradKernel:
    """The kernel for segments whose x is a part: gathers one microbatch while it computes the one before."""

    def start(part: Tensor) -> Tensor:
        return parts.tensor(part).redistribute(placements=whole, async_op=True)._local_tensor

    def run(segments: Sequence[Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
        coming = start(segments[0][0])
        for index, (_, dy) in enumerate(segments):
            x = arrived(coming)
            if index + 1 < len(segments):
                coming = start(segments[index + 1][0])
            kernel.run([(as_rows(x), dy)], outputs, accumulate)
            accumulate = True

    return WGradKernel(run, empty=kernel.empty)
