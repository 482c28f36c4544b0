"""Traits: what parts of a module are between steps, by which they may compute something else than in the last one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from zbkern.pipeline.runtime.slices.traces import OF_MODULES, hooks_of

_MOVES = 3  # so many values of a number are told apart: one that counts steps has another in each


class Traits:
    """Of a module's parts; is_collective: its passes are, so that hooks and attributes, which may be of some ranks
    alone, are left out: these would be probed alone."""

    def __init__(self, module: nn.Module, is_collective: bool) -> None:
        self._module, self._is_collective = module, is_collective
        self._present: object = None  # since the last `begin`
        self._numbers: dict[Hashable, set[int | float]] = {}  # the values that each has had

    def begin(self) -> None:
        """Parts may have changed."""
        self._present = None

    def of_parts(self) -> object:
        """The mode of each part, its trained weights, its hooks, and its attributes that are true or false, or a
        number, a name or a function; those of objects that it has, such as a configuration; and which buffers were
        written."""
        if self._present is None:
            known: set[int] = set()  # objects that parts share
            parts = enumerate(self._module.modules())
            self._present = tuple([value for each in parts for value in self._of(*each, known)])
        return self._present

    def _of(self, number: int, part: nn.Module, known: set[int]) -> Iterator[object]:
        yield part.training
        for parameter in part._parameters.values():
            yield parameter is not None and parameter.requires_grad
        if self._is_collective:
            return
        yield type(part)
        for hook in hooks_of(part):
            yield getattr(hook, "__code__", type(hook))
        if type(part).__module__.partition(".")[0] == "zbkern":
            return  # what those note in a first forward changes nothing
        for name, buffer in part._buffers.items():
            if buffer is not None and not nn.parameter.is_lazy(buffer) and not buffer.is_inference():
                yield name, self._value((number, name), buffer._version)
        for name, value in vars(part).items():
            if name in OF_MODULES:
                continue
            if isinstance(value, _PLAIN):
                yield name, self._value((number, name), value)
            elif _is_object(value) and id(value) not in known:
                known.add(id(value))
                for inner, content in vars(value).items():
                    if isinstance(content, _PLAIN):
                        yield name, inner, self._value((number, name, inner), content)

    def _value(self, key: Hashable, value: Any) -> object:
        if isinstance(value, FunctionType | MethodType):
            return value.__code__
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        seen = self._numbers.setdefault(key, set())
        if len(seen) <= _MOVES:
            seen.add(value)
        return value if len(seen) <= _MOVES else bool(value)


_PLAIN = (bool, int, float, str, type(None), FunctionType, MethodType)


def _is_object(value: Any) -> bool:
    """Whether it is one of the user's, or of another library's."""
    if isinstance(value, nn.Module | Tensor | Mapping | type) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "zbkern")
