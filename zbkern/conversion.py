"""Swaps the modules of a model for their zbkern twins in place, and back: same objects, parameters, hooks and keys."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from zbkern import nn

Module = torch.nn.Module
Model = TypeVar("Model", bound=Module)
Filter = Callable[[str, Module], bool]

_TWINS: dict[type[Module], type[Module]] = {
    torch.nn.Linear: nn.Linear,
    torch.nn.Embedding: nn.Embedding,
    torch.nn.LayerNorm: nn.LayerNorm,
    torch.nn.RMSNorm: nn.RMSNorm,
}


def convert(model: Model, filter: Filter | None = None) -> Model:
    """Gives every module that has a zbkern twin the twin's behaviour; returns `model`, changed in place.

    Known are torch's Linear, Embedding, LayerNorm and RMSNorm, and the transformers library's Conv1D. filter(name,
    module) says whether to convert that module; None converts all. A module is converted only when its type is exactly
    a known one: a subclass may override what it inherits. `left_alone` tells what stayed, `restore` undoes it.
    """
    _check("convert", model, filter)
    for name, module in model.named_modules():
        if _why_not(module) is None and (filter is None or filter(name, module)):
            twin = _twin(type(module))
            assert twin is not None
            module.__class__ = twin
            module.zbkern_name = name
    return model


def restore(model: Model, filter: Filter | None = None) -> Model:
    """Gives converted modules their torch behaviour back; returns `model`, changed in place."""
    _check("restore", model, filter)
    for name, module in model.named_modules():
        original = _original(type(module))
        if original is not None and (filter is None or filter(name, module)):
            module.__class__ = original
            module.__dict__.pop("zbkern_name", None)
    return model


def left_alone(model: Module) -> dict[str, str]:
    """Every module with parameters of its own that is not zbkern's, by name, with the reason it was not converted."""
    _check("left_alone", model, None)
    return {
        name: _why_not(module) or "not converted yet, or filtered out"
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False)) and not type(module).__module__.startswith("zbkern.")
    }


def _why_not(module: Module) -> str | None:
    """Why this module has no twin, or None when it has."""
    kind = type(module)
    if _twin(kind) is None:
        known = next((base for base in kind.__mro__ if _twin(base) is not None), None)
        if known is not None:
            return f"{kind.__name__} is a subclass of {known.__name__} and may behave differently"
        return f"{kind.__name__} has no zbkern twin"
    if isinstance(module, torch.nn.Embedding):
        unusual = [o for o in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, o) not in (None, False)]
        return f"Embedding with {', '.join(unusual)} is torch's alone" if unusual else None
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm) and len(module.normalized_shape) != 1:
        return f"{kind.__name__} over {len(module.normalized_shape)} dimensions; zbkern normalises the last one"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized: its weight is computed, so there is nothing to defer"
    return None


def _twin(kind: type[Module]) -> type[Module] | None:
    if kind in _TWINS:
        return _TWINS[kind]
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and kind is getattr(transformers, "Conv1D", None):
        return _conv1d_twin(kind)
    return None


@functools.cache
def _conv1d_twin(kind: type[Module]) -> type[Module]:
    """A subclass, so that the library still recognises its Conv1D; made here, so that nobody needs to install it."""
    return type("Conv1D", (nn.TransposedLinear, kind), {"__module__": "zbkern.nn"})


def _original(kind: type[Module]) -> type[Module] | None:
    for original, twin in _TWINS.items():
        if kind is twin:
            return original
    return kind.__mro__[2] if kind.__mro__[1] is nn.TransposedLinear else None


def _check(caller: str, model: Module, filter: Filter | None) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"{caller}: model must be a torch.nn.Module; got {type(model).__name__}")
    if filter is not None and not callable(filter):
        raise TypeError(f"{caller}: filter must be callable as filter(name, module); got {type(filter).__name__}")
