"""Layers inside torch.compile: the same deferral, from within a traced graph and without breaking it.

The compiler sees torch's own operations on detached weights, so it traces and fuses F and B as it likes; behind each
matmul stands a `_Tap`, an identity whose backward calls one opaque operator, `zbkern::weight_gradient`. At run time
that operator makes the `WGradTask`. What the graph cannot name, the parameters themselves, it finds as the edges of the
autograd node that runs the compiled backward.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor

from zbkern import autograd, wgrad
from zbkern.functions import embedding as embedding_functions
from zbkern.functions import grouped as grouped_functions
from zbkern.functions import linear as linear_functions
from zbkern.functions import loss as loss_functions
from zbkern.functions import products, sharded
from zbkern.functions._shapes import as_rows
from zbkern.functions.products import Kind, ParameterView
from zbkern.kernels import dispatch, reference
from zbkern.kernels.reference import grouped as grouped_reference
from zbkern.kernels.spec import CrossEntropyOptions, GateOptions
from zbkern.wgrad import accumulation, queue

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def may_defer() -> bool:
    """Inside torch.compile: True while some queue exists, in a forward that is not exported."""
    if not (queue.possible and _AVAILABLE and torch.is_grad_enabled()):
        return False
    if torch.compiler._is_exporting_flag:  # is_exporting() is True in whatever older compilers trace
        return False
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module is None


def can_defer(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether it may, for weights whose gradients are not needed in B."""
    if not may_defer():
        return False
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in (x, *weights) if tensor is not None):
        return False
    trainable = [w for w in weights if w is not None and w.requires_grad]
    return len(trainable) > 0 and all(w.is_leaf for w in trainable)


def can_defer_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """The same where W reads the weights, so that each must be one of those that the compiled backward knows."""
    return can_defer(x, weight, bias) and weight.requires_grad and (bias is None or bias.requires_grad)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, transposed: bool) -> Tensor:
    """functional.linear: the matmul, its tap, then the activation."""
    detached = weight.detach().to(x.dtype)
    y = F.linear(x, detached.t() if transposed else detached, None if bias is None else bias.detach().to(x.dtype))
    y = _Tap.apply(y, "transposed" if transposed else "linear", x.detach(), weight, bias)
    return y if activation is None else reference.activation_function(activation)(y)


def can_defer_sharded(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """The same for DTensors, as far as one can see before their placements are known."""
    if not (may_defer() and sharded.is_sharded(x, weight, bias)):
        return False
    trainable = [w for w in (weight, bias) if w is not None and w.requires_grad]
    return len(trainable) > 0 and all(w.is_leaf for w in trainable)


@torch.compiler.allow_in_graph
def sharded_linear(x: Any, weight: Any, bias: Any) -> Any:
    """functional.linear of DTensors: torch's F and B, and a tap for W of this rank's part, where that is a product of
    local parts. One node until the compiler traces autograd, because the placements are known only there."""
    placements = sharded.placements_for_w(x, weight, bias)
    if placements is None:
        return linear_functions.linear_with_torch(weight, bias, x, None, False)
    y = F.linear(x, weight.detach().to(x.dtype), None if bias is None else bias.detach().to(x.dtype))
    own = weight.to_local(), None if bias is None else bias.to_local()
    sums = [mine.is_shard() and whole.is_replicate() for mine, whole in zip(placements, weight.placements, strict=True)]
    return _ShardedTap.apply(y, x.detach().to_local(), *own, placements, sums)


def gated_mlp(x: Tensor, params: Sequence[Any], activation: str) -> Tensor:
    """functional.gated_mlp; params: gate, up and down, then their biases."""
    gate, up, down, *biases = params
    h = linear(x, gate, biases[0], activation, False) * linear(x, up, biases[1], None, False)
    return linear(h, down, biases[2], None, False)


def embedding(indices: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """functional.embedding; rows of padding_idx get no gradient, so their dy becomes zero before W takes it."""
    y = F.embedding(indices, weight.detach(), padding_idx)
    y = _Tap.apply(y, "embedding", indices, weight, None)
    if padding_idx is None:
        return y
    padding = (indices == padding_idx).unsqueeze(-1)
    return torch.where(padding, y.detach(), y)


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, transposed: bool, every_row: bool = True
) -> Tensor:
    """functional.grouped_linear; ends: the row at which every group ends. every_row: each belongs to a group."""
    matrices, kind = weight.detach().to(x.dtype), "grouped_linear transposed" if transposed else "grouped_linear"
    y = _grouped(x, matrices if transposed else matrices.mT, ends, every_row)
    if bias is not None:
        y = y + _of_rows(bias.detach().to(x.dtype), ends, x, every_row)
    return _ProductTap.apply(y, kind, x.detach(), weight, bias, None, ends, [], [])


def grouped_mlp(
    x: Tensor, params: Sequence[Any], ends: Tensor, options: GateOptions, transposed: bool, every_row: bool
) -> Tensor:
    """functional.grouped_mlp; params: gate_up and down, then their biases."""
    gate_up, down, gate_up_bias, down_bias = params
    z = grouped_linear(x, gate_up, gate_up_bias, ends, transposed, every_row)
    return grouped_linear(grouped_reference.gated(z, options), down, down_bias, ends, transposed, every_row)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: CrossEntropyOptions
) -> Tensor:
    """functional.linear_cross_entropy of rows [M, K], for parameters that all take a gradient: the loss of each."""
    values = weight.detach().to(x.dtype), None if bias is None else bias.detach().to(x.dtype)
    numbers = options.ignore_index, options.label_smoothing, options.z_loss, options.chunk
    loss, lse, _ = torch.ops.zbkern.head_loss(x, *values, target, *numbers)
    return _HeadTap.apply(loss, x.detach(), target, lse.detach(), weight, bias, numbers)


def product(kind: Kind, x: Tensor, view: ParameterView, options: tuple[Any, ...]) -> Tensor:
    """kind.forward(x, view.value, *options); options: numbers, or for products.GROUPED the row at which groups end."""
    weight, parameter = view.value, view.parameter
    ends = options[0] if kind is products.GROUPED else None
    values = weight.to(x.dtype) if torch.is_autocast_enabled(x.device.type) else weight
    y = kind.forward(x, values, *options) if ends is None else _grouped(x, values, ends)
    index = next((args[0] for step, args, _ in view.steps if step is Tensor.__getitem__), None)
    part = [*weight.shape, *weight.stride(), weight.storage_offset()] if view.steps and index is None else []
    numbers = [] if ends is not None else products.numbers_of(options)
    return _ProductTap.apply(y, kind.name, x.detach(), parameter, None, index, ends, part, numbers)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, every_row: bool = True) -> Tensor:
    """Rows of group e times weight[e], [K, N]: by torch where a compiler knows how, else by an operator of ours."""
    if x.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm") or weight.shape[1] % 8 or weight.shape[2] % 8:
        return torch.ops.zbkern.grouped_product(x, weight, ends)
    if every_row:
        return F.grouped_mm(x, weight, offs=ends)
    in_group = grouped_reference.group_of_rows(ends, x) < weight.shape[0]  # torch leaves the others as they are
    return torch.where(in_group, F.grouped_mm(torch.where(in_group, x, 0), weight, offs=ends), 0)


def _of_rows(bias: Tensor, ends: Tensor, x: Tensor, every_row: bool) -> Tensor:
    """[M, N]: of every row of x the bias of its group, 0 where it has none."""
    groups = grouped_reference.group_of_rows(ends, x)
    if every_row:
        return bias[groups[:, 0]]
    last = bias.shape[0] - 1
    return torch.where(groups > last, 0, bias[groups[:, 0].clamp(max=last)])


@torch.library.custom_op("zbkern::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of group e of x [M, K], which end at ends[e], times weight[e] [K, N]; zeros in rows of no group."""
    y = x.new_empty(x.shape[0], weight.shape[2])
    dispatch.resolve("grouped_linear", "auto", x.device, x.dtype).grouped_linear_fwd(x, weight.mT, None, ends, y)
    return y


@grouped_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _grouped_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _grouped_dgrad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    weight, ends = ctx.saved_tensors
    return torch.ops.zbkern.grouped_product(dy, weight.mT, ends), None, None


grouped_product.register_autograd(_grouped_dgrad, setup_context=_grouped_context)


@torch.library.custom_op("zbkern::head_loss", mutates_args=())
def head_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """cross_entropy_fwd of kernels/spec.py: loss [M], log-sum-exp [M], and dx [M, K] of every row's own loss."""
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss, chunk)
    loss, lse, dx = _head_results(x)
    backend = dispatch.resolve("linear_cross_entropy", "auto", x.device, x.dtype)
    backend.cross_entropy_fwd(x, weight, bias, target, options, loss, lse, dx)
    return loss, lse, dx


def _head_results(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[0], dtype=wide), x.new_empty(x.shape[0], dtype=wide), x.new_empty(x.shape)


def _head_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2])


def _head_dgrad(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (dx,) = ctx.saved_tensors
    return dx * dloss.to(dx.dtype).unsqueeze(1), *[None] * 7


head_loss.register_fake(_head_results)
head_loss.register_autograd(_head_dgrad, setup_context=_head_context)


class _Tap(torch.autograd.Function):
    """y, whose gradient is also W's: x is the other operand, weight and bias (or None) what W is for."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.kind = kind
        return torch.ops.aten._unsafe_view(y, y.shape)  # autograd lets nobody modify a view from here in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = weight if needs[3] else None, bias if needs[4] else None
        torch.ops.zbkern.weight_gradient(ctx.kind, x, dy, *wanted, [], True)
        return dy, *[None] * 4


class _ShardedTap(torch.autograd.Function):
    """The same for a DTensor y and this rank's part of the others. dy, cut as `placements` say, goes to W and to B, so
    that W needs no communication of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        y: DTensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        placements: tuple[Placement, ...],
        sums: list[bool],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.placements, ctx.sums = placements, sums
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    def backward(ctx: Any, dy: DTensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dy = dy.redistribute(placements=ctx.placements)
        wanted = weight if needs[2] else None, bias if needs[3] else None
        torch.ops.zbkern.weight_gradient("linear", x, dy.to_local(), *wanted, ctx.sums, True)
        return dy, *[None] * 5


class _ProductTap(torch.autograd.Function):
    """The same for products of other kinds, with a part of a parameter: arguments as of `product_gradient`."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        kind: str,
        x: Tensor,
        parameter: Tensor,
        bias: Tensor | None,
        index: Tensor | None,
        ends: Tensor | None,
        part: list[int],
        numbers: list[int],
    ) -> Tensor:
        ctx.save_for_backward(x, parameter, bias, index, ends)
        ctx.kind, ctx.part, ctx.numbers = kind, part, numbers
        return torch.ops.aten._unsafe_view(y, y.shape)  # autograd lets nobody modify a view from here in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, parameter, bias, index, ends = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = parameter if needs[3] else None, bias if needs[4] else None
        torch.ops.zbkern.product_gradient(ctx.kind, x, dy, *wanted, index, ends, ctx.part, ctx.numbers, True)
        return dy, *[None] * 8


class _HeadTap(torch.autograd.Function):
    """The same for the loss of a head; numbers: of `CrossEntropyOptions`."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        x: Tensor,
        target: Tensor,
        lse: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        numbers: tuple[Any, ...],
    ) -> Tensor:
        ctx.save_for_backward(x, target, lse, weight, bias)
        ctx.numbers = numbers
        return torch.ops.aten._unsafe_view(loss, loss.shape)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        x, target, lse, weight, bias = ctx.saved_tensors
        torch.ops.zbkern.head_gradient(x, target, lse, dloss, weight, bias, *ctx.numbers, True)
        return dloss, *[None] * 6


@torch.library.custom_op("zbkern::weight_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def weight_gradient(
    kind: str, x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None, sums: Sequence[bool], copy: bool
) -> None:
    """Defers or runs W: kind "linear", "transposed" or "embedding"; x [..., K] or indices [...]; dy [..., N].

    weight, bias: what W is for, None where it takes no gradient; of DTensors, as x and dy, this rank's part. sums: of
    DTensors, for every dimension of the mesh, whether W computes a term of a sum over its ranks. copy: the caller may
    write into x and dy as soon as this returns, so that what waits must be a copy.
    """
    params = (_parameter(weight), _parameter(bias))
    if params[0] is None and params[1] is None:
        return
    scope = wgrad.current()
    if copy and scope is not None:
        x, dy = x.clone(), dy.clone()
    dy = as_rows(dy)
    if kind == "embedding":
        kernel = embedding_functions.embedding_wgrad(dispatch.resolve("embedding", "auto", dy.device.type), None)
        task = wgrad.WGradTask(kernel, (x.reshape(-1), dy), params[:1], dy.numel(), "compiled embedding")
    elif any(parameter is not None and sharded.is_sharded(parameter) for parameter in params):
        backend = dispatch.resolve("linear", "auto", dy.device.type)
        task = sharded.linear_task(backend.linear_wgrad, (as_rows(x), dy), params, tuple(sums), "compiled linear")
    else:
        backend = dispatch.resolve("linear", "auto", dy.device.type)
        kernel = (linear_functions.linear_wgrad if kind == "linear" else linear_functions.transposed_wgrad)(backend)
        segment = (as_rows(x), dy)
        task = wgrad.WGradTask(kernel, segment, params, linear_functions.linear_flops, "compiled linear")
    _defer(task)


@torch.library.custom_op("zbkern::product_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def product_gradient(
    kind: str,
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    ends: Tensor | None,
    part: Sequence[int],
    numbers: Sequence[int],
    copy: bool,
) -> None:
    """Defers or runs W of a product with a part of a parameter: kind, the name of a `products.Kind`, or
    "grouped_linear", "grouped_linear transposed", which alone have a bias, and may do without a weight's gradient.

    index: the product is with weight[index]. part: size, stride and offset of the operand in the parameter's memory, or
    in that of weight[index]; empty for all of it. ends: where groups of rows end. numbers: of a convolution.
    """
    params = (_parameter(weight), _parameter(bias))
    if params == (None, None):
        return
    if copy and wgrad.current() is not None:
        x, dy = x.clone(), dy.clone()
        index, ends = (None if tensor is None else tensor.clone() for tensor in (index, ends))
    if kind.startswith("grouped_linear"):
        assert ends is not None
        backend = dispatch.resolve("grouped_linear", "auto", x.device, x.dtype)
        kernel = grouped_functions.grouped_wgrad(backend, kind.endswith("transposed"), False)
        task = wgrad.WGradTask(kernel, (x, dy, ends), params, linear_functions.linear_flops, "compiled experts")
    else:
        assert weight is not None
        steps = products.strided_steps(index, part)
        shape = [*part[: len(part) // 2]] or ([*index.shape, *weight.shape[1:]] if index is not None else weight.shape)
        like = torch.empty(shape, dtype=x.dtype, device="meta")
        options = (ends,) if ends is not None else products.convolution_options(numbers)
        backend = dispatch.resolve("linear", "auto", x.device, x.dtype)
        kernel = products.product_wgrad(products.kind(kind), repr(steps), steps, like, options, backend)
        task = wgrad.WGradTask(kernel, (x, dy), params[:1], 2 * dy.numel() * x.shape[-1], "compiled product")
    _defer(task)


@torch.library.custom_op("zbkern::head_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def head_gradient(
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk: int,
    copy: bool,
) -> None:
    """Defers or runs W of a head: the loss of every row of x [M, K], of which dloss [M] is the gradient."""
    params = (_parameter(weight), _parameter(bias))
    if params == (None, None):
        return
    segment = (x, target, lse, dloss)
    if copy and wgrad.current() is not None:
        segment = (x.clone(), target.clone(), lse.clone(), dloss.clone())
    values = weight.detach().to(x.dtype), None if bias is None else bias.detach().to(x.dtype)
    backend = dispatch.resolve("linear_cross_entropy", "auto", x.device, x.dtype)
    call = autograd.OpCall((weight if params[0] is None else params[0], params[1]), backend, "compiled head")
    options = CrossEntropyOptions(ignore_index, label_smoothing, z_loss, chunk)
    kernel = wgrad.WGradKernel(loss_functions.HeadW(call, *values, options))
    _defer(wgrad.WGradTask(kernel, segment, params, 4 * x.shape[0] * weight.numel(), call.name))


def _defer(task: wgrad.WGradTask) -> None:
    scope = wgrad.current()
    if scope is None:
        wgrad.run_in_backward(task)
    else:
        scope[0].add(task, scope[1])


@head_gradient.register_fake
@product_gradient.register_fake
@weight_gradient.register_fake
def _(*_: Any) -> None:
    _register_lowering()
    if fx_traceback.has_preserved_node_meta():  # else torch 2.10 takes a call in a traced _Tap for one of the forward
        fx_traceback.get_current_meta()["partitioner_tag"] = "is_backward"


def _operators() -> tuple[Any, ...]:
    operators = torch.ops.zbkern
    return operators.weight_gradient.default, operators.product_gradient.default, operators.head_gradient.default


def _keep_every_call() -> bool:
    """Tells the compiler that calls do something: without, it would drop, or join, what has no result."""
    try:
        if hasattr(weight_gradient, "register_effect"):
            from torch._library.effects import EffectType

            for operator in (weight_gradient, product_gradient, head_gradient):
                operator.register_effect(EffectType.ORDERED)
        else:
            from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

            for operator in _operators():
                _register_effectful_op(operator, _EffectType.ORDERED)
    except ImportError:
        return False
    return True


_AVAILABLE = _keep_every_call()


@functools.cache
def _register_lowering() -> None:
    """Tells Inductor, once it is there, to leave x and dy alone after the call; copies are needed no more then."""
    if "torch._inductor" not in sys.modules:
        return
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    def lower(operator: Any, *arguments: Any) -> None:
        ir.FallbackKernel.create(operator, *arguments[:-1], False)  # copy
        call: Any = V.graph.operations[-1]
        V.graph.never_reuse_buffers.update(buffer.get_name() for buffer in call.inputs)

    for operator in _operators():
        register_lowering(operator, type_promotion_kind=None)(functools.partial(lower, operator))


def _parameter(weight: Tensor | None) -> Tensor | None:
    """The parameter that a tensor of the compiled graph is, or None where this backward accumulates nothing into it."""
    if weight is None:
        return None
    node = torch._C._current_autograd_node()
    if node is None:  # called by hand
        return weight if weight.is_leaf and weight.requires_grad else None
    accumulator = _accumulations(node).get(_place(weight))
    if accumulator is None:
        raise RuntimeError(
            f"a compiled backward has no edge to the weight {list(weight.shape)} of a zbkern layer: its gradient would "
            "be lost; compile the model while no WGradQueue exists"
        )
    if not autograd.will_run(accumulator):
        return None
    if accumulation.has_hooks(accumulator.variable):  # the compiler cannot see them, and autograd runs them in B
        raise RuntimeError(
            f"a compiled zbkern layer's weight {list(weight.shape)} has hooks, whose gradient would not be there yet; "
            "do not compile this layer, remove the hooks, or compile while no WGradQueue exists"
        )
    return accumulator.variable


class _Edges(threading.local):
    """Where the compiled node that runs on this thread sends weight gradients, by the place of the weight in memory."""

    node: Any = None
    accumulations: Mapping[Any, Any] = MappingProxyType({})

    def clear(self) -> None:
        self.__dict__.clear()


_edges = _Edges()


def _accumulations(node: Any) -> Mapping[Any, Any]:
    key = (torch._C._current_graph_task_id(), node._sequence_nr())
    if _edges.node != key:
        following = [edge for edge, _ in node.next_functions if hasattr(edge, "variable")]
        _edges.accumulations = {_place(edge.variable): edge for edge in following}
        _edges.node = key
        torch.autograd.Variable._execution_engine.queue_callback(_edges.clear)  # parameters are not kept any longer
    return _edges.accumulations


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if sharded.is_sharded(tensor):  # the compiled graph knows this rank's part
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
