"""Blocks in two halves, attention and MLP: which of its parts each half has is told by the block's own forward.

Parts are divided in the order in which they are called. With zeros from the parts of one half the forward must give
what the other half adds to its input: the forwards of both halves one after another are compared with that of the whole
block, bit for bit, with a small random function in the place of every part. Parallel blocks, and norms of the sum, fail
that; weights and sizes do not matter to it.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbkern.pipeline.models.stand_ins import Flow, Zeros, first_tensor
from zbkern.pipeline.transport.tensors import tensors_in

_ROWS, _TOKENS, _FEATURES = 5, 4, 3  # more rows than outputs, so that a tensor is not taken for several
_MOST_OUTPUTS = 3


class Halves(NamedTuple):
    """Names of the parts of both halves, and how many outputs each part has, 0 for a tensor that is no tuple."""

    parts: tuple[tuple[str, ...], tuple[str, ...]]
    outputs: dict[str, int]

    def parameters(self, block: nn.Module, half: int) -> int:
        return sum(p.numel() for name in self.parts[half] for p in block.get_submodule(name).parameters())


def halves_of(block: nn.Module) -> Halves | None:
    """The halves of a block, the second as small as can be; None where it cannot be cut in two."""
    parts = dict(block.named_children())
    own = [*block._parameters.values(), *block._buffers.values()]
    if any(tensor is not None for tensor in own):
        return None
    found = Halves(((), ()), dict.fromkeys(parts, 0))
    try:
        _, calls = _run_whole(block, found.outputs)
        for name in {name for name in calls if calls.count(name) > 1 and not parts[name].state_dict()}:
            del found.outputs[name]  # dropout, which both halves have
        whole, calls = _run_whole(block, found.outputs)
        order = [*dict.fromkeys(calls)]
        if whole is None or any(part.state_dict() for name, part in parts.items() if name not in order):
            return None
    except Exception:  # whatever a forward raises that needs more than its input
        return None
    for end in reversed(range(1, len(order))):
        divided = tuple(order[:end]), tuple(order[end:])
        with suppress(Exception):
            first, _ = _run(block, found.outputs, _input(), divided[1])
            if first is None or torch.equal(first, whole) or torch.equal(first, _input()):
                continue  # all is in one of them
            both, _ = _run(block, found.outputs, first, divided[0])
            if both is not None and torch.equal(both, whole):
                return found._replace(parts=divided)
    return None


def _run_whole(block: nn.Module, outputs: dict[str, int]) -> tuple[Tensor | None, list[str]]:
    """Finds how many outputs each part has: one more for the part that the forward fails after."""
    while True:
        calls: list[str] = []
        try:
            return _run(block, outputs, _input(), (), calls)
        except Exception:
            if not calls or outputs[calls[-1]] == _MOST_OUTPUTS:
                raise
            outputs[calls[-1]] = max(2, outputs[calls[-1]] + 1)


def _run(
    block: nn.Module, outputs: dict[str, int], hidden: Tensor, absent: tuple[str, ...], calls: list[str] | None = None
) -> tuple[Tensor | None, list[str]]:
    """What the block's forward makes of `hidden`, where that is one tensor; and the names of the parts as they were
    called, which are in `calls` also where it fails."""
    twin, calls = _in_evaluation(block), [] if calls is None else calls
    parts = {
        name: part
        if part is None
        else _in_evaluation(part)
        if name not in outputs
        else Zeros(part, name, Flow(), outputs[name])
        if name in absent
        else _Function(part, name, outputs, calls)
        for name, part in block._modules.items()
    }
    twin.__dict__["_modules"] = parts
    parameters = [*inspect.signature(twin.forward).parameters.values()][1:]
    unknown = {p.name: None for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    with torch.no_grad():
        output = twin.forward(hidden, **unknown)
    found = tensors_in(output)
    first = output[0] if isinstance(output, tuple) else output
    return (first if [*map(id, found)] == [id(first)] else None), calls


def _in_evaluation(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin.training = False
    return twin


def _input() -> Tensor:
    return torch.randn(_ROWS, _TOKENS, _FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class _Function(Zeros):
    """In the place of a part: a function that no other part has."""

    def __init__(self, original: nn.Module, name: str, outputs: dict[str, int], calls: list[str]) -> None:
        super().__init__(original, name, Flow(), outputs[name])
        self._outputs_of, self._calls = outputs, calls

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self._calls.append(self._name)
        place = 1 + [*self._outputs_of].index(self._name)
        return self._shaped(torch.sin(place * first_tensor(inputs, keywords) + place))
