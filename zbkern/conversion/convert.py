"""Swaps the modules of a model for their zbkern twins in place, and back: same objects, parameters, hooks and keys.

`unconverted` lists the modules that stayed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from zbkern import nn
from zbkern.conversion.interception import Intercepted
from zbkern.conversion.recognition import is_rms_norm
from zbkern.ops import checks
from zbkern.wgrad import no_defer

Module = torch.nn.Module
Model = TypeVar("Model", bound=Module)
Filter = Callable[[str, Module], bool]

_TWINS: dict[type[Module], type[Module]] = {
    torch.nn.Linear: nn.Linear,
    torch.nn.Embedding: nn.Embedding,
    torch.nn.LayerNorm: nn.LayerNorm,
    torch.nn.RMSNorm: nn.RMSNorm,
}
LISTS = torch.nn.ParameterList | torch.nn.ParameterDict  # whose parameters the module around them uses
# Of the transformers library: modules that use parameters of modules inside them without calling these
USERS = {
    *("DbrxExperts", "LongcatFlashTopkRouter", "InklingShortConvolution", "Inkling2ShortConvolution"),
    *("KimiLinearDeltaAttention", "BailingHybridDeltaAttention", "Lfm2MoeShortConv", "Lfm3ShortConv"),
}
_SUBCLASSES: dict[tuple[type[Module], type[Module]], type[Module]] = {}  # twins of classes that others define


def convert(
    model: Model,
    filter: Filter | None = None,
    impl: str | None = None,
    defer: Filter | None = None,
) -> Model:
    """Gives every module that has a zbkern twin the twin's behaviour; returns `model`, changed in place.

    Known are torch's Linear, Embedding, LayerNorm and RMSNorm, the transformers library's Conv1D, and RMSNorms of other
    libraries whose forward does what `recognition.py` lists. (Where they round half precisions before the weight as
    well, that rounding is left out.) A subclass of torch's four that inherits its forward computes what they do. Any
    other module with parameters of its own keeps its forward, in which the torch functions that take a parameter become
    ops whose W waits (`interception.py`): experts, routers, convolutions, norms that multiply by 1 + weight, subclasses
    with a forward of their own. `coverage` names what has its W in B all the same: weights that a forward computes
    (torch.nn.utils.parametrizations), and parameters of modules inside it that a forward uses without calling these.

    Args:
        filter: filter(name, module) says whether to convert that module; None converts all.
        impl: "auto", "cuda", "triton" or "torch", which the converted modules keep as `zbkern_impl`, as do zbkern's own
            among the model's; None leaves it as it is, "auto" at first. A named one that cannot run raises
            UnavailableError when a module is called.
        defer: defer(name, module) says of every module of the model, converted or not, whether W of what it and its
            children compute may wait; where not, their forward is in `no_defer`. None leaves that as it is.

    `unconverted` tells what stayed, `restore` undoes it. Raises ValueError for an impl that does not exist.
    """
    if impl is not None:
        checks.check_choice("convert", "impl", impl, checks.IMPLEMENTATIONS)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Layer):
            twin = _twin(module)
            if isinstance(twin, str) or not (filter is None or filter(name, module)):
                continue
            module.__class__ = twin
            module.zbkern_name = name
        elif filter is not None and not filter(name, module):
            continue
        if impl is not None:
            module.zbkern_impl = impl
    if defer is not None:
        for name, module in model.named_modules():
            _set_defer(module, defer(name, module))
    return model


def restore(model: Model, filter: Filter | None = None) -> Model:
    """Gives converted modules the behaviour back that they had; returns `model`, changed in place."""
    for name, module in model.named_modules():
        if filter is not None and not filter(name, module):
            continue
        if (original := _original(type(module))) is not None:
            module.__class__ = original
            for attribute in ("zbkern_name", "zbkern_impl"):
                module.__dict__.pop(attribute, None)
        _set_defer(module, True)
    return model


def unconverted(model: Module) -> dict[str, str]:
    """Every module with parameters of its own that is not zbkern's, by name, with the reason it was not converted."""
    reasons = {}
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)) and not _is_ours(type(module)):
            twin = _twin(module)
            reasons[name] = twin if isinstance(twin, str) else "not converted yet, or filtered out"
    return reasons


def _twin(module: Module) -> type[Module] | str:
    """The class of this module's twin, or why it has none."""
    cls = type(module)
    if _is_ours(cls):
        return "it is zbkern's"
    params = [parameter for parameter in module._parameters.values() if parameter is not None]
    if any(is_lazy(parameter) for parameter in params):
        return "its parameters have no shape yet; call it once, then convert it"
    if any(parameter.is_complex() for parameter in params):
        return "its parameters are complex; zbkern's layers are for real numbers"
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        unusual = [o for o in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, o) not in (None, False)]
        if unusual:
            return f"{cls.__name__} with {', '.join(unusual)} is torch's alone"
    if "forward" in vars(module):
        return "its forward was replaced, on this object alone"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit, which nothing can intercept"
    if (cls.__module__, cls.__qualname__) == ("transformers.pytorch_utils", "Conv1D"):
        return _subclass(nn.TransposedLinear, cls)
    if cls not in _TWINS and is_rms_norm(module):
        return _subclass(nn.ForeignRMSNorm, cls)
    if isinstance(module, torch.nn.utils.parametrize.ParametrizationList):
        return "it computes a parameter of another module, whose forward follows that"
    base = _inherits_forward(cls)
    planes = isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm) and len(module.normalized_shape) > 1
    if base is not None and not planes:
        return _TWINS[base] if cls is base else _subclass(_TWINS[base], cls)
    params += [p for child in module.children() if isinstance(child, LISTS) for p in child.parameters(recurse=False)]
    uses = cls.__module__.startswith("transformers.") and cls.__name__ in USERS
    return _subclass(Intercepted, cls) if params or uses else "it has no parameters"


def _set_defer(module: Module, defer: bool) -> None:
    """Whether W of what this module's forward computes may wait: hooks around the forward where it may not."""
    handles = module.__dict__.pop("zbkern_no_defer", ())
    for handle in handles:
        handle.remove()
    if not defer:
        enter = module.register_forward_pre_hook(_enter_no_defer)
        leave = module.register_forward_hook(_leave_no_defer, always_call=True)
        module.__dict__["zbkern_no_defer"] = (enter, leave)


def _enter_no_defer(module: Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():  # compiled, the W of all layers wait
        no_defer().__enter__()


def _leave_no_defer(module: Module, inputs: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        no_defer().__exit__(None, None, None)


def _is_ours(cls: type[Module]) -> bool:
    return cls.__module__.startswith("zbkern.")


def _inherits_forward(cls: type[Module]) -> type[Module] | None:
    """Which of the classes with a twin this one is, or adds no arithmetic to; None for none."""
    return next((base for base in _TWINS if issubclass(cls, base) and cls.forward is base.forward), None)


def _subclass(behaviour: type[Module], cls: type[Module]) -> type[Module]:
    """A subclass, so that the library still recognises its own; made here, so that nobody needs to install it."""
    if (behaviour, cls) not in _SUBCLASSES:
        method: Any = behaviour.forward
        above = CellType(behaviour)  # the class after which super() looks
        cells = zip(method.__code__.co_freevars, method.__closure__ or (), strict=True)
        closure = tuple(above if name == "__class__" else cell for name, cell in cells)
        forward: Any = FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, closure)
        forward.__signature__ = inspect.signature(cls.forward)  # by which frameworks name positional arguments
        body = {"__module__": "zbkern.nn", "__reduce_ex__": _reduce, "forward": forward}
        bases = (behaviour, cls) if Module in _first_bases(cls) else (cls, behaviour)
        joined = type(cls.__name__, bases, body)
        if bases[0] is cls:
            above.cell_contents = joined
        _SUBCLASSES[behaviour, cls] = joined
    return _SUBCLASSES[behaviour, cls]


def _first_bases(cls: type) -> Iterator[type]:
    """The chain of first bases, which decides how objects lie in memory. An object can only be given a class with the
    same chain; that of class Own(ABC, Module) does not contain Module."""
    while cls is not object:
        yield cls
        cls = cls.__base__ or object


def _reduce(module: Module, protocol: Any) -> str | tuple[Any, ...]:
    """For copies and pickles of a module whose class is nowhere to be imported from."""
    parts = _made_of(type(module))
    if parts is None:  # a class that somebody has derived from it
        return object.__reduce_ex__(module, protocol)
    state = getattr(module, "__getstate__", None)  # Python 3.10 has it of those alone that leave something out
    return _unpickled, parts, vars(module) if state is None else state()


def _unpickled(behaviour: type[Module], cls: type[Module]) -> Module:
    joined = _subclass(behaviour, cls)
    return joined.__new__(joined)


def _original(cls: type[Module]) -> type[Module] | None:
    for original, twin in _TWINS.items():
        if cls is twin:
            return original
    parts = _made_of(cls)
    return None if parts is None else parts[1]


def _made_of(cls: type[Module]) -> tuple[type[Module], type[Module]] | None:
    """The behaviour and the class that were joined to this one; None for classes that were not made here."""
    return next((parts for parts, joined in _SUBCLASSES.items() if joined is cls), None)
