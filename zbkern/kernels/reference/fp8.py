"""Linear layers that multiply 8-bit numbers with a scale per block. Contract: spec.py.

As DeepSeek-V3 trains (arXiv 2412.19437, 3.3): blocks of 1 x 128 of activations and gradients, 128 x 128 of weights, so
that a weight quantised once serves both products; of W 128 x 1, along the tokens that it sums over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zbkern.kernels.reference.linear import linear_wgrad
from zbkern.kernels.spec import Outputs, Segments

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 1e-30  # a block of nothing larger becomes 0, and its scale needs no denormal numbers


def fp8_linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, kept: dict[object, Tensor] | None = None
) -> None:
    """y = quantised(x) quantised(weight)^T + bias, in float32."""
    total = _rounded(x, 1) @ _rounded_weight(weight, kept).t()
    y.copy_(total if bias is None else total + bias)


def fp8_linear_dgrad(dy: Tensor, weight: Tensor, dx: Tensor, kept: dict[object, Tensor] | None = None) -> None:
    """dx = quantised(dy) quantised(weight), in float32."""
    dx.copy_(_rounded(dy, 1) @ _rounded_weight(weight, kept))


def fp8_linear_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    """dweight (+)= sum of quantised(dy^T) quantised(x^T)^T and dbias (+)= sum over rows of dy, over (x, dy). Every
    segment's blocks begin anew and its sum is added by itself, so that merged W are the same bits as single ones."""
    dweight, dbias = outputs
    for x, dy in segments:
        if dweight is not None:
            product = _rounded(dy.t(), 1) @ _rounded(x.t(), 1).t()
            dweight.add_(product) if accumulate else dweight.copy_(product)
        linear_wgrad([(x, dy)], (None, dbias), accumulate)
        accumulate = True


def quantised(tensor: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(values [M, K] in float8_e4m3fn, scales [M / rows, K / 128] float32): a block's largest value becomes 448.

    NaN stays NaN, beside others as they would be without it; where a value is infinite, what its block is multiplied
    by, 0 times infinity, is NaN.
    """
    m, k = tensor.shape
    padded = tensor.new_zeros(m + -m % rows, k + -k % BLOCK, dtype=torch.float32)
    padded[:m, :k] = tensor  # torch 2.8 pads nothing that is empty
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))  # [M / rows, rows, K / 128, 128]
    largest = blocks.abs().nan_to_num(0.0, torch.inf).amax((1, 3), keepdim=True)
    nonzero, limit = largest > SMALLEST, torch.full_like(largest, LARGEST)  # torch divides by a number as it multiplies
    factors = torch.where(nonzero, limit / largest, 0)
    scales = torch.where(nonzero, largest / limit, 0)
    values = (blocks * factors).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
    return values[:m, :k], scales[:, 0, :, 0]


def _rounded_weight(weight: Tensor, kept: dict[object, Tensor] | None) -> Tensor:
    kept = {} if kept is None else kept
    if "rounded" not in kept:
        kept["rounded"] = _rounded(weight, BLOCK)
    return kept["rounded"]


def _rounded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor as its quantised form has it."""
    values, scales = quantised(tensor, rows)
    factors = scales.repeat_interleave(rows, 0).repeat_interleave(BLOCK, 1)
    return values.float() * factors[: tensor.shape[0], : tensor.shape[1]]
