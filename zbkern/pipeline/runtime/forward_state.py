"""What forwards change besides activations, saved before forwards that may have to be run again, or are."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_SCALARS = bool | int | float | str | None


class ForwardState:
    """What forwards change besides activations: buffers, written in place or replaced, numbers that modules have as
    attributes, and the random numbers that come next, torch's on the CPU and on one device, and Python's."""

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        self._entries = [(part._buffers, dict(part._buffers)) for module in modules for part in module.modules()]
        self._numbers = [_Numbers(part) for module in modules for part in module.modules()]
        buffers = [each for module in modules for each in module.buffers() if not (is_lazy(each) or _is_expanded(each))]
        self._copies = [(buffer, buffer.clone(), buffer._version) for buffer in buffers]
        self._random, self.device = random_state(device), device

    def keep_written(self) -> None:
        """After the forward: gives up the copies of buffers that it has not written."""
        self._copies = [each for each in self._copies if each[0]._version != each[2]]

    def restore(self) -> None:
        """Everything as it was when this was made, except buffers that were given up."""
        for present, entries in self._entries:
            present.update(entries)
        for numbers in self._numbers:
            numbers.restore()
        with torch.no_grad():
            for buffer, copy, version in self._copies:
                # batch norm's kernels write running statistics, which its backward saves, and leave their version as
                # it is: so must this
                (buffer if buffer._version != version else buffer.data).copy_(copy)
        set_random_state(self._random, self.device)


class _Numbers:
    """The numbers that a module has as attributes, and tensors without a graph: how many tokens it has seen, say, and
    its tables for as many."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._attributes = vars(module)
        self._names = {*self._attributes}
        self._values = self._present()

    def restore(self) -> None:
        for name in self._present():
            if name not in self._names:
                del self._attributes[name]
        self._attributes.update(self._values)

    def _present(self) -> dict[str, Any]:
        return {name: value for name, value in self._attributes.items() if name != "training" and _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, _SCALARS) or (isinstance(value, torch.Tensor) and value.grad_fn is None)


def random_state(device: torch.device) -> dict[str, Any]:
    """The random numbers that come next, by who draws them."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def left_as_they_were(modules: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Puts gradients, buffers and random numbers back at the end."""
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    before = ForwardState(modules, device)
    try:
        yield
    finally:
        before.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def evaluation_mode(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, modules are in evaluation mode; afterwards each of their parts is in the mode that it was in."""
    modules = [*modules]
    modes = [(part, part.training) for module in modules for part in module.modules()]  # parents first
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes:
            if part.training is not mode:  # by train(), which some layers override
                part.train(mode)


def _is_expanded(buffer: torch.Tensor) -> bool:
    """Whether elements share memory, as in stand-ins of `cut`: nothing can be written there."""
    if buffer.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
