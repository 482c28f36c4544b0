"""What the public ops refuse: errors name the op, the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zbkern import functional as Z
from zbkern.kernels.dispatch import UnavailableError

INDICES = torch.tensor([[0, 3, 3], [2, 0, 6]])
TARGET = torch.tensor([1, 4, -100, 0, 4, 8, 2])


def t(*shape: int, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, device=device)


def ends(*values: int) -> Tensor:
    return torch.tensor(values)


def c(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: Z.linear(t(2, 3), t(4, 5)),
            ValueError,
            r"linear: weight must be \[N, K\] with K=3 like x; got \[4, 5\]",
        ),
        (lambda: Z.linear([1.0], t(4, 5)), TypeError, "linear: x must be a torch.Tensor; got list"),
        (lambda: Z.linear(t(2, 5), t(4, 5), t(3)), ValueError, "linear: bias must be .* N=4"),
        (lambda: Z.linear(t(2, 5), t(4, 5), 1.0), TypeError, "linear: bias must be"),
        (lambda: Z.linear(t(2, 5), t(4, 5), activation="tanh"), ValueError, "linear: activation must be .*'tanh'"),
        (lambda: Z.linear(t(2, 5), t(4, 5).double()), TypeError, "linear: x is torch.float32 and a weight or bias"),
        (lambda: Z.linear(t(2, 5), t(4, 5), t(4).double()), TypeError, "a weight or bias torch.float64; convert one"),
        (lambda: Z.linear(t(2, 5), t(4, 5, device="meta")), ValueError, "linear: weight is on meta and x on cpu"),
        (
            lambda: Z.linear(c(2, 5), c(4, 5)),
            TypeError,
            "linear: x must be real numbers; got torch.complex64; use torch",
        ),
        (lambda: Z.linear(t(2, 5), c(4, 5)), TypeError, "linear: weight must be real numbers; got torch.complex64"),
        (lambda: Z.linear(t(2, 5), t(4, 5), c(4)), TypeError, "linear: bias must be real numbers"),
        (lambda: Z.swiglu(t(2, 5), t(4, 5), c(4, 5), t(5, 4)), TypeError, "gated_mlp: up must be real numbers"),
        (lambda: Z.grouped_linear(c(5, 4), c(1, 2, 4), [5]), TypeError, "grouped_linear: x must be real numbers"),
        (lambda: Z.embedding(INDICES, c(7, 4)), TypeError, "embedding: weight must be real numbers"),
        (lambda: Z.rms_norm(c(2, 5)), TypeError, "rms_norm: x must be real numbers"),
        (lambda: Z.layer_norm(t(2, 5), c(5)), TypeError, "layer_norm: weight must be real numbers"),
        (lambda: Z.rms_norm(t(2, 5), residual=c(2, 5)), TypeError, "rms_norm: residual must be real numbers"),
        (lambda: Z.attention(*[c(1, 2, 3, 4)] * 3), TypeError, "attention: q must be real numbers"),
        (lambda: Z.rotary(c(5, 2, 4), t(5, 2), t(5, 2)), TypeError, "rotary: x must be real numbers"),
        (lambda: Z.linear_cross_entropy(t(7, 5), c(9, 5), TARGET), TypeError, "entropy: weight must be real numbers"),
        (lambda: Z.linear(t(2, 5), t(4, 5), impl="magic"), UnavailableError, "there is no implementation 'magic'"),
        (lambda: Z.linear(t(2, 5), t(4, 5), impl="cuda"), UnavailableError, "linear: impl='cuda' cannot run on cpu"),
        (lambda: Z.gated_mlp(t(2, 5), t(4, 5), t(3, 5), t(5, 4)), ValueError, "up must have gate's shape"),
        (lambda: Z.gated_mlp(t(2, 5), t(4, 5), t(4, 5), t(5, 3)), ValueError, r"down must be \[N, H\] with H=4"),
        (lambda: Z.gated_mlp(t(2, 5), t(4, 5), t(4, 5), None), TypeError, "gated_mlp: down must be a torch.Tensor"),
        (lambda: Z.swiglu(t(2, 5), t(4, 5), t(4, 5), t(5, 4, device="meta")), ValueError, "down is on meta"),
        (lambda: Z.swiglu(t(2, 5), t(4, 5), t(4, 5).double(), t(5, 4)), TypeError, "gated_mlp: x is torch.float32"),
        (lambda: Z.grouped_linear(t(5, 4), None, [5]), TypeError, "grouped_linear: weight must be a torch.Tensor"),
        (lambda: Z.grouped_linear(t(5, 4), t(1, 2, 4), [5.5]), TypeError, r"counts must be integers; got \[5.5\]"),
        (lambda: Z.grouped_linear(t(5, 4), t(3, 2, 4), [2, 2, 2]), ValueError, "grouped_linear: counts must be 3"),
        (lambda: Z.grouped_linear(t(5, 4), t(2, 4), [5]), ValueError, "grouped_linear: x must be"),
        (lambda: Z.embedding(t(3), t(7, 4)), TypeError, "embedding: indices must be integers"),
        (lambda: Z.embedding([0, 1], t(7, 4)), TypeError, "embedding: indices must be a torch.Tensor; got list"),
        (lambda: Z.embedding(INDICES, t(7, 4, device="meta")), ValueError, "weight is on meta and indices on cpu"),
        (lambda: Z.embedding(INDICES, t(7, 4), 7), ValueError, "padding_idx must be within the 7 rows; got 7"),
        (lambda: Z.rms_norm(t(2, 5), t(4)), ValueError, "rms_norm: weight must be .* K=5"),
        (lambda: Z.rms_norm(t(2, 5), t(5, device="meta")), ValueError, "rms_norm: weight is on meta and x on cpu"),
        (lambda: Z.layer_norm(t(2, 5), t(5), 1.0), TypeError, "layer_norm: bias must be a torch.Tensor; got float"),
        (lambda: Z.layer_norm(t(2, 5), t(5), t(4)), ValueError, "layer_norm: bias must be .* K=5"),
        (lambda: Z.layer_norm(t(2, 5), None, t(5)), ValueError, "layer_norm: bias without weight"),
        (lambda: Z.layer_norm(t(2, 5), residual=t(5)), ValueError, r"residual must be \[2, 5\] like x.* got .* \[5\]"),
        (lambda: Z.rms_norm(t(2, 5), residual=1.0), TypeError, "rms_norm: residual must be a torch.Tensor; got float"),
        (lambda: Z.rms_norm(t(2, 5), residual=t(2, 5).int()), ValueError, "of a floating dtype; got torch.int32"),
        (lambda: Z.attention(t(2, 5), t(2, 5), t(2, 5)), ValueError, "attention: q must be"),
        (lambda: Z.attention(t(1, 2, 3, 4), t(1, 2, 2, 4), t(1, 2, 2, 4)), ValueError, "that divides q's"),
        (lambda: Z.attention(t(1, 2, 3, 4), t(2, 2, 3, 4), t(2, 2, 3, 4)), ValueError, "q's batch and D"),
        (lambda: Z.attention(t(1, 2, 3, 4), t(1, 2, 0, 4), t(1, 2, 0, 4)), ValueError, "that divides q's"),
        (lambda: Z.attention(*[t(1, 2, 3, 4)] * 2, t(1, 2, 3, 4).double()), TypeError, "must have one floating dtype"),
        (lambda: Z.attention(*[t(1, 2, 3, 4)] * 3, cu_seqlens_k=[0, 2]), ValueError, "cu_seqlens_k needs cu_seqlens"),
        (lambda: Z.attention(*[t(1, 2, 3, 4)] * 3, window=2), ValueError, "window must be at least 1 and needs causal"),
        (lambda: Z.attention(*[t(5, 3, 4)] * 3, cu_seqlens=[0, 3]), ValueError, "cu_seqlens must rise from 0 to the 5"),
        (lambda: Z.attention(*[t(1, 2, 3, 4)] * 3, softcap=0), ValueError, "softcap must be a number above 0"),
        (lambda: Z.attention(*[t(1, 2, 3, 4)] * 3, sinks=t(4)), ValueError, r"sinks must be \[heads\] = \[3\]"),
        (lambda: Z.attention(*[t(5, 3, 4)] * 3, cu_seqlens=ends(0, 6)), ValueError, "from 0 to at most 5 tokens"),
        (lambda: Z.attention(*[t(5, 3, 4)] * 3, cu_seqlens=t(2)), ValueError, "int32 or int64; got torch.float32"),
        (
            lambda: Z.attention(*[t(5, 3, 4)] * 3, cu_seqlens=ends(0, 5), cu_seqlens_k=[0, 5]),
            TypeError,
            "as cu_seqlens is",
        ),
        (
            lambda: Z.attention(*[t(5, 3, 4)] * 3, cu_seqlens=ends(0, 5), cu_seqlens_k=ends(0, 2, 5)),
            ValueError,
            "cu_seqlens_k must have as many ends as cu_seqlens; got 3 and 2",
        ),
        (lambda: Z.rotary(t(5, 4), t(5, 2), t(5, 2)), ValueError, "rotary: x must be .*T, H, D"),
        (lambda: Z.rotary(t(5, 2, 4), t(4, 2), t(5, 2)), ValueError, "rotary: cos must be .* T=5 and R <= 4 like x"),
        (lambda: Z.rotary(t(5, 2, 4), t(5, 2), t(5, 3)), ValueError, r"rotary: sin must be .* got \[5, 3\]"),
        (lambda: Z.rotary(t(5, 2, 4), t(5, 2), t(5, 1)), ValueError, r"sin must have cos's shape \[5, 2\]"),
        (lambda: Z.rotary(t(5, 2, 4), t(5, 2).int(), t(5, 2)), TypeError, "cos must be floating .* got torch.int32"),
        (lambda: Z.rotary(t(5, 2, 4), t(5, 2), t(5, 2).requires_grad_()), TypeError, "one that requires a gradient"),
        (lambda: Z.rotary(t(5, 2, 4), None, t(5, 2)), TypeError, "rotary: cos must be a torch.Tensor; got NoneType"),
        (lambda: Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET[:3]), ValueError, "target must be integers of shape"),
        (lambda: Z.linear_cross_entropy(t(7, 5), t(9, 5), None), TypeError, "target must be a torch.Tensor; got None"),
        (lambda: Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET > 0), ValueError, "integers .* got torch.bool"),
        (lambda: Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET, reduction="max"), ValueError, "reduction must be"),
    ],
)
def test_errors_name_function_argument_expected_and_got(call: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
