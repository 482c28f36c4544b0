"""The ops whose W may wait: a row for each, and a column for each `route` that a call can go (route.py).

`run` is the way of every public op from checked arguments to its column: the same prologue for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbkern.kernels import dispatch, reference
from zbkern.ops import autograd, compiled
from zbkern.ops.functions import collectives, grouped, sharded
from zbkern.ops.functions import embedding as embeddings
from zbkern.ops.functions import linear as linears
from zbkern.ops.functions import loss as losses
from zbkern.ops.functions import norm as norms
from zbkern.ops.route import ARRIVING, PLAIN, route
from zbkern.wgrad import queue

Params = tuple[Any, ...]  # tensors or None


def cast_product(op: str, x: Tensor, params: Params) -> Tensor:
    """x in autocast's dtype; without autocast its own, which that of all parameters must be."""
    dtype = x.dtype
    if torch._C._is_any_autocast_enabled():
        device = x.device.type
        enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # not on meta, say
        if enabled and dtype.is_floating_point and dtype != torch.float64:
            return x.to(torch.get_autocast_dtype(device))
    for weight in params:
        if weight is not None and weight.dtype != dtype:
            raise TypeError(
                f"{op}: x is {dtype} and a weight or bias {weight.dtype}; convert one, or use torch.autocast"
            )
    return x


def cast_norm(op: str, x: Tensor, params: Params) -> Tensor:
    """On CUDA, autocast runs norms in float32; on the CPU it leaves them alone."""
    return x.float() if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64 else x


@dataclass(frozen=True)
class Op:
    """name: what errors call it; kernels: its name in spec.OPS where that is another one. cast: what autocast makes of
    x; raises TypeError for parameters of another dtype. The others are columns, one for each `route`; where one is
    empty, torch's operations do:

    function: an autograd function, forward(ctx, call, x, *options, *edges). with_torch(*params, x, *options): the same
    in torch's own operations. compiled, compiled_dtensors: as with_torch, with a tap
    at which W is deferred. dtensors(call, x, *options).

    is_small(x, first parameter): whether with_torch is faster on a CPU, where no W waits; None for never.
    """

    name: str
    function: type[torch.autograd.Function]
    with_torch: Callable[..., Any]
    compiled: Callable[..., Any] | None = None
    compiled_dtensors: Callable[..., Any] | None = None
    dtensors: Callable[..., Any] | None = None
    cast: Callable[[str, Tensor, Params], Tensor] = cast_product
    kernels: str = ""
    is_small: Callable[[Tensor, Tensor], bool] | None = None


LINEAR = Op(
    *("linear", linears.LinearFunction, linears.linear_with_torch),
    *(compiled.linear, compiled.sharded_linear, sharded.linear),
    is_small=linears.is_small,
)
GATED_MLP = Op(
    *("gated_mlp", linears.GatedMLPFunction, linears.gated_mlp_with_torch),
    functools.partial(linears.gated_mlp_with_torch, linear=compiled.linear),
)
GROUPED_LINEAR = Op(
    *("grouped_linear", grouped.GroupedLinearFunction, grouped.grouped_linear_with_torch, compiled.grouped_linear),
)
GROUPED_MLP = Op(
    *("grouped_mlp", grouped.GroupedMLPFunction, grouped.grouped_mlp_with_torch),
    functools.partial(grouped.grouped_mlp_with_torch, linear=compiled.grouped_linear),
)
EMBEDDING = Op(
    *("embedding", embeddings.EmbeddingFunction, embeddings.embedding_with_torch, compiled.embedding),
    dtensors=functools.partial(autograd.apply, sharded.ShardedEmbedding),
    cast=lambda op, x, params: x,
)
RMS_NORM = Op("rms_norm", norms.NormFunction, norms.rms_norm_with_torch, cast=cast_norm)
LAYER_NORM = Op("layer_norm", norms.NormFunction, norms.layer_norm_with_torch, cast=cast_norm)
LINEAR_CROSS_ENTROPY = Op(
    *("linear_cross_entropy", losses.LinearCrossEntropyFunction, losses.linear_cross_entropy_with_torch),
    compiled_dtensors=compiled.sharded_head,
    dtensors=sharded.linear_cross_entropy,
)

LINEAR_LOG_PROBS = Op(
    *("linear_log_probs", losses.LinearLogProbsFunction, losses.linear_log_probs_with_torch),
    kernels="linear_cross_entropy",
)


def run(op: Op, x: Tensor, params: Params, *options: Any, impl: str, name: str, local: Tensor | None = None) -> Any:
    """The op by its route, through the backend that impl says where that is one of kernels; options: the op's.

    local: what this rank has of the first parameter, where x is plain and the parameters are DTensors.
    """
    first = params[0] if local is None else local
    way = route(x, first, params)
    if way is ARRIVING:
        x = collectives.Arrived.apply(x)
        way = route(x, first, params)
    if way is PLAIN:
        x = op.cast(op.name, x, params)
        deciding = x if x.is_floating_point() else params[0]  # an embedding's x is integers
        backend = dispatch.resolve(op.kernels or op.name, impl, deciding.device, deciding.dtype)
        if backend is reference and _is_for_autograd(op, x, params):
            return op.with_torch(*params, x, *options)
        return autograd.apply(op.function, autograd.OpCall(params, backend, name), x, *options)
    form = getattr(op, way)
    if form is None:
        way, form = "with_torch", op.with_torch
    if way == "dtensors":
        backend = dispatch.resolve(op.kernels or op.name, impl, params[0].device, params[0].dtype)
        return form(autograd.OpCall(params, backend, name), x, *options)
    if way != "with_torch":
        x = op.cast(op.name, x, params)
    return form(*params, x, *options)


def _is_for_autograd(op: Op, x: Tensor, params: Params) -> bool:
    """Whether torch's own autograd does what our function would, in less time."""
    if not queue.leaves_to_autograd() or op.is_small is None or not op.is_small(x, params[0]):
        return False
    return not any(hasattr(parameter, "main_grad") for parameter in params)  # which autograd would not find
