"""The operators that compilers call without looking inside: W, deferred or run; the product of experts.

What a compiled graph cannot name, the parameters themselves, W's operators find as the edges of the autograd node that
runs the compiled backward.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.fx.node import has_side_effect

from zbkern import wgrad
from zbkern.kernels import dispatch
from zbkern.ops import autograd
from zbkern.ops.autograd import Params
from zbkern.ops.functions import embedding as embedding_functions
from zbkern.ops.functions import grouped as grouped_functions
from zbkern.ops.functions import linear as linear_functions
from zbkern.ops.functions import sharded
from zbkern.ops.functions._shapes import as_rows
from zbkern.wgrad import accumulation
from zbkern.wgrad.queue import AT_ONCE


@torch.library.custom_op("zbkern::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """x weight[e]^T + bias[e] of rows of group e, which ends at ends[e]; zeros in rows of no group. B: dx alone."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    dispatch.resolve("grouped_linear", "auto", x.device, x.dtype).grouped_linear_fwd(x, weight, bias, ends, y)
    return y


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _grouped_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, weight, _, ends = inputs
    ctx.save_for_backward(weight, ends)


def _grouped_dgrad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    weight, ends = ctx.saved_tensors
    return torch.ops.zbkern.grouped_linear(dy, weight.mT, None, ends), None, None, None


grouped_linear.register_autograd(_grouped_dgrad, setup_context=_grouped_context)


@torch.library.custom_op("zbkern::weight_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def weight_gradient(
    kind: str,
    segment: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Sequence[bool],
    copy: bool,
) -> None:
    """Defers or runs W: kind, see `TASKS`; segment: what W takes of one microbatch, dy last.

    weight, bias: what W is for, None where it takes no gradient; of DTensors, as of the segment, this rank's part.
    sums: of DTensors, for every dimension of the mesh, whether W is a term of a sum over its ranks. copy: the caller
    may write into the segment as soon as this returns.
    """
    params = (_parameter(weight), _parameter(bias))
    if params[0] is None and params[1] is None:
        return
    scope = wgrad.current()
    if copy and scope is not None and scope[1] is not AT_ONCE:
        segment = [tensor.clone() for tensor in segment]
    task = TASKS[kind.partition(" ")[0]](kind, segment, params, tuple(sums))
    if scope is None:
        wgrad.run_in_backward(task)
    else:
        scope[0].add(task, scope[1])


def _linear(kind: str, segment: Sequence[Tensor], params: Params, sums: tuple[bool, ...]) -> wgrad.WGradTask:
    rows = tuple(map(as_rows, segment))
    backend = dispatch.resolve("linear", "auto", rows[1].device.type)
    if any(parameter is not None and sharded.is_sharded(parameter) for parameter in params):
        return sharded.linear_task(backend.linear_wgrad, rows, params, sums, "compiled linear")
    kernel = (linear_functions.linear_wgrad if kind == "linear" else linear_functions.transposed_wgrad)(backend)
    return wgrad.WGradTask(kernel, rows, params, linear_functions.linear_flops, "compiled linear")


def _embedding(kind: str, segment: Sequence[Tensor], params: Params, sums: tuple[bool, ...]) -> wgrad.WGradTask:
    indices, dy = segment[0].reshape(-1), as_rows(segment[1])
    kernel = embedding_functions.embedding_wgrad(dispatch.resolve("embedding", "auto", dy.device.type), None)
    return wgrad.WGradTask(kernel, (indices, dy), params[:1], dy.numel(), "compiled embedding")


def _grouped(kind: str, segment: Sequence[Tensor], params: Params, sums: tuple[bool, ...]) -> wgrad.WGradTask:
    x, ends, dy = segment
    backend = dispatch.resolve("grouped_linear", "auto", x.device, x.dtype)
    kernel = grouped_functions.grouped_wgrad(backend, kind.endswith("transposed"), False)
    return wgrad.WGradTask(kernel, (x, dy, ends), params, linear_functions.linear_flops, "compiled experts")


TASKS = {
    "linear": _linear,
    "transposed": _linear,
    "embedding": _embedding,
    "grouped_linear": _grouped,
}
"""By the first word of a kind."""


@weight_gradient.register_fake
def _(*_: Any) -> None:
    _register_lowering()
    if fx_traceback.has_preserved_node_meta():  # else torch 2.10 takes a call in a traced _Tap for one of the forward
        fx_traceback.get_current_meta()["partitioner_tag"] = "is_backward"


def compiled_autograd() -> bool:
    """Whether torch's compiled autograd is on, which traces backwards: nothing tells there whose gradient is wanted."""
    return torch._dynamo.compiled_autograd.compiled_autograd_enabled


def _keep_every_call() -> bool:
    """Tells the compiler that calls do something: without, it would drop, or join, what has no result."""
    try:
        if hasattr(weight_gradient, "register_effect"):
            from torch._library.effects import EffectType

            weight_gradient.register_effect(EffectType.ORDERED)
        else:
            from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

            _register_effectful_op(torch.ops.zbkern.weight_gradient.default, _EffectType.ORDERED)
        has_side_effect(torch.ops.higher_order.with_effects)  # else compiled autograd drops what is called through it
    except ImportError:
        return False
    return True


AVAILABLE = _keep_every_call()
"""Whether this torch can be told so."""


@functools.cache
def _register_lowering() -> None:
    """Tells Inductor, once it is there, to leave x and dy alone after the call; copies are needed no more then."""
    if "torch._inductor" not in sys.modules:
        return
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    def lower(*arguments: Any) -> None:
        ir.FallbackKernel.create(operator, *arguments[:-1], False)  # copy
        call: Any = V.graph.operations[-1]
        V.graph.never_reuse_buffers.update(buffer.get_name() for buffer in call.inputs)

    operator = torch.ops.zbkern.weight_gradient.default
    register_lowering(operator, type_promotion_kind=None)(lower)


def _parameter(weight: Tensor | None) -> Tensor | None:
    """The parameter that a tensor of the compiled graph is, or None where this backward accumulates nothing into it."""
    if weight is None:
        return None
    node = torch._C._current_autograd_node()
    if node is None:
        if not weight.requires_grad:
            return None
        raise RuntimeError(
            f"the backward of a compiled zbkern layer (weight {list(weight.shape)}) was itself compiled, where nothing "
            "tells whose gradients are wanted; enable compiled autograd around the forward, too, or not at all"
        )
    accumulators = _accumulations(node).get(_memory_of(weight), [])
    if len(accumulators) > 1:  # parameters that share memory: `b.weight.data = a.weight.data`
        accumulators = [edge for edge in accumulators if edge.variable is weight]
    if not accumulators:
        raise RuntimeError(
            f"a compiled backward has no edge to the weight {list(weight.shape)} of a zbkern layer: its gradient would "
            "be lost; compile the model while no WGradQueue exists"
        )
    accumulator = accumulators[0]
    if not autograd.will_run(accumulator):
        return None
    if accumulation.has_hooks(accumulator.variable):  # the compiler cannot see them, and autograd runs them in B
        raise RuntimeError(
            f"a compiled zbkern layer's weight {list(weight.shape)} has hooks, whose gradient would not be there yet; "
            "do not compile this layer, remove the hooks, or compile while no WGradQueue exists"
        )
    _edges.accumulate = True
    return accumulator.variable


class _Edges(threading.local):
    """Where the compiled node that runs on this thread sends weight gradients, by the place of the weight in memory."""

    key: Any = None
    node: Any = None
    accumulate = False
    accumulations: Mapping[Any, list[Any]] = MappingProxyType({})

    def clear(self) -> None:
        """At the end of a backward, whose mode it still has."""
        accumulate = self.accumulate
        self.__dict__.clear()
        if accumulate and torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) through a compiled zbkern layer: the gradients of its weights have no "
                "graph; do not compile this layer, or compile it while no WGradQueue exists"
            )


_edges = _Edges()


def _accumulations(node: Any) -> Mapping[Any, list[Any]]:
    key = (torch._C._current_graph_task_id(), id(node))
    if _edges.key != key:
        edges: dict[Any, list[Any]] = {}
        for edge, _ in node.next_functions:
            if hasattr(edge, "variable"):
                edges.setdefault(_memory_of(edge.variable), []).append(edge)
        _edges.accumulations, _edges.key, _edges.node = edges, key, node  # a node that is kept shares its id with none
        torch.autograd.Variable._execution_engine.queue_callback(_edges.clear)  # parameters are not kept any longer
    return _edges.accumulations


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    if sharded.is_sharded(tensor):  # the compiled graph knows this rank's part
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
