"""Whole layers on the emulated GPU: the public functions, the queue and merged W, against impl="torch"."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import zbkern
from zbkern import functional, testing
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.ops.functions import linear as linear_functions
from zbkern.wgrad import WGradKernel

pytestmark = pytest.mark.usefixtures("hopper")


def linear(impl: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    h = functional.linear(x, weights[0], weights[1], "gelu", impl=impl)
    return functional.linear(h, weights[2], None, impl=impl)


def transposed(impl: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    return functional.linear(x, weights[0], weights[1], impl=impl, transposed=True)


def gated(impl: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    return functional.gated_mlp(x, *weights, impl=impl)


def grouped(impl: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    rows = x.flatten(0, 1)
    counts = torch.tensor([3, 0, len(rows) - 3])
    return functional.grouped_linear(rows, weights[0], counts, weights[1], impl=impl)


def experts(impl: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    rows = x.flatten(0, 1)
    gate = functional.GateOptions(interleaved=True, limit=0.5, alpha=1.702, offset=1.0)
    ends = torch.tensor([3, 3, len(rows) - 2], dtype=torch.int32)
    return functional.grouped_mlp(rows, *weights[:2], None, weights[2:], gate, impl, offsets=ends, transposed=True)


def attention(impl: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    q, k, v = x.view(2, -1, 4, 8).split((2, 1, 1), 2)
    return functional.attention(q, k, v, True, functional.AttentionOptions(window=5), impl=impl)


def packed_attention(impl: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    q, k, v = x.view(-1, 4, 8).split((2, 1, 1), 1)
    return functional.attention(q, k, v, cu_seqlens=[0, 5, len(q)], impl=impl)


def block(impl: str, x: Tensor, weights: list[Tensor]) -> Tensor:
    gain, shift, table, head = weights
    indices = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) % 7
    h = x + functional.embedding(indices, table, padding_idx=3, impl=impl)
    h = functional.rms_norm(functional.layer_norm(h, gain, shift, impl=impl), gain, impl=impl)
    normed, summed = functional.rms_norm(h, gain, residual=x, impl=impl)
    h = functional.layer_norm(normed, gain, shift, residual=summed, impl=impl)[0]
    return functional.linear_cross_entropy(
        h, head, indices, options=functional.CrossEntropyOptions(-100, 0.1, 0.01, 8), impl=impl
    )


MODELS = {
    "attention": (attention, []),
    "packed attention": (packed_attention, []),
    "embedding, norms and loss": (block, [(32,), (32,), (11, 32), (7, 32)]),
    "linear": (linear, [(48, 32), (48,), (24, 48)]),
    "transposed": (transposed, [(32, 24), (24,)]),
    "grouped": (grouped, [(3, 24, 32), (3, 24)]),
    "experts": (experts, [(3, 32, 80), (3, 40, 24), (3, 80), (3, 24)]),
    "gated": (gated, [(40, 32), (40, 32), (24, 40), (40,), (40,), (24,)]),
}


@pytest.mark.parametrize("deferred", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "name", [name if name == "linear" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_gradients_equal_torchs(name: str, deferred: bool) -> None:
    model, shapes = MODELS[name]

    def run(impl: str) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [(0.2 * torch.randn(shape)).requires_grad_() for shape in shapes]
        inputs = [torch.randn(2, rows, 32, requires_grad=True) for rows in (5, 9, 16)]
        queue = zbkern.WGradQueue()
        for x in inputs:
            with queue.defer() if deferred else contextlib.nullcontext():
                (model(impl, x, weights) ** 2).sum().backward()
        queue.run()
        return [t.grad for t in (*weights, *inputs)]

    for got, expected in zip(run("triton"), run("torch"), strict=True):
        testing.assert_close(got, expected)


def test_weights_of_several_layers_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = linear_functions.linear_wgrad(triton_kernels)
    run, run_many = original.run, original.run_many
    kernel = WGradKernel(run, lambda layers, a: (calls.append(len(layers)), run_many(layers, a)))
    monkeypatch.setattr(linear_functions, "linear_wgrad", lambda backend: kernel)
    weights = [torch.randn(*shape, requires_grad=True) for shape in [(8, 16), (24, 8), (16, 24)]]
    queue = zbkern.WGradQueue()
    x = torch.randn(5, 16)
    with queue.defer():
        h = x
        for weight in weights:
            h = functional.linear(h, weight, impl="triton")
        h.sum().backward()
    queue.run()
    assert calls == [3]
    h = x
    for weight in weights:
        h = h @ weight.t()
    for got, expected in zip(weights, torch.autograd.grad(h.sum(), weights), strict=True):
        testing.assert_close(got.grad, expected)
