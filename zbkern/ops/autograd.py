"""What all autograd functions share: how weight gradients get from a backward to their parameters.

A function (functions/) is applied through `apply`, takes an `OpCall` first and the graph's edges to the weights last,
and gives its weight gradients to `weight_gradients`: the one place that decides whether they wait, are returned, or go
through hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbkern import wgrad
from zbkern.wgrad import accumulation, queue

Params = tuple["Tensor | None", ...]


class OpCall:
    """What a function needs besides tensors: whose gradients it computes, by which backend, for which layer.

    backend: a module of kernels (kernels/spec.py), or a SeparableFunction. detached: the graph has no edges to the
    weights, and W runs their hooks itself. may_defer: W may wait. ddp_managed: DistributedDataParallel waits for the
    gradients.
    """

    __slots__ = ("backend", "ddp_managed", "detached", "may_defer", "name", "params", "params_requiring_grad")

    def __init__(self, params: Params, backend: Any, name: str) -> None:
        self.params: tuple[Any, ...] = params  # which may be None, the function knows
        self.params_requiring_grad = params  # None for the others; where not detached, the edges tell
        self.backend = backend
        self.name = name
        self.detached = False
        self.ddp_managed = False
        self.may_defer = True


def apply(function: type[torch.autograd.Function], call: OpCall, x: Tensor, *arguments: Any) -> Any:
    """`function.apply(call, x, *arguments, *edges)`, where the edges tie the output to the weights in the graph.

    Autograd visits a parameter's accumulation in B even when the function returns no gradient for it. That is too
    early for hooks and for DistributedDataParallel's reducer, and a fifth of a small layer's backward. So in a forward
    within `WGradQueue.defer`, and where parameters have hooks, the only edge goes to one anchor that all layers share.
    The anchor keeps outputs in the graph where nothing else requires a gradient, and whether a backward visits it tells
    backward() from autograd.grad(y, x).
    """
    if not torch.is_grad_enabled():
        return function.forward(_NoGradContext(2 + len(arguments) + len(call.params)), call, x.detach(), *arguments)
    if queue.possible:
        _decide(call)
    if call.detached:
        return function.apply(call, x, *arguments, _anchor)
    return function.apply(call, x, *arguments, *call.params)


class _NoGradContext:
    """In the place of a function's context where there is no backward: a fifth of a small layer's forward."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (False,) * inputs

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


_anchor = torch.empty(0, requires_grad=True)
ANCHOR = torch.autograd.graph.get_gradient_edge(_anchor).node
"""The edge of functions without edges to their weights."""


def _decide(call: OpCall) -> None:
    """Whether W may wait. Detaches within `defer`, and where hooks or a framework wait for an accumulation."""
    call.may_defer = queue.may_defer()
    detach = wgrad.current() is not None
    params_requiring_grad = call.params
    for index, parameter in enumerate(params_requiring_grad):
        if parameter is None:
            continue
        if not parameter.requires_grad:
            params_requiring_grad = (*params_requiring_grad[:index], None, *params_requiring_grad[index + 1 :])
        elif not parameter.is_leaf:
            return
        elif accumulation.has_hooks_or_main_grad(parameter):
            detach = True
    module = sys.modules.get("torch.nn.parallel.distributed")
    ddp = None if module is None else module.DistributedDataParallel._active_ddp_module
    if ddp is not None:
        call.ddp_managed = True
        if ddp.find_unused_parameters or ddp.static_graph:  # both read the graph from the outputs to the parameters
            call.may_defer = False
            return
        detach = True
    if detach and any(p is not None for p in params_requiring_grad):
        call.detached = True
        call.params_requiring_grad = params_requiring_grad


def weight_gradients(
    call: OpCall,
    kernel: wgrad.WGradKernel,
    tensors: wgrad.Segment,
    needs: Sequence[bool],
    arithmetic: int | Callable[[wgrad.Segment], int] = 0,
    part: slice | None = None,
    reads: wgrad.Segment = (),
) -> Sequence[Tensor | None]:
    """The gradients of `call.params`, or None where a queue, or hooks, have taken them over.

    tensors: what the kernel reads, detached. needs: ctx.needs_input_grad, the edges' last. arithmetic: the flops of the
    kernel, or what counts them. part: which params the kernel is for; None for all. reads: see `WGradTask`.
    What comes back belongs at the edges' places; where the graph has no edges it is None, which autograd ignores.
    """
    params = call.params_requiring_grad if part is None else call.params_requiring_grad[part]
    scope = wgrad.current() if call.may_defer else None
    if call.detached:
        if torch._C._will_engine_execute_node(ANCHOR) and (part is None or any(p is not None for p in params)):
            for parameter in params:
                if parameter is not None and accumulation.has_main_grad_flags(parameter):
                    _look_for_other_use(parameter)
            task = wgrad.WGradTask(kernel, tensors, params, arithmetic, call.name, call.ddp_managed, reads)
            if scope is None:
                wgrad.run_in_backward(task)
            else:
                scope[0].add(task, scope[1])
        return (None,) * len(params)
    needed = needs[-len(call.params) :]
    if part is not None:
        needed = needed[part]
    params = tuple([p if need else None for p, need in zip(params, needed, strict=True)])
    needed_params = [p for p in params if p is not None]
    if not needed_params:
        return params
    # Hooks that came after the forward run in this backward, so their gradient must be there now; autograd.grad returns
    # what it was asked for and accumulates nothing.
    if scope is not None and all(_may_wait(p) for p in needed_params):
        scope[0].add(wgrad.WGradTask(kernel, tensors, params, arithmetic, call.name, False, reads), scope[1])
        return (None,) * len(params)
    if kernel.allocate is not None and all(p.dtype == tensors[0].dtype for p in needed_params):
        return kernel.allocate(tensors, params)
    gradients = [None if p is None else accumulation.empty_gradient(p, kernel) for p in params]
    kernel.run([tensors], gradients, False)
    return gradients


def _look_for_other_use(parameter: Tensor) -> None:
    """Notes whether autograd accumulates into this parameter, too: the graph has an edge to it from elsewhere."""
    if will_run(torch.autograd.graph.get_gradient_edge(parameter).node):
        accumulation.note_part_of_autograd(parameter)


def _may_wait(parameter: Tensor) -> bool:
    """True when this backward accumulates into the parameter and no hook expects the gradient there at once."""
    if not parameter.is_leaf or accumulation.has_hooks(parameter):
        return False
    return will_run(torch.autograd.graph.get_gradient_edge(parameter).node)


def will_run(node: Any) -> bool:
    """True when the backward that runs on this thread executes this node: accumulates into a leaf, say."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad asks for this very gradient
        return False


def differentiable_backward(
    call: OpCall,
    forward: Callable[..., Any],
    inputs: Sequence[Any],
    dy: Tensor | Sequence[Tensor],
) -> tuple[Any, ...]:
    """The result of a backward under create_graph=True: gradients with a graph of their own.

    Recomputes the op with torch's operations, forward(*params, *inputs); inputs: the arguments of `apply` after call.
    """
    detached = call.detached
    with torch.enable_grad():
        # Views: what comes before x in the graph may depend on the same weights, and that is not this op's share.
        params = [_second_order(call, p) if detached else _view(p) for p in call.params]
        arguments = [*params, *map(_view, inputs)]
        needed = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]
        computed = iter(torch.autograd.grad(forward(*arguments), needed, dy, create_graph=True, allow_unused=True))
    gradients = [next(computed) if isinstance(v, Tensor) and v.requires_grad else None for v in arguments]
    weights, others = gradients[: len(call.params)], gradients[len(call.params) :]
    if detached:
        if will_run(ANCHOR):  # autograd.grad(y, x) accumulates nothing
            arrived = [(p, g) for p, g in zip(call.params, weights, strict=True) if p is not None and g is not None]
            accumulation.accumulate_via_autograd(arrived, create_graph=True)
        weights = [None] * len(call.params)
    return (None, *others, *weights)


def _view(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, Tensor) else value


def _second_order(call: OpCall, parameter: Tensor | None) -> Tensor | None:
    """The parameter in a graph of a gradient, whose backward treats it as the op itself does: no edge, and W waits."""
    if parameter is None or not parameter.requires_grad:
        return parameter
    second = OpCall((parameter,), call.backend, call.name)
    second.detached, second.ddp_managed, second.may_defer = True, call.ddp_managed, call.may_defer
    return _WithoutEdge.apply(second, parameter.detach(), _anchor)


class _WithoutEdge(torch.autograd.Function):
    """A parameter's values; their gradient goes where the weight gradients of the op go."""

    @staticmethod
    def forward(ctx: Any, call: OpCall, values: Tensor, anchor: Tensor) -> Tensor:
        ctx.call = call
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        if not torch.is_grad_enabled():
            weight_gradients(ctx.call, accumulation.ADD_GRADIENTS, (gradient,), ())
        elif will_run(ANCHOR):
            accumulation.accumulate_via_autograd([(ctx.call.params[0], gradient)], create_graph=True)
        return None, None, None
