"""Calls whose operands lie in memory as those of an earlier call did: its launches again.

What a W's Python works out (layouts, the tile, the grid, what is a descriptor) follows from the shapes, strides and
dtypes of its operands and from where they begin modulo 16 bytes: operands at new addresses get new descriptors only.
Where the addresses are known, too, as in a loop over static microbatches, a call is a lookup and the launch. No tensor
is kept: whatever lies at an address with that layout now is what the call is about.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zbkern.kernels.triton.common import Launch, recorded, recording
from zbkern.kernels.triton.direct import Direct, direct, hooked, launch_all
from zbkern.kernels.triton.matmul_tile import described, precision

_UNKNOWN: Any = object()
_Value = TypeVar("_Value")


class _Template(NamedTuple):
    """A launch without its tensors. pointers: (argument, operand). descriptors: (argument, operand, shape, strides,
    block)."""

    launch: Launch
    pointers: list[tuple[int, int]]
    descriptors: list[tuple[int, int, list[int], list[int], list[int]]]

    def again(self, operands: Sequence[Tensor]) -> None:
        self.launch._replace(arguments=self._filled(operands, operands)).again()

    def direct(self, operands: Sequence[Tensor], addresses: Sequence[int]) -> Direct | None:
        if self.launch.compiled is None:
            return None
        return direct(self.launch.compiled, self.launch.grid, self._filled(operands, addresses), self.launch.constants)

    def _filled(self, operands: Sequence[Tensor], pointers: Sequence[Tensor] | Sequence[int]) -> list[Any]:
        arguments = list(self.launch.arguments)
        for place, operand in self.pointers:
            arguments[place] = pointers[operand]
        for place, operand, *layout in self.descriptors:
            arguments[place] = described(operands[operand], *layout)
        return arguments


class _Bounded(dict[Hashable, _Value], Generic[_Value]):
    """At most so many; then any of them makes room. Microbatches come round and round: were it the oldest, or the one
    that was not asked for the longest, each would go just before its turn."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order: list[Hashable] = []
        self._random = random.Random(0)  # not the program's, whose numbers are its own

    def keep(self, key: Hashable, value: _Value) -> None:
        if key not in self:
            if len(self._order) < self._size:
                self._order.append(key)
            else:
                place = self._random.randrange(self._size)
                self.pop(self._order[place], None)
                self._order[place] = key
        self[key] = value

    def clear(self) -> None:
        super().clear()
        self._order.clear()


class Replay:
    """The launches of calls: of at most so many ways in which operands lie, at most so many sets of addresses."""

    def __init__(self, layouts: int = 1024, addresses: int = 4096) -> None:
        self._templates: _Bounded[list[_Template] | None] = _Bounded(layouts)
        self._direct: _Bounded[list[Direct]] = _Bounded(addresses)
        self._paused = 0

    def run(self, call: Callable[[], None], operands: Sequence[Any], options: Hashable) -> None:
        """call(), or the launches that it would make.

        operands: every tensor that the call reads or writes, on one device, or None; the first is a tensor. options:
        whatever else its launches depend on, its name too. The call must do nothing but launch kernels, unless an
        operand is empty or it allocates (a copy of an operand, say): launches on other memory than the operands' are
        not repeated.
        """
        if self._paused or recording():  # or a part of a call that is
            return call()
        device = operands[0].get_device()
        where: list[Any] = [options, device]
        for operand in operands:  # in one pass: this is most of what a call costs
            where += (0,) if operand is None else (operand.data_ptr(), operand.dtype, operand.shape, operand.stride())
        here = tuple(where)
        launches = self._direct.get(here)
        if launches is not None and not hooked():
            return launch_all(launches, device)
        addresses = [0 if operand is None else operand.data_ptr() for operand in operands]
        layouts = [None if t is None else (t.dtype, t.shape, t.stride()) for t in operands]
        # which operands begin at one address is what arguments are told apart by
        layout = options, device, *[address % 16 for address in addresses], *map(addresses.index, addresses), *layouts
        templates = self._templates.get(layout, _UNKNOWN)
        if templates is _UNKNOWN:
            with recorded() as made:
                call()
            if made and all(operand is None or operand.numel() for operand in operands):
                self._templates.keep(layout, _templates(made, operands))
            return None
        if templates is None:
            return call()
        launches = None if hooked() else [template.direct(operands, addresses) for template in templates]
        if launches is None or None in launches:
            for template in templates:
                template.again(operands)
            return None
        self._direct.keep(here, launches)
        return launch_all(launches, device)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, calls are made: for programs that change what they launch, or what launching is. Forgets all."""
        self._paused += 1
        self.forget()
        try:
            yield
        finally:
            self._paused -= 1

    def forget(self) -> None:
        self._templates.clear()
        self._direct.clear()


def _templates(launches: Sequence[Launch], operands: Sequence[Tensor | None]) -> list[_Template] | None:
    """None where a launch takes other memory than the operands'."""
    places = {(tensor.data_ptr(), tensor.dtype): i for i, tensor in enumerate(operands) if tensor is not None}
    found = []
    for launch in launches:
        arguments, pointers, descriptors = list(launch.arguments), [], []
        for place, argument in enumerate(launch.arguments):
            base = argument.base if isinstance(argument, TensorDescriptor) else argument
            if not isinstance(base, Tensor):
                continue
            operand = places.get((base.data_ptr(), base.dtype))
            if operand is None:
                return None
            arguments[place] = None
            if base is argument:
                pointers.append((place, operand))
            else:
                descriptors.append((place, operand, argument.shape, argument.strides, argument.block_shape))
        template = launch._replace(arguments=arguments)
        found.append(_Template(template, pointers, descriptors))
    return found


replay = Replay()
"""Of all kernels."""


def replayed(call: Callable[..., None]) -> Callable[..., None]:
    """`call` with its launches replayed. Of its arguments, those that are tensors are its operands, the first among
    them; its launches depend on nothing but these, the others, and how float32 is multiplied."""

    @functools.wraps(call)
    def run(*arguments: Any, **options: Any) -> None:
        values = (*arguments, *options.values())
        operands = [value for value in values if isinstance(value, Tensor)]
        others = [Tensor if isinstance(value, Tensor) else value for value in values]
        key = (call, *options, *others, precision(operands[0].dtype))
        replay.run(lambda: call(*arguments, **options), operands, key)

    return run
