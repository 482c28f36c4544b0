"""RMSNorm and LayerNorm in plain torch. Contract: spec.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zbkern.kernels.spec import Outputs, Segments


def norm_partials(rows: int, features: int, device: torch.device) -> int:
    """One: here the whole sum over rows is taken with the rows."""
    return 1


def norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    residual: Tensor | None = None,
    summed: Tensor | None = None,
) -> None:
    if residual is not None:  # the sum as it is kept, rounded, because that is what dgrad will read
        x = torch.add(x, residual, out=summed)
    wide = x.to(rstd.dtype)
    if mean is not None:
        for output, value in zip((y, mean, rstd), layer_norm(wide, weight, bias, eps), strict=True):
            output.copy_(value)
        return
    normal = _wide_like(y, rstd)
    torch.mean(torch.square(wide, out=normal), 1, out=rstd)
    torch.mul(wide, rstd.add_(eps).rsqrt_().unsqueeze(1), out=normal)
    if weight is not None:
        normal.mul_(weight)
    if normal is not y:
        y.copy_(normal)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm's norm_fwd in new memory: y, mean, rstd, for x [..., K] in the statistics' dtype."""
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], _wide(weight, x), _wide(bias, x), eps)
    return y, mean.view(-1), rstd.view(-1)


def norm_dgrad(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    partials: Tensor | None,
    dsummed: Tensor | None = None,
) -> None:
    dy, x = dy.to(rstd.dtype), x.to(rstd.dtype)
    if mean is None:
        _rms_norm_dgrad(dy, x, weight, rstd, dx, partials, dsummed)
        return
    gradient, sums = layer_norm_gradients(dy, x, weight, mean, rstd, dsummed)
    dx.copy_(gradient)
    if partials is not None and sums is not None:
        partials.copy_(sums)


def _rms_norm_dgrad(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dx: Tensor, partials: Tensor | None,
    dsummed: Tensor | None,
) -> None:  # fmt: skip
    """A pass over memory each, in one buffer: 3 times as fast as torch's backward of rms_norm, 2048 x 768 on a CPU."""
    scale, buffer = rstd.unsqueeze(1), _wide_like(dx, rstd)
    torch.mul(x, scale, out=buffer).mul_(dy)
    if partials is not None:
        torch.sum(buffer, 0, keepdim=True, out=partials[0])
    mean = (buffer.sum(1) if weight is None else torch.mv(buffer, weight.to(rstd.dtype))).div_(x.shape[1])
    if weight is None:
        buffer.copy_(dy)
    else:
        torch.mul(dy, weight, out=buffer)
    buffer.addcmul_(x, (mean * rstd).unsqueeze(1), value=-1).mul_(scale)
    if dsummed is not None:
        buffer.add_(dsummed)
    if buffer is not dx:
        dx.copy_(buffer)


def layer_norm_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, dsummed: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """LayerNorm's norm_dgrad in new memory: dx, and partials or None without a weight; all in the statistics' dtype."""
    weight = _wide(weight, rstd)
    sums = weight is not None
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, list(x.shape[1:]), mean.unsqueeze(1), rstd.unsqueeze(1), weight, weight, [True, sums, sums]
    )
    if dsummed is not None:
        dx.add_(dsummed)
    return dx, torch.stack((dweight, dbias)).unsqueeze(1) if sums else None


def norm_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    for (partials,) in segments:
        for output, partial in zip(outputs, partials, strict=True):
            if output is not None:
                total = partial.sum(0)
                output.add_(total) if accumulate else output.copy_(total)
        accumulate = True


def norm_gradients(segment: tuple[Tensor, ...], params: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """norm_wgrad of one segment in new memory, None where the parameter is None."""
    (partials,) = segment
    return tuple([None if p is None else partial.sum(0) for p, partial in zip(params, partials, strict=True)])


def _wide_like(y: Tensor, rstd: Tensor) -> Tensor:
    """Where what becomes y is computed: y itself, or the like of it in the statistics' dtype."""
    return y if y.dtype == rstd.dtype else torch.empty_like(y, dtype=rstd.dtype)


def _wide(weight: Tensor | None, rstd: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(rstd.dtype)
