"""Models that compute parts in float32 whatever they are given, made to compute in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class InFloat64(TorchFunctionMode):
    """Inside, on this thread, whatever asks a function of torch for float32 gets float64."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = Tensor.double if function is Tensor.float else function
        args = tuple(map(_wide, args))
        return function(*args, **{name: _wide(value) for name, value in (kwargs or {}).items()})
