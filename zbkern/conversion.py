"""Swaps the modules of a model for their zbkern twins in place, and back: same objects, parameters, hooks and keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zbkern import nn

_TWINS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {torch.nn.Linear: nn.Linear}


def convert(model: torch.nn.Module, filter: Callable[[str, torch.nn.Module], bool] | None = None) -> torch.nn.Module:
    """Gives every module that has a zbkern twin the twin's behaviour; returns `model`, changed in place.

    filter(name, module) says whether to convert that module; None converts all. A module is converted only when its
    type is exactly a known one: a subclass may override what it inherits, so it is left alone. `restore` undoes it.
    """
    _swap("convert", model, _TWINS, filter)
    return model


def restore(model: torch.nn.Module, filter: Callable[[str, torch.nn.Module], bool] | None = None) -> torch.nn.Module:
    """Gives converted modules their torch behaviour back; returns `model`, changed in place."""
    _swap("restore", model, {twin: original for original, twin in _TWINS.items()}, filter)
    return model


def _swap(
    caller: str,
    model: torch.nn.Module,
    twins: dict[type[torch.nn.Module], type[torch.nn.Module]],
    filter: Callable[[str, torch.nn.Module], bool] | None,
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{caller}: model must be a torch.nn.Module; got {type(model).__name__}")
    if filter is not None and not callable(filter):
        raise TypeError(f"{caller}: filter must be callable as filter(name, module); got {type(filter).__name__}")
    for name, module in model.named_modules():
        twin = twins.get(type(module))
        if twin is not None and (filter is None or filter(name, module)):
            module.__class__ = twin
            module.zbkern_name = name
