"""Forwards that draw no random numbers, so that a sequence and its parts can be compared while a module trains.

What is drawn for each token becomes one constant: dropout lets everything through. What is drawn once for all tokens of
a forward, as much for a part as for the whole, becomes another constant in parts: these would draw others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zbkern.pipeline.runtime.forward_state import random_state, set_random_state

_DROPOUTS = {
    *("dropout", "dropout_", "native_dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_"),
}
# What the whole or a token draws, and what draws for all tokens of a forward give in its parts by turns: on two sides
# of every threshold.
_DRAWS = {
    **dict.fromkeys(("rand", "rand_like", "uniform_"), (0.4, 0.98, 0.02)),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_"), (0.6, -1.0, 1.0)),
    **dict.fromkeys(("bernoulli", "bernoulli_"), (1.0, 0.0, 1.0)),
    **dict.fromkeys(("exponential_",), (1.0, 0.1, 3.0)),
}


class Undrawn(TorchFunctionMode):
    """Inside, torch's functions of this thread draw nothing. per_forward: whether what is drawn once for a forward
    differs between forwards; `begin` comes before each pass of the whole, and then of its parts by number."""

    def __init__(self, per_forward: bool) -> None:
        super().__init__()
        self._per_forward = per_forward
        self._part: int | None = None
        self._of_whole: set[torch.Size] = set()
        self.fault: Exception | None = None  # what has failed here; the module goes on with what it draws

    def begin(self, part: int | None) -> None:
        self._part = part if self._per_forward else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _DROPOUTS or name in _DRAWS:
            try:
                if name in _DROPOUTS:
                    return self._dropout(name, *args, **kwargs)
                return self._draw(_DRAWS[name], func, args, kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                result = func(*args, **kwargs)  # raises what is the module's own
                self.fault = self.fault or error
                return result
        if name == "scaled_dot_product_attention":
            args = args if len(args) < 5 else (*args[:4], 0.0, *args[5:])
            kwargs = {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}
        elif name == "multi_head_attention_forward" and "training" in kwargs:
            kwargs["training"] = False
        return func(*args, **kwargs)

    def _is_for_all(self, shape: torch.Size) -> bool:
        """Whether a part draws as much as the whole."""
        if self._part is None:
            self._of_whole.add(shape)
        return self._part is not None and shape in self._of_whole

    def _dropout(
        self, name: str, input: Tensor, p: float = 0.5, training: bool | None = True, inplace: bool = False, **_: Any
    ) -> Any:
        other = training and p > 0 and self._is_for_all(input.shape)
        output = input * 2 if other else input if inplace or name.endswith("_") else input * 1
        return (output, torch.ones_like(input, dtype=torch.bool)) if name == "native_dropout" else output

    def _draw(
        self,
        values: tuple[float, float, float],
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        generator = kwargs.get("generator")
        device = next((each.device for each in args if isinstance(each, Tensor)), kwargs.get("device"))
        before = random_state(torch.device("cpu" if device is None else device))
        own = None if generator is None else generator.get_state()
        drawn = func(*args, **kwargs)  # for its shape
        set_random_state(before, drawn.device)
        if generator is not None:
            generator.set_state(own)
        usual, *in_parts = values
        value = in_parts[(self._part or 0) % 2] if self._is_for_all(drawn.shape) else usual
        with torch.no_grad():
            return drawn.fill_(value)
