"""AdamW and the norm of gradients in plain torch; part of `reference`.

The step is torch.optim's own, in float32 at least. Nothing waits for a device: what depends on `control` is computed
there, also whether a step is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from zbkern.kernels.spec import AdamWOptions

_HOST = ("cpu",)  # devices whose tensors can be read without waiting


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    options: AdamWOptions,
    control: Tensor | None = None,
    undo: bool = False,
    memory: dict[str, Any] | None = None,
) -> None:
    """One step of torch's AdamW, or its inverse."""
    if not params:
        return
    changed = [*params, *exp_avgs, *exp_avg_sqs, *steps, *(masters or ())]
    kept = None
    if control is not None:
        skip = (control[1] != 0) | ~control[0].isfinite()
        if control.device.type not in _HOST:
            kept = [tensor.clone() for tensor in changed]
        elif skip:
            return
    weights = masters if masters is not None else [_wide(param) for param in params]
    gradients = [grad.to(weight.dtype) for grad, weight in zip(grads, weights, strict=True)]
    if control is not None:
        gradients = list(torch._foreach_mul(gradients, _factor(control, options.max_norm)))
    (_undo if undo else _step)(weights, gradients, exp_avgs, exp_avg_sqs, steps, options)
    if weights[0] is not params[0]:
        torch._foreach_copy_(list(params), list(weights))
    if kept is not None:
        for tensor, before in zip(changed, kept, strict=True):
            tensor.copy_(torch.where(skip, before, tensor))


def squared_norm(
    tensors: Sequence[Tensor], control: Tensor, accumulate: bool = False, memory: dict[str, Any] | None = None
) -> None:
    """Norms of single tensors in float32 at least, their squares added up in float64."""
    if not accumulate:
        control[:2] = 0
    if not tensors:
        return
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=wide))
    control[0] += norms.double().square().sum()
    control[1] = torch.maximum(control[1], (~norms.isfinite().all()).to(control.dtype))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _factor(control: Tensor, max_norm: float) -> Tensor:
    norm = control[0].sqrt() / control[2]
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) / control[2]


def _step(
    weights: Sequence[Tensor],
    gradients: list[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    options: AdamWOptions,
) -> None:
    on_host = steps[0].device.type in _HOST
    beta1, beta2 = options.betas
    torch_adamw(
        list(weights), gradients, list(exp_avgs), list(exp_avg_sqs), [], list(steps),
        capturable=not on_host, amsgrad=False, maximize=options.maximize, beta1=beta1, beta2=beta2,
        lr=float(options.lr) if on_host else options.lr, weight_decay=options.weight_decay, eps=options.eps,
    )  # fmt: skip


def _undo(
    weights: Sequence[Tensor],
    gradients: list[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    options: AdamWOptions,
) -> None:
    """The step solved for what was there before it: Qi et al. (arXiv 2401.10241), section 4 and appendix."""
    (beta1, beta2), lr = options.betas, options.lr
    for weight, gradient, m, v, step in zip(weights, gradients, exp_avgs, exp_avg_sqs, steps, strict=True):
        first, second = (-torch.expm1(step * math.log(beta)) for beta in (beta1, beta2))  # 1 - beta^step, to rounding
        weight.add_(lr * (m / first) / ((v / second).sqrt() + options.eps)).div_(1 - lr * options.weight_decay)
        m.sub_(gradient, alpha=(beta1 - 1) if options.maximize else (1 - beta1)).div_(beta1)
        v.sub_(gradient.square(), alpha=1 - beta2).div_(beta2).clamp_(min=0)
        step.sub_(1)
