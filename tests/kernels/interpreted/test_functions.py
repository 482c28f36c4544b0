"""Attention, norms, embedding and loss through Triton's interpreter: the public functions and the queue, against
impl="torch"."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from torch import Tensor

import zbkern
from zbkern import functional, testing

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter


def attention(impl: str, x: Tensor) -> Tensor:
    q, k, v = x.view(2, 9, 4, 8).split((2, 1, 1), 2)
    return functional.attention(q, k, v, functional.AttentionOptions(causal=True, window=5), impl=impl)


def packed_attention(impl: str, x: Tensor) -> Tensor:
    q, k, v = x.view(18, 4, 8).split((2, 1, 1), 1)
    return functional.attention(q, k, v, cu_seqlens=[0, 5, 18], impl=impl)


def block(impl: str, x: Tensor, gain: Tensor, shift: Tensor, table: Tensor, head: Tensor) -> Tensor:
    indices = torch.arange(18).view(2, 9) % 7
    h = x + functional.embedding(indices, table, padding_idx=3, impl=impl)
    h = functional.rms_norm(functional.layer_norm(h, gain, shift, impl=impl), gain, impl=impl)
    normed, summed = functional.rms_norm(h, gain, residual=x, impl=impl)
    h = functional.layer_norm(normed, gain, shift, residual=summed, impl=impl)[0]
    return functional.linear_cross_entropy(
        h, head, indices, options=functional.CrossEntropyOptions(-100, 0.1, 0.01, 8), impl=impl
    )


CASES = {
    "attention": (attention, []),
    "packed attention": (packed_attention, []),
    "embedding, norms and loss": (block, [(32,), (32,), (11, 32), (7, 32)]),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_torchs(name: str) -> None:
    """Of two microbatches, the W of which wait and are merged."""
    function: Callable
    function, shapes = CASES[name]

    def run(impl: str) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [torch.randn(shape, requires_grad=True) for shape in shapes]
        inputs = [torch.randn(2, 9, 32, requires_grad=True) for _ in range(2)]
        queue = zbkern.WGradQueue()
        with queue.defer():
            for x in inputs:
                (function(impl, x, *weights) ** 2).sum().backward()
        queue.run()
        return [t.grad for t in (*weights, *inputs)]

    for got, expected in zip(run("triton"), run("torch"), strict=True):
        testing.assert_close(got, expected)
