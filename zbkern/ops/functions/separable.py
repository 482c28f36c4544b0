"""SeparableFunction: an op of one's own whose W waits as that of every layer here does."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbkern import wgrad
from zbkern.kernels.spec import Outputs, Segments
from zbkern.ops.autograd import OpCall, apply, weight_gradients
from zbkern.wgrad import accumulation


class SeparableFunction:
    """torch.autograd.Function with its backward in two: subclass it with three static methods, then call `apply`.

    forward(ctx, *inputs, *weights) -> y, a tensor or several. Keeps what B needs, as in torch: tensors by
        ctx.save_for_backward, everything else as attributes of ctx.
    dgrad(ctx, *dy) -> (gradients, kept): B. gradients: of the inputs, in order, None for those that take none
        (`ctx.needs[i]` tells); the tensor alone where there is one input. kept: what W is called with, tensors first,
        then hashable values. The tensors wait as they are: modify none of them in place.
    wgrad(*kept) -> W: the gradients of the weights, in order; the tensor alone where there is one weight.

    >>> class Scale(SeparableFunction):
    ...     @staticmethod
    ...     def forward(ctx, x, gain):
    ...         ctx.save_for_backward(x, gain)
    ...         return x * gain
    ...
    ...     @staticmethod
    ...     def dgrad(ctx, dy):
    ...         x, gain = ctx.saved_tensors
    ...         return dy * gain, (x, dy)
    ...
    ...     @staticmethod
    ...     def wgrad(x, dy):
    ...         return (x * dy).flatten(0, -2).sum(0)
    >>> y = Scale.apply(torch.ones(2, 3), weights=[torch.nn.Parameter(torch.ones(3))])

    A W that adds to its gradient by itself, or takes several microbatches at once, overrides `launch`. The backward of
    such an op has no derivative of its own (create_graph=True is an error).
    """

    @staticmethod
    def forward(ctx: Any, *inputs_and_weights: Any) -> Any:
        """F: y, a tensor or several, of the inputs and then the weights."""
        raise NotImplementedError("SeparableFunction: a subclass needs forward(ctx, *inputs, *weights)")

    @staticmethod
    def dgrad(ctx: Any, *dy: Any) -> tuple[Any, Sequence[Any]]:
        """B: the gradients of the inputs, and what W is called with."""
        raise NotImplementedError("SeparableFunction: a subclass needs dgrad(ctx, *dy)")

    @staticmethod
    def wgrad(*kept: Any) -> Any:
        """W: the gradients of the weights."""
        raise NotImplementedError("SeparableFunction: a subclass needs wgrad(*kept), or launch")

    @classmethod
    def apply(cls, *inputs: Any, weights: Sequence[Tensor | None], name: str = "") -> Any:
        """forward(ctx, *inputs, *weights). weights: the parameters whose gradients are W's, or None.

        inputs: anything; the first is a tensor. name: what errors and the queue call the layer.
        """
        if not inputs or not isinstance(inputs[0], Tensor):
            raise TypeError(f"{cls.__name__}.apply: the first input must be a torch.Tensor; got {inputs[:1]}")
        params = tuple(weights) if isinstance(weights, Iterable) and not isinstance(weights, Tensor) else None
        if params is None or not all(w is None or isinstance(w, Tensor) for w in params):
            raise TypeError(
                f"{cls.__name__}.apply: weights must be a list of tensors or None; got {params or weights!r}"
            )
        call = OpCall(params, cls, name or cls.__name__)
        return apply(_Separable, call, inputs[0], len(inputs), *inputs[1:])

    @classmethod
    def launch(cls, segments: Segments, outputs: Outputs, accumulate: bool, options: tuple[Hashable, ...] = ()) -> None:
        """Sums W over segments, the tensors kept of one microbatch each, and writes or adds to each output not None.

        options: what was kept after the tensors; W of one weight with different options run one by one.
        """
        for segment in segments:
            gradients = cls.wgrad(*segment, *options)
            gradients = (gradients,) if isinstance(gradients, Tensor) else gradients
            accumulation.add_gradients([gradients], outputs, accumulate)
            accumulate = True


class _Separable(torch.autograd.Function):
    """Any SeparableFunction: its class travels as the `backend` of the call."""

    @staticmethod
    def forward(ctx: Any, call: OpCall, x: Tensor, count: int, *rest: Any) -> Any:
        others = rest[: count - 1]  # what follows are edges
        ctx.call, ctx.count = call, count
        ctx.needs = (ctx.needs_input_grad[1], *ctx.needs_input_grad[3 : 2 + count])
        return call.backend.forward(ctx, x, *others, *call.params)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor | None) -> tuple[Any, ...]:
        call, op = ctx.call, ctx.call.backend
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{op.__name__}: its backward has no derivative (create_graph=True); use torch's own operations there"
            )
        gradients, kept = op.dgrad(ctx, *dy)
        gradients = (gradients,) if gradients is None or isinstance(gradients, Tensor) else tuple(gradients)
        if len(gradients) != ctx.count:
            raise ValueError(
                f"{op.__name__}.dgrad must return (gradients, kept) with a gradient or None for each of its "
                f"{ctx.count} inputs; got {len(gradients)}"
            )
        split = next((i for i, value in enumerate(kept) if not isinstance(value, Tensor)), len(kept))
        tensors = tuple([tensor.detach() for tensor in kept[:split]])
        kernel = _kernel(op, tuple(kept[split:]))
        weights = weight_gradients(call, kernel, tensors, ctx.needs_input_grad)
        return None, gradients[0], None, *gradients[1:], *weights


@functools.cache
def _kernel(op: type[SeparableFunction], options: tuple[Hashable, ...]) -> wgrad.WGradKernel:
    """The same object for the same options, so that tasks of one weight merge."""
    return wgrad.WGradKernel(functools.partial(op.launch, options=options) if options else op.launch)
