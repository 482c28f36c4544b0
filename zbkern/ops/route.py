"""Which way a call of an op goes: the column of its row in the table (table.py). Asked once, for every public op."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from zbkern import wgrad
from zbkern.ops import compiled_operators
from zbkern.ops.functions.collectives import is_wrapped
from zbkern.ops.functions.sharded import is_sharded
from zbkern.wgrad import queue

Route = Literal["function", "arriving", "dtensors", "compiled", "compiled_dtensors", "with_torch"]
PLAIN: Route = "function"
ARRIVING: Route = "arriving"

_PLAIN = (Tensor, torch.nn.Parameter, type(None))
_innermost_transform = torch._C._functorch.peek_interpreter_stack  # looked up once


def route(x: Tensor, weight: Tensor | None, params: tuple[Tensor | None, ...] = ()) -> Route:
    """For x and params, of which `weight` is the first, or what this rank has of it.

    function: plain tensors, which kernels can read. arriving: a tensor that a collective has returned without waiting;
    once it is there, another route. dtensors: all are DTensors, in a forward whose W may wait. compiled, and
    compiled_dtensors: inside torch.compile, where W may wait. with_torch: everything else (tensor subclasses, sparse
    tensors, function transforms, torch.export) needs operations that torch can see through; W is in B.
    """
    if not torch.compiler.is_compiling():
        if type(x) in _PLAIN and type(weight) in _PLAIN and x.layout is torch.strided and not within_transform():
            return PLAIN
        if is_wrapped(x):
            return ARRIVING
        return "dtensors" if wgrad.current() is not None and is_sharded(x, *params) else "with_torch"
    if not _may_defer_compiled(params):
        return "with_torch"
    if all(type(tensor) in _PLAIN for tensor in (x, *params)):
        return "compiled"
    return "compiled_dtensors" if is_sharded(x, *params) else "with_torch"


@torch.compiler.assume_constant_result
def within_transform() -> bool:
    """Whether torch.vmap, torch.func.grad or their like, or torch.autograd.forward_ad, are around this; they see
    through torch's operations only."""
    return _innermost_transform() is not None or forward_ad._current_level >= 0


def _may_defer_compiled(params: tuple[Tensor | None, ...]) -> bool:
    """Inside torch.compile: True while some queue exists, in a forward that is not exported, for parameters into which
    W can accumulate: some take a gradient, and all that do are leaves."""
    if not (queue.possible and compiled_operators.AVAILABLE and torch.is_grad_enabled()):
        return False
    if torch.compiler._is_exporting_flag:  # is_exporting() is True in whatever older compilers trace
        return False
    if compiled_operators.compiled_autograd() or within_transform():
        return False
    if torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None:
        return False
    trainable = [p for p in params if p is not None and p.requires_grad]
    return len(trainable) > 0 and all(p.is_leaf for p in trainable)
