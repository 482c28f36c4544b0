"""Every public op against torch's own, in float64: values, gradients at once and deferred, second derivatives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zbkern
from zbkern import functional as Z
from zbkern import testing
from zbkern.kernels.dispatch import UnavailableError


@dataclass
class Case:
    """ours and torchs take (inputs..., parameters...); both lists are made from shapes in float64."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    inputs: list[tuple[int, ...]]
    parameters: list[tuple[int, ...]]
    twice: bool = True


INDICES = torch.tensor([[0, 3, 3], [2, 0, 6]])
TARGET = torch.tensor([1, 4, -100, 0, 4, 8, 2])
COUNTS = [2, 0, 3]


def torch_gated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(x, gate, up, down, *biases):
        a, b, c = biases or (None, None, None)
        return F.linear(activation(F.linear(x, gate, a)) * F.linear(x, up, b), down, c)

    return run


def torch_grouped(x, weight, bias):
    return torch.cat([F.linear(rows, weight[e], bias[e]) for e, rows in enumerate(x.split(COUNTS))])


def torch_head(x, weight, bias, smoothing=0.0, z_loss=0.0, reduction="mean"):
    z = F.linear(x, weight, bias)
    loss = F.cross_entropy(z, TARGET, label_smoothing=smoothing, reduction=reduction)
    squares = z_loss * z.logsumexp(1).square() * (TARGET != -100)
    if reduction == "mean":
        return loss + squares.sum() / (TARGET != -100).sum()
    return loss + (squares.sum() if reduction == "sum" else squares)


ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "relu": F.relu, "silu": F.silu}

CASES: dict[str, Case] = {
    "linear": Case(Z.linear, F.linear, [(2, 3, 5)], [(4, 5), (4,)]),
    "linear without bias": Case(Z.linear, F.linear, [(3, 5)], [(4, 5)]),
    "linear of a vector": Case(Z.linear, F.linear, [(5,)], [(4, 5), (4,)]),
    "linear transposed": Case(
        lambda x, w, b: Z.linear(x, w, b, transposed=True), lambda x, w, b: x @ w + b, [(2, 3, 5)], [(5, 4), (4,)]
    ),
    "rms_norm": Case(
        lambda x, w: Z.rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, (5,), w, 1e-3), [(2, 3, 5)], [(5,)]
    ),
    "rms_norm, no weight, own eps": Case(Z.rms_norm, lambda x: F.rms_norm(x, (5,)), [(3, 5)], []),
    "layer_norm": Case(Z.layer_norm, lambda x, w, b: F.layer_norm(x, (5,), w, b), [(2, 3, 5)], [(5,), (5,)]),
    "layer_norm without bias": Case(Z.layer_norm, lambda x, w: F.layer_norm(x, (5,), w), [(3, 5)], [(5,)]),
    "layer_norm without weight": Case(Z.layer_norm, lambda x: F.layer_norm(x, (5,)), [(3, 5)], []),
    "rms_norm with residual": Case(
        lambda x, r, w: torch.cat(Z.rms_norm(x, w, 1e-3, residual=r)),
        lambda x, r, w: torch.cat([F.rms_norm(x + r, (5,), w, 1e-3), x + r]),
        [(2, 3, 5), (2, 3, 5)],
        [(5,)],
    ),
    "layer_norm with residual": Case(
        lambda x, r, w, b: torch.cat(Z.layer_norm(x, w, b, residual=r)),
        lambda x, r, w, b: torch.cat([F.layer_norm(x + r, (5,), w, b), x + r]),
        [(2, 3, 5), (2, 3, 5)],
        [(5,), (5,)],
    ),
    "layer_norm with residual, no weight": Case(
        lambda x, r: torch.cat(Z.layer_norm(x, residual=r)),
        lambda x, r: torch.cat([F.layer_norm(x + r, (5,)), x + r]),
        [(3, 5), (3, 5)],
        [],
    ),
    "embedding": Case(lambda w: Z.embedding(INDICES, w), lambda w: F.embedding(INDICES, w), [], [(7, 4)]),
    "embedding with padding": Case(
        lambda w: Z.embedding(INDICES, w, -4), lambda w: F.embedding(INDICES, w, -4), [], [(7, 4)]
    ),
    "swiglu": Case(Z.swiglu, torch_gated(F.silu), [(2, 3, 5)], [(6, 5), (6, 5), (4, 6)]),
    "grouped_linear": Case(
        lambda x, w, b: Z.grouped_linear(x, w, COUNTS, b), torch_grouped, [(5, 4)], [(3, 2, 4), (3, 2)]
    ),
}
for name, function in ACTIVATIONS.items():
    CASES[f"linear + {name}"] = Case(
        lambda x, w, b, n=name: Z.linear(x, w, b, n),
        lambda x, w, b, f=function: f(F.linear(x, w, b)),
        [(3, 5)],
        [(4, 5), (4,)],
    )
    CASES[f"gated_mlp {name}"] = Case(
        lambda *t, n=name: Z.gated_mlp(*t, activation=n),
        torch_gated(function),
        [(3, 5)],
        [(6, 5), (6, 5), (4, 6), (6,), (6,), (4,)],
    )
for reduction in ("mean", "sum", "none"):
    for smoothing, z_loss in ((0.0, 0.0), (0.2, 0.0), (0.0, 0.3), (0.1, 0.1)):
        for chunk in (1024, 3):
            CASES[f"linear_cross_entropy {reduction} {smoothing} {z_loss} {chunk}"] = Case(
                lambda x, w, b, r=reduction, s=smoothing, z=z_loss, c=chunk: Z.linear_cross_entropy(
                    x, w, TARGET, b, label_smoothing=s, z_loss=z, reduction=r, chunk=c
                ),
                lambda x, w, b, r=reduction, s=smoothing, z=z_loss: torch_head(x, w, b, s, z, r),
                [(7, 5)],
                [(9, 5), (9,)],
            )

MAIN = [name for name in CASES if "cross_entropy" not in name or name.endswith("none 0.1 0.1 3")]


def make(case: Case, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def tensors(shapes):
        return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]

    return tensors(case.inputs), tensors(case.parameters)


def twins(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name: str) -> None:
    case = CASES[name]
    inputs, parameters = make(case)
    others = twins(inputs), twins(parameters)
    y, expected = case.ours(*inputs, *parameters), case.torchs(*others[0], *others[1])
    testing.assert_close(y, expected)
    dy = torch.randn_like(expected)
    y.backward(dy)
    expected.backward(dy)
    for mine, other in zip([*inputs, *parameters], [*others[0], *others[1]], strict=True):
        testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("name", CASES)
def test_deferred_gradients_are_torchs(name: str) -> None:
    """Three microbatches whose W merge; the graph of the last has no edges to the weights."""
    case = CASES[name]
    _, parameters = make(case)
    others = twins(parameters)
    queue = zbkern.WGradQueue()
    for key in range(3):
        inputs, _ = make(case, seed=key + 1)
        copies = twins(inputs)
        expected = case.torchs(*copies, *others)
        dy = torch.randn_like(expected)
        expected.backward(dy)
        with queue.defer(key) if key == 2 else contextlib.nullcontext():
            y = case.ours(*inputs, *parameters)
        with queue.defer(key):
            y.backward(dy)
        for mine, other in zip(inputs, copies, strict=True):
            testing.assert_close(mine.grad, other.grad)
        assert all(parameter.grad is None for parameter in parameters)
    assert queue.pending() > 0 or not parameters
    queue.run()
    for mine, other in zip(parameters, others, strict=True):
        testing.assert_close(mine.grad, other.grad)
    assert queue.bytes == 0


@pytest.mark.parametrize("name", [name for name in MAIN if "padding" not in name])  # whose gradient is not its slope
def test_gradcheck(name: str) -> None:
    case = CASES[name]
    inputs, parameters = make(case)
    assert torch.autograd.gradcheck(case.ours, (*inputs, *parameters), fast_mode=True)


@pytest.mark.parametrize("name", [name for name in MAIN if "relu" not in name and "padding" not in name])
def test_gradgradcheck(name: str) -> None:
    case = CASES[name]
    inputs, parameters = make(case)
    assert torch.autograd.gradgradcheck(case.ours, (*inputs, *parameters), fast_mode=True)


@pytest.mark.parametrize("name", MAIN)
def test_one_frozen_parameter_at_a_time(name: str) -> None:
    case = CASES[name]
    for frozen in range(len(case.parameters)):
        for queue in (zbkern.WGradQueue(), None):
            inputs, parameters = make(case)
            parameters[frozen].requires_grad_(False)
            others = twins(inputs), [p.detach().clone().requires_grad_(p.requires_grad) for p in parameters]
            for _ in range(2):
                expected = case.torchs(*others[0], *others[1])
                y = case.ours(*inputs, *parameters)
                if not y.requires_grad:
                    assert not expected.requires_grad
                    break
                expected.sum().backward()
                if queue is None:
                    y.sum().backward()
                else:
                    with queue.defer():
                        y.sum().backward()
            if queue is not None:
                queue.run()
            for mine, other in zip([*inputs, *parameters], [*others[0], *others[1]], strict=True):
                assert (mine.grad is None) == (other.grad is None)
                if mine.grad is not None:
                    testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAIN)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Against the same op in float64 on the same rounded numbers."""
    case = CASES[name]
    inputs, parameters = ([t.detach().to(dtype).requires_grad_() for t in group] for group in make(case))
    wide = [[t.detach().double().requires_grad_() for t in group] for group in (inputs, parameters)]
    expected = case.torchs(*wide[0], *wide[1])
    queue = zbkern.WGradQueue()
    y = case.ours(*inputs, *parameters)
    with queue.defer():
        y.sum().backward()
    queue.run()
    expected.sum().backward()
    slack = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    testing.assert_close(y, expected, "y", slack)
    for mine, other in zip([*inputs, *parameters], [*wide[0], *wide[1]], strict=True):
        assert mine.grad.dtype == dtype
        if other.grad.abs().max() < 1e-8:
            continue  # a sum of a normalised row: zero but for rounding
        testing.assert_close(mine.grad, other.grad, "gradient", slack)


@pytest.mark.parametrize("name", [n for n in MAIN if CASES[n].inputs and "cross" not in n and "grouped" not in n])
def test_zero_rows(name: str) -> None:
    case = CASES[name]
    _, parameters = make(case)
    inputs = [torch.zeros((0, *shape[-1:]), dtype=torch.float64, requires_grad=True) for shape in case.inputs]
    queue = zbkern.WGradQueue()
    for _ in range(2):
        with queue.defer():
            y = case.ours(*inputs, *parameters)
            y.sum().backward()
    assert y.shape[0] == 0
    queue.run()
    assert all(p.grad.shape == p.shape and not p.grad.any() for p in parameters)


@pytest.mark.parametrize("name", [n for n in MAIN if CASES[n].inputs])
def test_non_contiguous_inputs(name: str) -> None:
    case = CASES[name]
    _, parameters = make(case)
    strided = [
        torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)[..., ::2].requires_grad_() for shape in case.inputs
    ]
    others = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in strided]
    wide = case.torchs(*others, *parameters)
    dy = torch.randn(*wide.shape, 2, dtype=torch.float64)[..., 0] if wide.dim() else torch.ones_like(wide)
    expected = torch.autograd.grad(wide, [*others, *parameters], dy)
    got = torch.autograd.grad(case.ours(*strided, *parameters), [*strided, *parameters], dy)
    for a, b in zip(got, expected, strict=True):
        testing.assert_close(a, b)


@pytest.mark.parametrize("name", MAIN)
def test_no_grad_leaves_no_graph(name: str) -> None:
    case = CASES[name]
    inputs, parameters = make(case)
    with torch.no_grad():
        y = case.ours(*inputs, *parameters)
        testing.assert_close(y, case.torchs(*inputs, *parameters))
    assert y.grad_fn is None
    assert not y.requires_grad


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
@pytest.mark.parametrize("lengths", [None, [4, 1, 6]])
def test_attention(heads: tuple[int, int], causal: bool, window: int | None, lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    query_heads, key_heads = heads
    shape = (2, 7) if lengths is None else (sum(lengths),)
    q = torch.randn(*shape, query_heads, 5, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(*shape, key_heads, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ends = None if lengths is None else [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def by_hand(q, k, v):
        parts = []
        pieces = range(2) if lengths is None else [slice(a, b) for a, b in pairwise(ends)]
        for piece in pieces:
            a = q[piece].transpose(0, 1)
            b, c = (t[piece].transpose(0, 1).repeat_interleave(query_heads // key_heads, 0) for t in (k, v))
            place = torch.arange(a.shape[1])
            distance = place[:, None] - place
            hidden = (distance < 0) | (distance >= (window or 99)) if causal else torch.zeros_like(distance).bool()
            scores = (a @ b.mT / 5**0.5).masked_fill(hidden, float("-inf"))
            parts.append((scores.softmax(-1) @ c).transpose(0, 1))
        return torch.stack(parts) if lengths is None else torch.cat(parts)

    def ours(q, k, v):
        return Z.attention(q, k, v, causal, window, sequences=ends)

    y, expected = ours(q, k, v), by_hand(q, k, v)
    testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy), strict=True):
        testing.assert_close(a, b)


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


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", NORMS)
def test_outputs_of_a_norm_with_residual(name: str, used: tuple[int, ...], deferred: bool) -> None:
    """Each alone and both, with the same tensor as x and residual in a second call; grads do not share memory."""
    torch.manual_seed(0)
    mine = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (3, 5), (5,), (5,))]
    others, queue = twins(mine), zbkern.WGradQueue()
    for function, tensors in zip(NORMS[name], (mine, others), strict=True):
        with queue.defer() if deferred else contextlib.nullcontext():
            x, residual, weight, bias = tensors
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
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (3, 5), (5,), (5,))]
    assert torch.autograd.gradgradcheck(lambda *t: NORMS[name][0](*t)[used], tensors, fast_mode=True)


@pytest.mark.parametrize("name", NORMS)
def test_a_residual_of_another_dtype_is_added_as_torch_does(name: str) -> None:
    torch.manual_seed(0)
    x, residual, weight, bias = torch.randn(3, 5).bfloat16(), torch.randn(3, 5), torch.randn(5), torch.randn(5)
    for a, b in ((x, residual), (residual, x)):
        (y, summed), expected = (function(a, b, weight, bias) for function in NORMS[name])
        assert torch.equal(summed, expected[1])
        testing.assert_close(y, expected[0])


def rotated_by_hand(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """As the transformers library writes it, in modeling_llama and in modeling_gptj, on the first columns."""
    size = 2 * angles.shape[1]
    turning, rest = x[..., :size], x[..., size:]
    if interleaved:
        wide = angles.repeat_interleave(2, -1)[:, None]
        other = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    else:
        wide = torch.cat((angles, angles), -1)[:, None]
        other = torch.cat((-turning[..., size // 2 :], turning[..., : size // 2]), -1)
    return torch.cat((turning * wide.cos() + other * wide.sin(), rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 8), (2, 3, 2, 8), (2, 1, 3, 2, 11)])
@pytest.mark.parametrize("half", [0, 1, 3, 4])
def test_rotary(shape: tuple[int, ...], half: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape[:-2], 2 * shape[-2], shape[-1], dtype=torch.float64)[..., ::2, :].requires_grad_()
    angles = torch.randn(3, half, dtype=torch.float64)

    def ours(x: Tensor) -> Tensor:
        return Z.rotary(x, angles.cos(), angles.sin(), interleaved)

    y, expected = ours(x), rotated_by_hand(x, angles, interleaved)
    testing.assert_close(y, expected)
    dy = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)[..., ::2]
    testing.assert_close(torch.autograd.grad(y, x, dy, retain_graph=True)[0], torch.autograd.grad(expected, x, dy)[0])
    assert torch.autograd.gradcheck(ours, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, x, fast_mode=True)
    # under function transforms it is torch's own operations
    testing.assert_close(torch.func.grad(lambda x: (ours(x) * dy).sum())(x.detach()), torch.autograd.grad(y, x, dy)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_rounds_once(interleaved: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_(), torch.randn(5, 3)
    y = Z.rotary(x, angles.cos(), angles.sin(), interleaved)
    wide = rotated_by_hand(x.detach().float(), angles, interleaved)
    testing.assert_close(y, wide, tolerance=torch.finfo(dtype).eps)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype


def test_attention_with_fewer_queries_than_keys_lines_up_the_ends() -> None:
    q = torch.randn(1, 2, 1, 3, dtype=torch.float64)
    k, v = torch.randn(2, 1, 5, 1, 3, dtype=torch.float64)
    full = Z.attention(torch.cat([torch.zeros(1, 3, 1, 3, dtype=torch.float64), q], 1), k, v, causal=True)
    testing.assert_close(Z.attention(q, k, v, causal=True), full[:, 3:])


def test_logits_are_never_whole_in_memory() -> None:
    """Counted where tensors are made: nothing as large as all logits appears in F, B or W."""
    from torch.utils._python_dispatch import TorchDispatchMode

    rows, features, vocabulary, chunk = 64, 4, 512, 8

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.size = max(self.size, out.numel())
            return out

    x = torch.randn(rows, features, requires_grad=True)
    weight = torch.randn(vocabulary, features, requires_grad=True)
    target = torch.randint(vocabulary, (rows,))
    queue = zbkern.WGradQueue()
    with Largest() as largest:
        loss = Z.linear_cross_entropy(x, weight, target, chunk=chunk)
        with queue.defer():
            loss.backward()
        queue.run()
    assert largest.size <= max(chunk * vocabulary, vocabulary * features)


def test_head_says_so_when_its_weight_changed_before_w() -> None:
    weight = torch.randn(9, 5, requires_grad=True)
    queue = zbkern.WGradQueue()
    with queue.defer():
        Z.linear_cross_entropy(torch.randn(7, 5), weight, TARGET, name="head").backward()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match=r"head.*its weight changed between B and W"):
        queue.run()
    queue.discard()


def t(*shape: int, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, device=device)


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
        (lambda: Z.linear(t(2, 5), t(4, 5), impl="magic"), UnavailableError, "there is no implementation 'magic'"),
        (lambda: Z.linear(t(2, 5), t(4, 5), impl="cuda"), UnavailableError, "linear: impl='cuda' cannot run on cpu"),
        (lambda: Z.gated_mlp(t(2, 5), t(4, 5), t(3, 5), t(5, 4)), ValueError, "up must have gate's shape"),
        (
            lambda: Z.gated_mlp(t(2, 5), t(4, 5), t(4, 5), t(5, 3)),
            ValueError,
            r"down must be \[N, H\] with H=4",
        ),
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
        (
            lambda: Z.embedding(INDICES, t(7, 4), 7),
            ValueError,
            "padding_idx must be within the 7 rows; got 7",
        ),
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
        (lambda: Z.attention(*[t(1, 2, 3, 4)] * 3, key_sequences=[0, 2]), ValueError, "key_sequences needs sequences"),
        (lambda: Z.attention(*[t(1, 2, 3, 4)] * 3, window=2), ValueError, "window must be at least 1 and needs causal"),
        (lambda: Z.attention(*[t(5, 3, 4)] * 3, sequences=[0, 3]), ValueError, "sequences must rise from 0 to the 5"),
        (lambda: Z.rotary(t(5, 4), t(5, 2), t(5, 2)), ValueError, "rotary: x must be .*T, H, D"),
        (lambda: Z.rotary(t(5, 2, 4), t(4, 2), t(5, 2)), ValueError, "rotary: cos must be .* T=5 and R <= 4 like x"),
        (lambda: Z.rotary(t(5, 2, 4), t(5, 2), t(5, 3)), ValueError, r"rotary: sin must be .* got \[5, 3\]"),
        (lambda: Z.rotary(t(5, 2, 4), t(5, 2), t(5, 1)), ValueError, r"sin must have cos's shape \[5, 2\]"),
        (lambda: Z.rotary(t(5, 2, 4), t(5, 2).int(), t(5, 2)), TypeError, "cos must be floating .* got torch.int32"),
        (lambda: Z.rotary(t(5, 2, 4), t(5, 2), t(5, 2).requires_grad_()), TypeError, "one that requires a gradient"),
        (lambda: Z.rotary(t(5, 2, 4), None, t(5, 2)), TypeError, "rotary: cos must be a torch.Tensor; got NoneType"),
        (lambda: Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET[:3]), ValueError, "target must be integers of shape"),
        (lambda: Z.linear_cross_entropy(t(7, 5), t(9, 5), None), TypeError, "target must be a torch.Tensor; got None"),
        (
            lambda: Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET > 0),
            ValueError,
            "must be integers .* got torch.bool",
        ),
        (lambda: Z.linear_cross_entropy(t(7, 5), t(9, 5), TARGET, reduction="max"), ValueError, "reduction must be"),
    ],
)
def test_errors_name_function_argument_expected_and_got(call: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_vmap_and_functional_gradients_see_through() -> None:
    weight, bias = torch.randn(4, 5), torch.randn(4)
    x = torch.randn(6, 3, 5)
    testing.assert_close(torch.vmap(lambda row: Z.linear(row, weight, bias))(x), F.linear(x, weight, bias))
    got = torch.func.grad(lambda w: Z.linear(x, w, bias).square().sum())(weight)
    testing.assert_close(got, torch.func.grad(lambda w: F.linear(x, w, bias).square().sum())(weight))
