"""Every public op against torch's own, in float64: values, gradients at once and deferred, second derivatives.

Attention and rotary, which torch writes in other ways, are in test_functional_attention.py.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zbkern
from zbkern import functional as Z
from zbkern import testing
from zbkern.kernels import reference


@dataclass
class Case:
    """ours and torchs take (inputs..., parameters...); both lists are made from shapes in float64."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    inputs: list[tuple[int, ...]]
    parameters: list[tuple[int, ...]]


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


def torch_experts(interleaved=False, gpt_oss=False):
    """By slicing, as the transformers library does; gpt-oss's gate has limits, here low enough to be reached."""

    def run(x, gate_up, down, *biases):
        parts = []
        for e, rows in enumerate(x.split(COUNTS)):
            z = F.linear(rows, gate_up[e], biases[0][e] if biases else None)
            gate, up = (z[..., ::2], z[..., 1::2]) if interleaved else z.chunk(2, -1)
            if gpt_oss:
                gate, up = gate.clamp(min=None, max=0.5), up.clamp(min=-0.5, max=0.5)
                h = (up + 1) * gate * torch.sigmoid(gate * 1.702)
            else:
                h = F.silu(gate) * up
            parts.append(F.linear(h, down[e], biases[1][e] if biases else None))
        return torch.cat(parts)

    return run


GPT_OSS = Z.GateOptions(interleaved=True, limit=0.5, alpha=1.702, offset=1.0)


def torch_head(x, weight, bias, smoothing=0.0, z_loss=0.0, reduction="mean", softcap=None):
    z = F.linear(x, weight, bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, TARGET, label_smoothing=smoothing, reduction=reduction)
    squares = z_loss * z.logsumexp(1).square() * (TARGET != -100)
    if reduction == "mean":
        return loss + squares.sum() / (TARGET != -100).sum()
    return loss + (squares.sum() if reduction == "sum" else squares)


def torch_log_probs(x, weight, bias, softcap=None):
    z = F.linear(x, weight, bias)
    log_p = (z if softcap is None else softcap * torch.tanh(z / softcap)).log_softmax(1)
    chosen = log_p.gather(1, TARGET.clamp(min=0)[:, None]).squeeze(1)
    return torch.stack([chosen, -(log_p.exp() * log_p).sum(1)]) * (TARGET != -100)


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
    "grouped_linear": Case(
        lambda x, w, b: Z.grouped_linear(x, w, COUNTS, b), torch_grouped, [(5, 4)], [(3, 2, 4), (3, 2)]
    ),
    "grouped_linear transposed": Case(
        lambda x, w, b: Z.grouped_linear(x, w, COUNTS, b, transposed=True),
        lambda x, w, b: torch_grouped(x, w.mT, b),
        [(5, 4)],
        [(3, 4, 2), (3, 2)],
    ),
    "grouped_mlp": Case(
        lambda x, a, b: Z.grouped_mlp(x, a, b, COUNTS), torch_experts(), [(5, 4)], [(3, 12, 4), (3, 2, 6)]
    ),
    "grouped_mlp as gpt-oss's": Case(
        lambda x, a, b, c, d: Z.grouped_mlp(x, a, b, COUNTS, (c, d), GPT_OSS, transposed=True),
        lambda x, a, b, c, d: torch_experts(interleaved=True, gpt_oss=True)(x, a.mT, b.mT, c, d),
        [(5, 4)],
        [(3, 4, 12), (3, 6, 2), (3, 12), (3, 2)],
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
    for smoothing, z_loss, softcap in ((0.0, 0.0, None), (0.2, 0.0, 1.5), (0.0, 0.3, None), (0.1, 0.1, 1.5)):
        for chunk in (1024, 3):
            options = Z.CrossEntropyOptions(-100, smoothing, z_loss, chunk, softcap)
            CASES[f"linear_cross_entropy {reduction} {smoothing} {z_loss} {chunk}"] = Case(
                lambda x, w, b, r=reduction, o=options: Z.linear_cross_entropy(x, w, TARGET, b, r, o),
                lambda x, w, b, r=reduction, s=smoothing, z=z_loss, c=softcap: torch_head(x, w, b, s, z, r, c),
                [(7, 5)],
                [(9, 5), (9,)],
            )
for softcap in (None, 1.5):
    options = Z.CrossEntropyOptions(chunk=3, softcap=softcap)
    CASES[f"linear_log_probs {softcap}"] = Case(
        lambda x, w, b, o=options: torch.stack(Z.linear_log_probs(x, w, TARGET, b, o)),
        lambda x, w, b, c=softcap: torch_log_probs(x, w, b, c),
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


@contextlib.contextmanager
def deferral(queued: bool) -> Iterator[None]:
    """W of what is within runs at its end; where it is not queued, no queue exists."""
    queue = zbkern.WGradQueue() if queued else None
    with contextlib.nullcontext() if queue is None else queue.defer():
        yield
    if queue is not None:
        queue.run()


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_torchs(name: str) -> None:
    case = CASES[name]
    inputs, parameters = make(case)
    others = twins(inputs), twins(parameters)
    y, expected = case.ours(*inputs, *parameters), case.torchs(*others[0], *others[1])
    testing.assert_close(y, expected)
    with torch.no_grad():
        without = case.ours(*inputs, *parameters)
    assert torch.equal(without, y)
    assert not without.requires_grad
    dy = torch.randn_like(expected)
    y.backward(dy)
    expected.backward(dy)
    for mine, other in zip([*inputs, *parameters], [*others[0], *others[1]], strict=True):
        testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("name", [name for name in MAIN if "padding" not in name])  # a row without its gradient
def test_forward_mode_derivatives(name: str) -> None:
    case = CASES[name]
    inputs, parameters = make(case)
    assert torch.autograd.gradcheck(case.ours, (*inputs, *parameters), check_forward_ad=True, fast_mode=True)


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


@pytest.mark.parametrize("name", [name for name in MAIN if "relu" not in name and "padding" not in name])
def test_gradgradcheck(name: str) -> None:
    case = CASES[name]
    inputs, parameters = make(case)
    assert torch.autograd.gradgradcheck(case.ours, (*inputs, *parameters), fast_mode=True)


@pytest.mark.parametrize("name", MAIN)
def test_one_frozen_parameter_at_a_time(name: str) -> None:
    case = CASES[name]
    for frozen in range(len(case.parameters)):
        for queued in (True, False):
            inputs, parameters = make(case)
            parameters[frozen].requires_grad_(False)
            others = twins(inputs), [p.detach().clone().requires_grad_(p.requires_grad) for p in parameters]
            for _ in range(2):
                expected = case.torchs(*others[0], *others[1])
                y = case.ours(*inputs, *parameters)
                assert y.requires_grad == expected.requires_grad
                if y.requires_grad:
                    expected.sum().backward()
                    with deferral(queued):
                        y.sum().backward()
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
    options = Z.CrossEntropyOptions(chunk=chunk)
    with Largest() as largest:
        loss = Z.linear_cross_entropy(x, weight, target, options=options)
        loss = loss + sum(Z.linear_log_probs(x, weight, target, options=options)).sum()
        with queue.defer():
            loss.backward()
        queue.run()
    assert largest.size <= max(chunk * vocabulary, vocabulary * features)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_logits_are_computed_once_where_no_w_can_wait(
    monkeypatch: pytest.MonkeyPatch, reduction: str, queued: bool
) -> None:
    gc.collect()  # queues that other tests have left
    assert not zbkern.wgrad.queue.possible
    later: list[int] = []
    wgrad = reference.cross_entropy_wgrad
    monkeypatch.setattr(reference, "cross_entropy_wgrad", lambda *a: (later.append(1), wgrad(*a))[1])
    queue = zbkern.WGradQueue() if queued else None
    x, weight, bias = ours = [torch.randn(shape).double().requires_grad_() for shape in ((7, 5), (9, 5), (9,))]
    theirs = twins(ours)
    loss = Z.linear_cross_entropy(x, weight, TARGET, bias, reduction, Z.CrossEntropyOptions(chunk=3)).sum()
    for _ in range(2):
        (3 * loss).backward(retain_graph=True)
        (3 * F.cross_entropy(F.linear(*theirs), TARGET, reduction=reduction).sum()).backward()
    for got, expected in zip(ours, theirs, strict=True):
        testing.assert_close(got.grad, expected.grad)
    assert len(later) == (2 if queued or reduction == "none" else 0)
    del queue


@pytest.mark.parametrize("queued", [False, True])
def test_head_of_extreme_logits(queued: bool) -> None:
    """exp of any of these logits is 0 or infinite; one word of the vocabulary is masked out by its bias."""
    weight = torch.full((9, 2), -100.0)
    weight[3] = 100
    weight = weight.requires_grad_()
    bias = torch.zeros(9)
    bias[8] = -torch.inf
    x = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [50.0, 50.0]], requires_grad=True)
    target = torch.tensor([0, 3, 3])
    expected = F.cross_entropy(F.linear(x, weight, bias), target, reduction="none")
    wanted = torch.autograd.grad(expected.sum(), (x, weight))
    with deferral(queued):
        loss = Z.linear_cross_entropy(x, weight, target, bias, "sum", Z.CrossEntropyOptions(chunk=2))
        loss.backward()
    testing.assert_close(loss, expected.sum())
    testing.assert_close(x.grad, wanted[0])
    testing.assert_close(weight.grad, wanted[1])


@pytest.mark.parametrize("queued", [False, True])
def test_log_probs_of_words_that_are_masked_out(queued: bool) -> None:
    """Words whose logits are -inf have no probability, no entropy and no gradient."""
    bias = torch.zeros(9)
    bias[6:] = -torch.inf
    ours, target = [torch.randn(shape, requires_grad=True) for shape in ((3, 5), (9, 5))], torch.tensor([1, -100, 5])
    theirs = twins(ours)
    with deferral(queued):
        log_probs, entropy = Z.linear_log_probs(*ours, target, bias)
        (log_probs.sum() + 3 * entropy.sum()).backward()
    log_p = F.linear(theirs[0], theirs[1][:6]).log_softmax(1)[[0, 2]]
    chosen, expected = log_p.gather(1, target[[0, 2], None]), -(log_p.exp() * log_p).sum(1)
    (chosen.sum() + 3 * expected.sum()).backward()
    testing.assert_close(log_probs[[0, 2]], chosen.squeeze(1))
    testing.assert_close(entropy, torch.stack([expected[0], torch.zeros(()), expected[1]]))
    for mine, other in zip(ours, theirs, strict=True):
        testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_head_whose_labels_are_all_ignored(reduction: str, queued: bool) -> None:
    """As torch's: the mean of nothing is nan, and its gradients are zeros."""
    ours = [torch.randn(shape, requires_grad=True) for shape in ((3, 5), (9, 5), (9,))]
    theirs, target = twins(ours), torch.full((3,), -100)
    options = Z.CrossEntropyOptions(label_smoothing=0.1)
    with deferral(queued):
        loss = Z.linear_cross_entropy(ours[0], ours[1], target, ours[2], reduction, options)
        loss.sum().backward()
    expected = F.cross_entropy(F.linear(*theirs), target, label_smoothing=0.1, reduction=reduction)
    expected.sum().backward()
    assert torch.equal(loss.isnan(), expected.isnan())
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("queued", [False, True])
def test_head_whose_ignored_labels_have_infinite_gradients(queued: bool) -> None:
    """The square root of a loss of 0 has one; as in torch, the row gets zeros."""
    ours = [torch.randn(shape).double().requires_grad_() for shape in ((3, 5), (9, 5), (9,))]
    theirs, target = twins(ours), torch.tensor([1, -100, 8])
    with deferral(queued):
        Z.linear_cross_entropy(ours[0], ours[1], target, ours[2], "none").sqrt().sum().backward()
    F.cross_entropy(F.linear(*theirs), target, reduction="none").sqrt().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_head_with_labels_of_any_integers(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 5).double().requires_grad_(), torch.randn(9, 5).double().requires_grad_()
    target = torch.tensor([1, 8, 0])

    def gradients(loss: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(loss, (x, weight), create_graph=True)
        return [loss, *first, *torch.autograd.grad(first[0].square().sum(), (x, weight))]

    expected = gradients(F.cross_entropy(F.linear(x, weight), target))
    for mine, other in zip(gradients(Z.linear_cross_entropy(x, weight, target.to(dtype))), expected, strict=True):
        testing.assert_close(mine, other)


def test_the_default_device_changes_nothing() -> None:
    x, weight = torch.randn(251, 5).double(), torch.randn(2, 3, 5).double()
    ours = [weight.clone().requires_grad_(), torch.zeros(2, 3).double().requires_grad_()]
    theirs = twins(ours)
    with torch.device("meta"):
        for _ in range(2):  # the second adds to gradients
            with deferral(True):
                Z.grouped_linear(x, ours[0], [0, 251], ours[1]).square().sum().backward()
        with pytest.raises(ValueError, match=r"add up to 251 rows; got \[0, 250\]"):
            Z.grouped_linear(x, weight, [0, 250])
    for _ in range(2):
        F.linear(x, theirs[0][1], theirs[1][1]).square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        testing.assert_close(mine.grad, other.grad)


def packed(w: Tensor, ends: Tensor) -> Tensor:
    q = torch.ones(4, 1, 1)
    return Z.attention(q, q, q, True, cu_seqlens=ends, impl="torch", sinks=w)


INTS = {"dtype": torch.int32}
BUFFERS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], Tensor]] = {
    "indices": (lambda w, i: Z.embedding(i, w), (9, 5), torch.tensor([1, 3, 3])),
    "ends": (lambda w, e: Z.grouped_linear(torch.ones(4, 5), w, offsets=e), (3, 2, 5), torch.tensor([1, 3, 4], **INTS)),
    "labels": (lambda w, t: Z.linear_cross_entropy(torch.ones(3, 5), w, t), (9, 5), torch.tensor([1, 3, 0])),
    "sequences": (packed, (1,), torch.tensor([0, 1, 4], **INTS)),
}


@pytest.mark.parametrize("when", ["before B", "before W"])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_is_filled_again_is_an_error(name: str, when: str) -> None:
    """Indices, ends and labels are kept as they are: between F and B autograd sees their versions, then the queue."""
    function, shape, values = BUFFERS[name]
    weight, queue, buffer = torch.randn(shape, requires_grad=True), zbkern.WGradQueue(), values.clone()
    with queue.defer():
        y = function(weight, buffer)
        if when == "before B":
            buffer.copy_(values)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
            return
        y.sum().backward()
    buffer.copy_(values)
    if name == "sequences":  # which W does not read
        queue.run()
        return
    with pytest.raises(RuntimeError, match="modified in place between B and W"):
        queue.run()
    queue.discard()


def test_numbers_of_a_library_without_versions_are_copied() -> None:
    ends = numpy.array([1, 3, 4], dtype=numpy.int32)
    x, weight = torch.randn(4, 5, requires_grad=True), torch.randn(3, 2, 5)
    y = Z.grouped_linear(x, weight, offsets=ends)
    expected = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    ends[:] = 4
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_inputs_of_a_linear(layout: str) -> None:
    """As torch has them: a bag of words, say."""
    words, queue = torch.eye(5).repeat(2, 1), zbkern.WGradQueue()
    words = words.to_sparse() if layout == "coo" else words.to_sparse_csr()
    ours, torchs = ((torch.ones(4, 5).requires_grad_(), torch.ones(4).requires_grad_()) for _ in range(2))
    expected = F.linear(words, *torchs)
    expected.square().sum().backward()
    with queue.defer():
        found = Z.linear(words, *ours)
        found.square().sum().backward()
    queue.run()
    testing.assert_close(found, expected)
    for own, other in zip(ours, torchs, strict=True):
        testing.assert_close(own.grad, other.grad)
