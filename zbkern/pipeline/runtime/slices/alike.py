"""Forwards in which all tokens are chosen alike, so that what a choice may lead to is seen, whatever the data.

Random tokens may never fill an expert's capacity, nor reach a limit that those of a batch reach. Here all choose the
first experts, and all pass a threshold, or none, or the first ones do. What computes each token by itself still does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_CHOICES = {"argmax", "argmin", "max", "min", "topk"}
# true where the first number is large; with "_" behind them they write into it
_OF_LARGE = {"gt", "ge", "__gt__", "__ge__", "greater", "greater_equal", "heaviside"}
_OF_SMALL = {"lt", "le", "__lt__", "__le__", "less", "less_equal", "logical_not"}
_COMPARISONS = {*_OF_LARGE, *_OF_SMALL, "eq", "ne", "__eq__", "__ne__", "not_equal", "bool"}
_INTEGERS = {"long", "int", "short", "to", "type", "bucketize", "searchsorted"}  # of numbers, which say what is chosen
# of what tokens before have: these are compared with the limit itself
_SCANS = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"}
# whose results are numbers that were chosen, or steps; what makes integers or truths of numbers chooses, whatever it is
_ORDERS = {
    *("sort", "msort", "kthvalue", "quantile", "nanquantile", "median", "nanmedian", "mode", "unique", "histc"),
    *("unique_consecutive", "masked_select", "where", "round", "floor", "ceil", "trunc", "sign", "sgn"),
}
# what orders or chooses along a dimension: the place of that in a call, and which it is unless it is given
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("argmax", "argmin", "max", "min", "median", "nanmedian", "cummax", "cummin"), (1, None)),
    **dict.fromkeys(("sort", "argsort", "mode"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), (2, -1)),
    **dict.fromkeys(("quantile", "nanquantile"), (2, None)),
    "msort": (1, 0),
}
# whose results have a tensor's shape, and nothing of its numbers
_SHAPED = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty"),
}
_MOST = 1_000  # comparisons in a pass: a loop that waits for one never ends


class _Endless(RuntimeError):
    """A loop of the module's compares numbers until they are others."""


class Alike(TorchFunctionMode):
    """Inside, torch's functions of this thread choose the first of what they choose from. passes: of how many
    tokens, from the first on, numbers that depend on weights or inputs are larger than what they are compared with;
    None for those of which they are."""

    def __init__(self, passes: int | None, tokens: int) -> None:
        super().__init__()
        self._passes, self._are_alike = passes, passes in (0, tokens)
        # whether numbers were chosen from, ordered or compared; compared; and, in the last forward, tokens ordered
        self.chooses = self.compares = self.orders = False
        self.fault: Exception | None = None  # what has failed here; the module, which may catch errors, sees nothing
        # by place: what was compared that depends on data, and the part that did so
        self.compared: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
        # by identity: these are kept, so that no other has it; and whether they depend on tokens before
        self._of_data: dict[int, tuple[Tensor, bool]] = {}

    def begin(self, place: tuple[int, int], inputs: list[Tensor], running: list[str]) -> None:
        """Before a forward of the tokens of this place. running: the names of parts that will be, innermost last."""
        self._tokens, self._end = place[1] - place[0], place[1]
        self._left, self._running, self.orders = _MOST, running, False
        self._noted = self.compared[place] = []
        self._rows = next((len(leaf) for leaf in inputs if leaf.dim() > 1), 1)
        self._passing = max(0, (self._passes or 0) - place[0])  # of these
        self._of_data = {id(leaf): (leaf, False) for leaf in inputs if leaf.is_floating_point()}

    def note(self, output: Any, is_scanned: bool = False) -> None:
        """What a part has returned depends on data, whatever has computed it."""
        if self._passes is not None and isinstance(output, Tensor) and output.is_floating_point():
            self._of_data[id(output)] = output, is_scanned

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        try:
            return self._instead(getattr(func, "__name__", ""), result, args, kwargs)
        except (_Endless, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.fault = self.fault or error
            return result

    def _instead(self, name: str, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a function of this name returns in the place of its result."""
        if not self.chooses and name not in _SHAPED and _is_any((*args, *kwargs.values()), is_floating=True):
            results = result if isinstance(result, tuple | list) else (result,)
            self.chooses = name in _ORDERS or _is_any(results, is_floating=False)
        if name in _ALONG:
            self.orders |= self._is_along_tokens(name, args, kwargs)
        if name in _CHOICES:
            result = _with_first(name, result, args, kwargs)
        elif _compares(name, result):
            given = [*args, *(value for key, value in kwargs.items() if key != "out")]
            self.compares = self.compares or any(_is_data(each) for each in given)
            self.chooses |= self.compares
            if self._passes is not None and (scanned := self._scanned(given)):
                self._left -= 1
                if not self._left:
                    raise _Endless("it compares numbers until they are others")
                written = "out" in kwargs or any(result is each for each in args)
                self._noted += [
                    ("".join(self._running[-1:]), each.detach().clone())
                    for each in given
                    if each is not result and self._scanned([each])
                ]
                opposite = _OF_SMALL if self._scanned(given[:1]) else _OF_LARGE
                if any(scanned):
                    return result
                passed = self._passed(result, _not_in_place(name) not in opposite)
                return result.copy_(passed) if written else passed
        if self._passes is not None and name not in _SHAPED and (scanned := self._scanned([*args, *kwargs.values()])):
            for each in result if isinstance(result, tuple | list) else (result,):
                self.note(each, name in _SCANS or any(scanned))
        return result

    def _is_along_tokens(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        values = _values(args, kwargs)
        if values is None or (name in ("max", "min") and _is_of_two(args, kwargs)):
            return False  # the larger of two
        along = _along(name, args, kwargs)
        size = values.numel() if along is None or not values.dim() else values.shape[along]
        return bool(size and size % self._tokens == 0)

    def _passed(self, result: Tensor, value: bool) -> Tensor:
        """What a comparison gives where this is the value for tokens that pass."""
        if self._are_alike:
            return torch.full_like(result, (self._passing > 0) == value)
        if result.dim() < 2 or len(result) != self._rows or result.shape[1] not in (self._tokens, self._end):
            return result  # which dimension is that of tokens is not known
        passed = torch.full_like(result, not value)
        count = self._passing if result.shape[1] == self._tokens else self._passes  # of all that slices have left
        passed[:, :count] = value
        return passed

    def _scanned(self, values: Iterable[Any]) -> list[bool]:
        """Of each that depends on data, whether it does on tokens before."""
        found = []
        for value in values:
            if isinstance(value, nn.Parameter):
                found.append(False)
            elif isinstance(value, Tensor):
                found += [self._of_data[id(value)][1]] if id(value) in self._of_data else []
            elif isinstance(value, tuple | list):
                found += self._scanned(value)
        return found


def _is_any(values: Iterable[Any], is_floating: bool) -> bool:
    """Whether any is a tensor of these numbers, or of others."""
    return any(isinstance(each, Tensor) and each.is_floating_point() == is_floating for each in values)


def _compares(name: str, result: Any) -> bool:
    """Whether a function of this name compares numbers, or makes integers of them, and gives more than one."""
    if not isinstance(result, Tensor) or result.is_nested or not result.dim():
        return False
    if name in _INTEGERS:
        return not (result.is_floating_point() or result.is_complex())
    return _not_in_place(name) in _COMPARISONS


def _not_in_place(name: str) -> str:
    """The function that this one, such as `gt_`, is in place: the same where it is no such."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not isinstance(value, nn.Parameter)


def _is_of_two(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return isinstance(kwargs.get("other", args[1] if len(args) > 1 else None), Tensor)


def _values(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The floating-point numbers that a call orders, or chooses from."""
    values = args[0] if args else kwargs.get("input")
    is_taken = isinstance(values, Tensor) and values.is_floating_point() and not values.is_nested
    return values if is_taken else None


def _along(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    place, default = _ALONG[name]
    return kwargs.get("dim", args[place] if len(args) > place else kwargs.get("axis", default))


def _with_first(name: str, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A result with indices of the first one, or the first ones, of those that no mask has taken out."""
    values = _values(args, kwargs)
    indices = result if name.startswith("arg") else result[1] if isinstance(result, tuple) else None
    if indices is None or values is None:
        return result
    along = _along(name, args, kwargs)
    if along is None or not values.dim():
        return result  # of all numbers, in the place of one of each token
    is_masked = values.abs() >= torch.finfo(values.dtype).max / 2
    first = is_masked.to(torch.int8).argsort(dim=along, stable=True)
    first = first.narrow(along, 0, indices.shape[along] if name == "topk" else 1).view(indices.shape)
    if "out" in kwargs:
        indices.copy_(first)
    elif indices is result:
        return first
    else:  # new ones, for the gradient of the values needs theirs
        return type(result)((result[0], first))
    return result
