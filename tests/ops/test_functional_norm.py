"""Norms that add a residual first: two outputs, each with its gradient, against torch's own in float64."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zbkern
from zbkern import functional as Z
from zbkern import testing

NORMS = {
    "rms_norm": (
        lambda x, r, w, b: Z.rms_norm(x, w, 1e-3, residual=r),
        lambda x, r, w, b: (F.rms_norm(x + r, (5,), w, 1e-3), x + r),
    ),
    "layer_norm": (
        lambda x, r, w, b: Z.layer_norm(x, w, b, residual=r),
        lambda x, r, w, b: (F.layer_norm(x + r, (5,), w, b), x + r),
    ),
}


def tensors() -> list[Tensor]:
    """x, residual, weight and bias."""
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (3, 5), (5,), (5,))]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", NORMS)
def test_outputs_of_a_norm_with_residual(name: str, used: tuple[int, ...], deferred: bool) -> None:
    """Each alone and both, with the same tensor as x and residual in a second call; grads do not share memory."""
    mine, others, queue = tensors(), tensors(), zbkern.WGradQueue()
    for function, (x, residual, weight, bias) in zip(NORMS[name], (mine, others), strict=True):
        with queue.defer() if deferred else contextlib.nullcontext():
            for r in (residual, x):
                outputs = function(x, r, weight, bias)
                sum((outputs[i] * (i + 1.5)).square().sum() for i in used).backward()
                if r is residual:
                    assert x.grad.data_ptr() != residual.grad.data_ptr()
    assert queue.pending() == (2 if deferred and 0 in used else 0)
    queue.run()
    for got, expected in zip(mine, others, strict=True):
        assert (got.grad is None) == (expected.grad is None)
        if got.grad is not None:
            testing.assert_close(got.grad, expected.grad)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("name", NORMS)
def test_second_derivatives_of_one_output_of_a_norm_with_residual(name: str, used: int) -> None:
    assert torch.autograd.gradgradcheck(lambda *t: NORMS[name][0](*t)[used], tensors(), fast_mode=True)


@pytest.mark.parametrize("name", NORMS)
def test_a_residual_of_another_dtype_is_added_as_torch_does(name: str) -> None:
    torch.manual_seed(0)
    x, residual, weight, bias = torch.randn(3, 5).bfloat16(), torch.randn(3, 5), torch.randn(5), torch.randn(5)
    for a, b in ((x, residual), (residual, x)):
        (y, summed), expected = (function(a, b, weight, bias) for function in NORMS[name])
        assert torch.equal(summed, expected[1])
        testing.assert_close(y, expected[0])
