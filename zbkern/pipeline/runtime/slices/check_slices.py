"""check_slices: whether a module gives for a sequence in slices what it gives for the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern import schedules
from zbkern.pipeline.runtime.arguments import device_of
from zbkern.pipeline.runtime.forward_state import evaluation_mode, left_as_they_were
from zbkern.pipeline.runtime.slices.sliced_batch import check_sliceable, cut, edges, length_of
from zbkern.pipeline.runtime.stage import Stage
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.schedules.slices import slice_lengths
from zbkern.wgrad import WGradQueue

_EXACT = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative; of others, 16 bits, 5e-2


def check_slices(
    module: torch.nn.Module,
    inputs: Any,
    slices: int | Sequence[int] = 4,
    side: Mapping[str, Any] | None = None,
) -> None:
    """Runs one microbatch through a module whole and in slices, and compares outputs and gradients of parameters.

    module: a chunk, or a whole model that is one, in evaluation mode meanwhile. inputs, side: what it takes of one
    microbatch, as in `Pipeline.step`. slices: their number, or their lengths. Raises ValueError naming the first token
    or the parameter that differs, TypeError or ValueError as a `Pipeline` does. Gradients and random
    numbers are left as they were.
    """
    lengths = slice_lengths("check_slices", slices)
    check_sliceable([module])
    tokens = length_of(inputs, side)
    if tokens is None:
        raise ValueError("check_slices: inputs must have a tensor with the sequence as dimension 1; got none")
    with left_as_they_were([module], device_of(None, [module])), evaluation_mode([module]), torch.enable_grad():
        _take_gradients(module)
        whole, cotangents = _outputs(module, inputs, side or {}, tokens, (1,), None)
        expected = _take_gradients(module)
        sliced, _ = _outputs(module, inputs, side or {}, tokens, lengths, cotangents)
        in_slices = _take_gradients(module)
    _compare_outputs(module, whole, sliced)
    for name, gradient in expected.items():
        if (error := _error(in_slices.get(name, torch.zeros_like(gradient)), gradient)) > _exact(gradient):
            raise ValueError(
                f"check_slices: the gradient of {name} in slices is off by {error:.1e} of its largest value, although "
                "outputs agree: what goes through the carry must keep its graph (Carry.append, Carry.keep)"
            )


def _outputs(
    module: torch.nn.Module, inputs: Any, side: Mapping[str, Any], tokens: int, slices: tuple[int, ...], cotangents: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """What the slices return, tensor by tensor put together, and the gradients that their B began with: random ones
    where none are given. Leaves the gradients of parameters."""
    queue = WGradQueue()
    stage = Stage(module, 0, queue)
    stage.use(schedules.gpipe(1, 1, slices=slices))
    places = edges("check_slices", tokens, slices)
    outputs = []
    for number, place in enumerate(places):
        carry = stage.carries.begin(number, place[1] - place[0], inputs)
        part = cut(inputs, tokens, place)
        outputs.append(stage.forward(number, part, None, {**cut(dict(side), tokens, place), **carry}))
    leaves = [[leaf.detach() for leaf in tensors_in(each)] for each in outputs]
    together = [torch.cat(parts, 1) if parts[0].dim() > 1 else parts[0] for parts in zip(*leaves, strict=True)]
    cotangents = cotangents or [torch.randn_like(each) for each in together]
    spec = pytree.tree_structure(outputs[0])
    for number, place in reversed([*enumerate(places)]):
        cotangent_parts = [cut(each, tokens, place) for each in cotangents]
        stage.backward_input(number, pytree.tree_unflatten(cotangent_parts, spec))
        stage.weight(number)
    return together, cotangents


def _take_gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    for parameter in module.parameters():
        parameter.grad = None
    return gradients


def _compare_outputs(module: torch.nn.Module, whole: Sequence[Tensor], sliced: Sequence[Tensor]) -> None:
    for one, other in zip(whole, sliced, strict=True):
        if (error := _error(other, one)) > _exact(one):
            wrong = (other - one).abs() > _exact(one) * one.abs().max()
            token = wrong.transpose(0, 1).flatten(1).any(1).nonzero()[0].item()
            raise ValueError(
                f"check_slices: {type(module).__name__} gives other outputs in slices, from token {token} on, by "
                f"{error:.1e} of the largest: a part of it looks at whole sequences, and must get what came before "
                "from the carry"
            )


def _error(actual: Tensor, expected: Tensor) -> float:
    largest = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((actual - expected).abs().max() / largest)


def _exact(tensor: Tensor) -> float:
    return _EXACT.get(tensor.dtype, 5e-2)
