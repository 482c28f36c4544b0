"""A linear layer per group of rows (mixture of experts) as Triton kernels: eight groups a launch, each a product.

Every group has its own view of the rows, so nothing is read or written across a border, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from zbkern.kernels.triton.multi_matmul import Product, run
from zbkern.kernels.triton.wgrad import linear_wgrads


def grouped_linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, y: Tensor, num_sms: int | None = None
) -> None:
    """Rows of group e: y = x weight[e]^T + bias[e]."""
    if y.numel():
        bias = None if bias is None else bias.contiguous()
        products = [
            Product([(rows, weight[e].t())], out, None if bias is None else bias[e])
            for e, rows, out in _groups(counts, x, y)
        ]
        run("fwd", products, False, num_sms)


def grouped_linear_dgrad(dy: Tensor, weight: Tensor, counts: Tensor, dx: Tensor, num_sms: int | None = None) -> None:
    """Rows of group e: dx = dy weight[e]."""
    if dx.numel():
        products = [Product([(rows, weight[e])], out) for e, rows, out in _groups(counts, dy, dx)]
        run("dgrad", products, False, num_sms)


def grouped_linear_wgrad(
    segments: Sequence[tuple[Tensor, ...]],
    outputs: Sequence[Tensor | None],
    accumulate: bool,
    num_sms: int | None = None,
) -> None:
    """dweight[e] (+)= sum of dy^T x and dbias[e] (+)= sum of dy, over the rows of group e in all segments."""
    groups = next(output for output in outputs if output is not None).shape[0]
    layers: list[tuple[list, list[Tensor | None]]] = [
        ([], [None if out is None else out[e] for out in outputs]) for e in range(groups)
    ]
    for x, dy, counts in segments:
        for e, rows, gradients in _groups(counts, x, dy):
            layers[e][0].append((rows, gradients))
    linear_wgrads(layers, accumulate, num_sms)


def _groups(counts: Tensor, first: Tensor, second: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(number, its rows of both) of every group that has rows."""
    end = 0
    for number, count in enumerate(counts.tolist()):
        begin, end = end, end + count
        if count:
            yield number, first[begin:end], second[begin:end]
