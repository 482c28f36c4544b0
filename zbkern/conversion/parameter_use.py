"""Which modules use parameters of the modules inside them instead of calling these: read off the code of their forward.

Mixers take `self.conv1d.weight`, blocks of experts `self.mlp.w1`, decoders `self.queries.weight`: the forward of the
module that owns such a parameter never runs.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

Names = tuple[str, ...]

# What follows a parameter's name where only that is asked
QUESTIONS = {"dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_cuda", "data", "grad"}


def uses_parameters_within(module: nn.Module) -> bool:
    """True where the forward of a module, or a method that it calls, names a parameter of a module inside it.

    `self.child.weight`, `layer.weight` of whatever layer, a ParameterList; also a method of the child besides its
    forward, if the child has parameters of its own. A module of torch.nn itself calls what is inside it.
    """
    if not module._modules:
        return False
    kind: Any = type(module)  # mypy takes the hash of a class for that of its objects
    own, others = _attributes(kind)
    if any(_finds_parameter(module, names) for names in own):
        return True
    within = {name for child in module.modules() if child is not module for name in child._parameters}
    return any(name in within and not QUESTIONS.intersection(rest) for name, *rest in others)


def _finds_parameter(module: nn.Module, names: Names) -> bool:
    """Whether names, as in self.names[0].names[1], lead to a parameter of a module inside this one."""
    for place, name in enumerate(names):
        child = module._modules.get(name)
        if child is None:
            if place == 0:
                return False
            if name in module._parameters:
                return not QUESTIONS.intersection(names[place + 1 : place + 2])
            return bool(module._parameters) and hasattr(type(module), name) and not hasattr(nn.Module, name)
        module = child
    return isinstance(module, nn.ParameterList | nn.ParameterDict)


@functools.cache
def _attributes(kind: type[nn.Module]) -> tuple[frozenset[Names], frozenset[Names]]:
    """Attributes that the forward reads, and the methods that it calls: those of `self` with the attributes read of
    these in turn, and a name with what is read of it for every other object."""
    own: set[Names] = set()
    others: set[Names] = set()
    seen: set[str] = set()
    pending = ["forward"]
    while pending:
        method = pending.pop()
        if method in seen:
            continue
        seen.add(method)
        for code, module in _definitions(kind, method):
            pending += [name for name in code.co_names if hasattr(kind, name) and not hasattr(nn.Module, name)]
            for of_self, names in _chains(code, module):
                if of_self:
                    own.add(names)
                else:
                    others.update(names[place : place + 2] for place in range(len(names)))
    return frozenset(own), frozenset(others)


def _definitions(kind: type[nn.Module], method: str) -> Iterator[tuple[CodeType, str]]:
    """The code of a method in every class that defines it, and of the functions inside it, each with the name that the
    module has there; torch's classes aside."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or method not in vars(base):
            continue
        code = getattr(inspect.unwrap(getattr(base, method)), "__code__", None)
        if code is None or not code.co_varnames:
            continue
        module, pending = code.co_varnames[0], [code]
        while pending:
            code = pending.pop()
            yield code, module
            pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _chains(code: CodeType, module: str) -> Iterator[tuple[bool, Names]]:
    """(whether of the module, names) for every a.b.c in the code."""
    of_self, names = False, []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(instruction.argval)
            continue
        if names:
            yield of_self, tuple(names)
        loaded = instruction.argval  # of two names, which newer versions of Python load at once, the later
        loaded = loaded[-1] if isinstance(loaded, tuple) and loaded else loaded
        of_self, names = instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and loaded == module, []
