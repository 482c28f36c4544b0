"""Makes final what torch functions read right after an optimizer step.

A step may be done before the norm over all ranks is known, and taken back. Until it is validated a mode is on in the
thread that called it: a torch function that takes one of its weights, also inside of state_dict(), torch.save() or an
average, waits for the norm first. Functions that read no values do not wait, nor do forwards of the Pipeline itself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
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


class WeightReads(TorchFunctionMode):
    """The mode of one thread: the boundaries of steps that it watches, and the memory of their weights once known."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.steps: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.steps and func not in _READ_NO_VALUES:
            taken = {_memory_of(tensor) for tensor in tensors_in((args, kwargs))}
            for boundary, memory in [*self.steps.items()]:
                if not memory:
                    memory.update(map(_memory_of, boundary.pending.weights))
                if taken & memory - {0}:
                    boundary.validate()
        return func(*args, **(kwargs or {}))


def watch(boundary: Any) -> bool:
    """Until `release` of this StepBoundary it validates its pending step before one of the weights is read.

    False where that cannot be: another mode is on, whose end would be taken for this one's.
    """
    reads = _THREAD.__dict__.setdefault("reads", WeightReads())
    if not reads.is_on:
        if not isinstance(_get_current_function_mode(), (DeviceContext, type(None))):  # which stays below all others
            return False
        reads.__enter__()
        reads.is_on = True
    reads.steps[boundary] = set()
    return True


def release(boundary: Any) -> None:
    """Ends `watch`: weights are final, or their reader knows that they are not. No-op without it in this thread."""
    reads = _THREAD.__dict__.get("reads")
    if reads is not None:
        reads.steps.pop(boundary, None)
        if reads.is_on and not reads.steps and _get_current_function_mode() is reads:
            reads.__exit__(None, None, None)
            reads.is_on = False


def _memory_of(tensor: Tensor) -> int:
    """0 where a tensor has none: on the meta device, in a trace, inside of torch.vmap."""
    try:
        return local_part(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
