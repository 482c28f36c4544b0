"""Makes final what torch functions read right after an optimizer step.

A step may be done before the norm over all ranks is known, and taken back. Until it is validated a mode is on in the
thread that called it: a torch function that takes one of its weights, also inside of state_dict(), torch.save() or an
average, waits for the norm first. Functions that read no values do not wait, nor do forwards of the Pipeline itself.
So does whoever looks up the state of a torch optimizer: its tensors are others once a step is taken back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import DeviceContext

from zbkern.pipeline.transport.tensors import local_part, tensors_in

_PROPERTIES = "device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta layout ndim requires_grad shape"
_METHODS = "dim element_size nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ size stride"
_ACCESS = ("__get__", "__set__", "__delete__")
_READ_NO_VALUES = {
    *(getattr(getattr(Tensor, name), access) for name in _PROPERTIES.split() for access in _ACCESS),
    *(getattr(Tensor, name) for name in _METHODS.split()),
}
_THREAD = threading.local()


class _Watch(NamedTuple):
    """What is watched of a step: the memory of its weights once known, and torch optimizers whose class is another."""

    memory: set[int]
    optimizers: list[Any]


class WeightReads(TorchFunctionMode):
    """The mode of one thread: the boundaries of steps that it watches."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.steps: WeakKeyDictionary[Any, _Watch] = WeakKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.steps and func not in _READ_NO_VALUES:
            taken = {_memory_of(tensor) for tensor in tensors_in((args, kwargs))}
            for boundary, (memory, _) in [*self.steps.items()]:
                if not memory:
                    memory.update(map(_memory_of, boundary.pending.weights))
                if taken & memory - {0}:
                    boundary.validate()
        return func(*args, **(kwargs or {}))


def watch(boundary: Any) -> bool:
    """Until `release` of this StepBoundary it validates its pending step before one of the weights is read, or a torch
    optimizer's state is looked up.

    False where that cannot be: another mode is on, whose end would be taken for this one's.
    """
    reads = _THREAD.__dict__.setdefault("reads", WeightReads())
    if not reads.is_on:
        if not isinstance(_get_current_function_mode(), (DeviceContext, type(None))):  # which stays below all others
            return False
        reads.__enter__()
        reads.is_on = True
    optimizers = [each for each in boundary.optimizer._holders if not hasattr(type(each), "state")]  # watched already
    for each in optimizers:
        kind: Any = type(each)
        each.__class__ = _watched(kind)
    reads.steps[boundary] = _Watch(set(), optimizers)
    return True


def release(boundary: Any) -> None:
    """Ends `watch`: weights are final, or their reader knows that they are not. No-op without it in this thread."""
    reads = _THREAD.__dict__.get("reads")
    if reads is not None:
        for optimizer in reads.steps.pop(boundary, _Watch(set(), [])).optimizers:
            optimizer.__class__ = type(optimizer).__base__
        if reads.is_on and not reads.steps and _get_current_function_mode() is reads:
            reads.__exit__(None, None, None)
            reads.is_on = False


def _state_of(optimizer: Any) -> Any:
    """The state of a torch optimizer once its step is validated."""
    reads = _THREAD.__dict__.get("reads")
    for boundary, watch in [] if reads is None else [*reads.steps.items()]:
        if any(optimizer is each for each in watch.optimizers):
            boundary.validate()
    return vars(optimizer)["state"]


_STATE = property(_state_of, lambda optimizer, state: vars(optimizer).update(state=state))


@functools.cache
def _watched(kind: Any) -> Any:
    """The same class with a `state` that is validated; what has state in its own way stays as it is."""
    return type(kind.__name__, (kind,), {"state": _STATE, "__module__": kind.__module__})


def _memory_of(tensor: Tensor) -> int:
    """0 where a tensor has none: on the meta device, in a trace, inside of torch.vmap."""
    try:
        return local_part(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
