"""The head and its cross-entropy, or what losses of policies need, as one function, so that logits are never whole.

It goes chunk by chunk. F computes each chunk's logits once and leaves the loss, log-sum-exp and the gradient of the
input; B only scales that gradient; W computes the logits again: four matmuls. Where W cannot wait and all rows' losses
get one gradient, F leaves the gradients of the weights, too, and B scales them: three matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbkern.kernels.reference.loss import LEAST_LOG
from zbkern.kernels.spec import CrossEntropyOptions as Options
from zbkern.ops.autograd import OpCall, differentiable_backward, weight_gradients
from zbkern.ops.functions.linear import linear_with_torch
from zbkern.wgrad import WGradKernel, accumulation, queue


class LinearCrossEntropyFunction(torch.autograd.Function):
    """loss[i] = cross_entropy(x[i] weight^T + bias, target[i]), one value per row; B: dx. W: dweight, dbias.

    sums: the losses of all rows are summed, so that each gets the same gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, x: Tensor, target: Tensor, options: Options, sums: bool, *edges: Tensor | None
    ) -> Tensor:
        weight, bias = (p if p is None or p.dtype == x.dtype else p.to(x.dtype) for p in call.params)
        wide = torch.promote_types(x.dtype, torch.float32)
        loss, lse = (x.new_empty(x.shape[0], dtype=wide) for _ in range(2))
        dx = x.new_empty(x.shape) if x.requires_grad else None
        needs = ctx.needs_input_grad[-len(call.params) :]
        ctx.unscaled = None  # gradients of the parameters, for the sum of all losses
        # In half precision every chunk would round the sum, and in fp16, before the mean, it might leave its range
        if sums and len(x) and needs[0] and not _may_wait(call) and call.params[0].dtype.itemsize >= 4:
            pairs = zip(call.params, needs, strict=True)
            ctx.unscaled = [accumulation.empty_gradient(p) if need else None for p, need in pairs]
        call.backend.cross_entropy_fwd(x, weight, bias, target, options, loss, lse, dx, ctx.unscaled)
        ctx.save_for_backward(x, weight, bias, target, lse, dx)
        ctx.call, ctx.options = call, options
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        call, options, needs = ctx.call, ctx.options, ctx.needs_input_grad
        x, weight, bias, target, lse, dx = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_backward(call, linear_cross_entropy_with_torch, (x, target, options, False), dloss)
        if dx is not None:
            # As in W: an ignored row has no gradient, also where that of its loss is infinite
            dx = _scaled(dx, torch.where(target != options.ignore_index, dloss, 0).unsqueeze(1))
        if ctx.unscaled is not None:
            return None, dx, None, None, None, *(None if g is None else _scaled(g, dloss[:1]) for g in ctx.unscaled)
        segment = (x.detach(), target, lse, dloss.contiguous())
        gradients = _gradients_of_head(call, call.backend.cross_entropy_wgrad, weight, bias, options, segment, needs)
        return None, dx, None, None, None, *gradients


class LinearLogProbsFunction(torch.autograd.Function):
    """The logarithm of the probability of target[i], and the entropy, of logits x[i] weight^T + bias: two numbers per
    row; B: dx. W: dweight, dbias. Both compute the logits again: five matmuls.
    """

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, x: Tensor, target: Tensor, options: Options, *edges: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weight, bias = (p if p is None or p.dtype == x.dtype else p.to(x.dtype) for p in call.params)
        wide = torch.promote_types(x.dtype, torch.float32)
        log_probs, entropy, lse = (x.new_empty(x.shape[0], dtype=wide) for _ in range(3))
        call.backend.log_probs_fwd(x, weight, bias, target, options, log_probs, entropy, lse)
        ctx.save_for_backward(x, weight, bias, target, lse, entropy)
        ctx.call, ctx.options = call, options
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, dlog_probs: Tensor, dentropy: Tensor) -> tuple[Any, ...]:
        call, options = ctx.call, ctx.options
        x, weight, bias, target, lse, entropy = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            inputs, gradients = (x, target, options), (dlog_probs, dentropy)
            return differentiable_backward(call, linear_log_probs_with_torch, inputs, gradients)
        segment = (x.detach(), target, lse, entropy.detach(), dlog_probs.contiguous(), dentropy.contiguous())
        dx = None
        if ctx.needs_input_grad[1]:
            dx = torch.empty_like(segment[0])
            call.backend.log_probs_dgrad(segment, weight, bias, options, dx)
        wgrad, needs = call.backend.log_probs_wgrad, ctx.needs_input_grad
        return None, dx, None, None, *_gradients_of_head(call, wgrad, weight, bias, options, segment, needs)


def _gradients_of_head(
    call: OpCall,
    wgrad: Callable[..., None],
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    segment: tuple[Tensor, ...],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients of weight and bias, as `weight_gradients`, by a kernel that computes the logits again."""
    kernel = WGradKernel(HeadW(call, wgrad, weight.detach(), None if bias is None else bias.detach(), options))
    flops = 4 * segment[0].shape[0] * weight.numel()
    reads = tuple([parameter for parameter in call.params if parameter is not None])
    return weight_gradients(call, kernel, segment, needs, flops, None, reads)


def _may_wait(call: OpCall) -> bool:
    """Whether a queue may take the W of this call, or hooks need it by itself."""
    return queue.possible and (call.detached or call.may_defer)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient * factor; in place where neither another backward nor another factor (is_grads_batched) needs it."""
    factor = factor.to(gradient.dtype)
    batched = torch._C._dispatch_keys(factor).has(_BATCHED)
    if batched or torch._C._autograd._get_current_graph_task_keep_graph():
        return gradient * factor
    return gradient.mul_(factor)


_BATCHED = torch._C._dispatch_key_parse("Batched")


class HeadW:
    """A wgrad kernel with what all microbatches share: equal for the same weights, so that their W merge.

    The weights are read in W, so they must still be those of F; they are no part of the segment because they live on
    anyway.
    """

    def __init__(
        self, call: OpCall, wgrad: Callable[..., None], weight: Tensor, bias: Tensor | None, options: Options
    ) -> None:
        self.wgrad, self.weight, self.bias, self.options = wgrad, weight, bias, options
        versions = tuple([None if p is None else (id(p), p._version) for p in call.params])
        self.identity = versions, weight.dtype, call.backend.__name__, wgrad.__name__, options

    def __call__(self, segments: Any, outputs: Any, accumulate: bool) -> None:
        self.wgrad(segments, outputs, accumulate, self.weight, self.bias, self.options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadW) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


def linear_cross_entropy_with_torch(
    weight: Tensor, bias: Tensor | None, x: Tensor, target: Tensor, options: Options, sums: bool = False
) -> Tensor:
    """LinearCrossEntropy in torch's own operations, all logits at once."""
    return cross_entropy_with_torch(linear_with_torch(weight, bias, x, None), target, options)


def linear_log_probs_with_torch(
    weight: Tensor, bias: Tensor | None, x: Tensor, target: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """LinearLogProbs in torch's own operations, all logits at once; of DTensors, on every rank."""
    logits: Any = linear_with_torch(weight, bias, x, None)
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    log_p = _capped(logits, options).log_softmax(1)
    entropy = -(log_p.exp() * log_p.clamp(min=LEAST_LOG)).sum(1)
    return -cross_entropy_with_torch(logits, target, options), torch.where(target == options.ignore_index, 0, entropy)


def _capped(logits: Tensor, options: Options) -> Tensor:
    """In float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)


def cross_entropy_with_torch(logits: Tensor, target: Tensor, options: Options) -> Tensor:
    """cross_entropy(logits[i], target[i]), in float32 or wider."""
    logits = _capped(logits, options)
    loss = torch.nn.functional.cross_entropy(
        logits,
        target,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    if options.z_loss:
        square = options.z_loss * logits.logsumexp(1).square()
        loss = loss + torch.where(target == options.ignore_index, 0, square)
    return loss
