"""AdamW and the norm of gradients in plain torch; part of `reference`.

The step is that of torch.optim.AdamW(fused=True), in float32 at least. Nothing waits for a device: what depends on
`control` is computed there, also whether a step is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from zbkern.kernels.spec import AdamWOptions

_HOST = ("cpu",)  # devices whose tensors can be read without waiting

_PORTION = 1 << 18
"""Elements converted or scaled at a time on a CPU, into copies that stay in its caches: a clipped step of 10 M fp32
weights takes 7 ms so, 24 with copies of all gradients at once, and 5.6 where nothing is scaled."""


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
    on_host = params[0].device.type in _HOST
    skip = factor = None
    if control is not None:
        skip, factor = (control[1] != 0) | ~control[0].isfinite(), _factor(control, options.max_norm)
        if on_host:
            if skip:
                return
            skip, factor = None, None if factor == 1 else factor
    lists = [list(tensors) for tensors in (params if masters is None else masters, exp_avgs, exp_avg_sqs, grads)]
    wide = torch.promote_types(params[0].dtype, torch.float32)
    fit = lists[0][0].dtype is lists[3][0].dtype is wide and all(map(Tensor.is_contiguous, chain(*lists)))
    whole = not on_host or (fit and factor is None and not undo)
    lists += [list(steps)] if masters is None else [list(steps), list(params)]
    kept = [tensor.clone() for tensor in chain(*lists)] if undo and skip is not None else None
    if not undo:
        torch._foreach_add_(lists[4], 1.0 if skip is None else (~skip).to(steps[0].dtype))
    for weights, m, v, gradients, counts, *rounded in [lists] if whole else _portions(lists):
        copies: list[tuple[Tensor, Tensor]] = []
        if not fit:  # the fused step takes one dtype, and on a CPU it goes through memory whatever the strides
            originals = [*weights, *m, *v]
            weights, m, v, gradients = (
                [tensor.to(wide).contiguous() for tensor in tensors] for tensors in (weights, m, v, gradients)
            )
            copies += (pair for pair in zip(originals, [*weights, *m, *v], strict=True) if pair[0] is not pair[1])
        if rounded:
            copies += zip(*rounded, weights, strict=True)
        if factor is not None:
            gradients = list(torch._foreach_mul(gradients, factor))
        (_undo if undo else _step)(weights, gradients, m, v, counts, options, skip)
        if copies:
            torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])
    if undo:
        torch._foreach_sub_(lists[4], 1.0)
    if skip is not None and kept is not None:
        for tensor, before in zip(chain(*lists), kept, strict=True):
            tensor.copy_(torch.where(skip, before, tensor))


def squared_norm(
    tensors: Sequence[Tensor], control: Tensor, accumulate: bool = False, memory: dict[str, Any] | None = None
) -> None:
    """Norms of single tensors, or of parts, in float32 at least; their squares added up in float64."""
    if not accumulate:
        control[:2] = 0
    if not tensors:
        return
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    on_host = tensors[0].device.type in _HOST
    portions = _portions([list(tensors)]) if on_host and tensors[0].dtype is not wide else [[list(tensors)]]
    norms = torch.stack([norm for (portion,) in portions for norm in torch._foreach_norm(portion, 2, dtype=wide)])
    control[0] += norms.double().square().sum()
    control[1] = torch.maximum(control[1], (~norms.isfinite().all()).to(control.dtype))


def _portions(lists: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """The lists, some _PORTION elements at a time: small tensors together, large ones in parts, steps beside each."""
    rows: list[tuple[Tensor, ...]] = []
    size = 0
    for row in zip(*lists, strict=True):
        parts = [row]
        if row[0].numel() > _PORTION and all(tensor.is_contiguous() for tensor in row):
            columns = (tensor.view(-1).split(_PORTION) if tensor.dim() else repeat(tensor) for tensor in row)
            parts = list(zip(*columns, strict=False))
        for part in parts:
            rows.append(part)
            size += part[0].numel()
            if size >= _PORTION:
                yield [list(tensors) for tensors in zip(*rows, strict=True)]
                rows, size = [], 0
    if rows:
        yield [list(tensors) for tensors in zip(*rows, strict=True)]


def _factor(control: Tensor, max_norm: float) -> Tensor:
    norm = control[0].sqrt() / control[2]
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) / control[2]


def _step(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    options: AdamWOptions,
    skip: Tensor | None,
) -> None:
    lr, (beta1, beta2) = options.lr, options.betas
    if isinstance(lr, Tensor):
        lr = float(lr) if lr.device.type in _HOST else lr.to(weights[0].device, torch.float32)
    torch._fused_adamw_(
        weights, gradients, exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=beta1, beta2=beta2, eps=options.eps,
        weight_decay=options.weight_decay, amsgrad=False, maximize=options.maximize,
        found_inf=None if skip is None else skip.to(torch.float32),
    )  # fmt: skip


def _undo(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    options: AdamWOptions,
    skip: Tensor | None,
) -> None:
    """The step solved for what was there before it: Qi et al. (arXiv 2401.10241), section 4 and appendix."""
    (beta1, beta2), lr = options.betas, options.lr
    for weight, gradient, m, v, step in zip(weights, gradients, exp_avgs, exp_avg_sqs, steps, strict=True):
        first, second = (-torch.expm1(step * math.log(beta)) for beta in (beta1, beta2))  # 1 - beta^step, to rounding
        weight.add_(lr * (m / first) / ((v / second).sqrt() + options.eps)).div_(1 - lr * options.weight_decay)
        m.sub_(gradient, alpha=(beta1 - 1) if options.maximize else (1 - beta1)).div_(beta1)
        v.sub_(gradient.square(), alpha=1 - beta2).div_(beta2).clamp_(min=0)
