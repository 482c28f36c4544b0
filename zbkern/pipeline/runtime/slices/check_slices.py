"""check_slices: whether a module gives for a sequence in slices what it gives for the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zbkern.pipeline.runtime.slices.probe import difference_of_slices
from zbkern.pipeline.runtime.slices.probe_inputs import Call
from zbkern.pipeline.runtime.slices.sliced_batch import check_sliceable, edges, length_of
from zbkern.pipeline.runtime.stage import Stage
from zbkern.schedules.slices import slice_lengths
from zbkern.wgrad import WGradQueue


def check_slices(
    module: torch.nn.Module,
    inputs: Any,
    slices: int | Sequence[int] = 4,
    side: Mapping[str, Any] | None = None,
) -> None:
    """Compares what a module computes for whole sequences and in slices, as a `Pipeline` does before its first slice,
    and also for sequences as long as these.

    module: a chunk, or a whole model that is one, in the mode that it is in. inputs, side: of the kinds that it takes,
    of one microbatch, as in `Pipeline.step`; what is compared has random tokens. slices: their number, or their
    lengths. Raises ValueError naming the part that differs, or the parameter whose gradient does, TypeError or
    ValueError as a `Pipeline` does. It leaves no trace in the module.
    """
    lengths = slice_lengths("check_slices", slices)
    check_sliceable([module])
    tokens = length_of(inputs, side)
    if tokens is None:
        raise ValueError("check_slices: inputs must have a tensor with the sequence as dimension 1; got none")
    own = [end - first for first, end in edges("check_slices", tokens, lengths)]
    call = Call(inputs, dict(side or {}), tokens, tokens)
    with torch.enable_grad():
        found = difference_of_slices(module, Stage(module, 0, WGradQueue()).call, call, own)
    if found is not None:
        raise ValueError(f"check_slices: {type(module).__name__} cannot take sequences in slices{found}")
