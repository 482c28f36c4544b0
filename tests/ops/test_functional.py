"""Every public op, however it is called, has the values and derivatives of torch's own in float64.

What is drawn: the call (tests/support/op_cases.py), then dtype, layout, what is frozen, how many microbatches, whether
and where W waits, where gradients go, a derivative within the loss. What no random call would meet stands below.
The slow run has another seed than the quick one: see `tests/support/seeds.py`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zbkern
from tests.support import op_cases
from tests.support.needs import OLD_TORCH
from tests.support.op_cases import Call
from tests.support.seeds import seed
from zbkern import functional as Z
from zbkern import testing
from zbkern.kernels import reference
from zbkern.kernels.reference import grouped as reference_grouped

TARGET = torch.tensor([1, 4, -100, 0, 4, 8, 2])
SLACK = {torch.float64: None, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass
class Way:
    """How a call is made. autocast: to bfloat16, around the forward of float32. waits: where its W does. constant: the
    inputs without gradients. begun: where gradients are added. penalty: derivatives are a part of the loss. used: the
    outputs that are."""

    dtype: torch.dtype
    autocast: bool
    inputs_layout: str
    gradients_layout: str
    microbatches: int
    waits: str
    merge: bool
    max_bytes: int | None
    frozen: list[bool]
    constant: list[bool]
    begun: str
    penalty: bool
    used: slice
    readable: bool


def draw_way(rng: random.Random, call: Call) -> Way:
    autocast = call.smooth and rng.random() < 0.1
    low = [torch.float32, torch.bfloat16, torch.float16]
    dtype = torch.float32 if autocast else torch.float64 if op_cases.some(rng) or not call.smooth else rng.choice(low)
    frozen = [rng.random() < 0.25 for _ in call.parameters]
    constant = [rng.random() < 0.2 for _ in call.inputs]
    waits = rng.choice(["no queue", "beside a queue", "backward", "forward and backward"])
    return Way(
        dtype,
        autocast,
        rng.choice(["plain", "plain", "every second", "transposed"]),
        rng.choice(["plain", "every second", "one number"]),
        rng.randint(1, 3),
        waits,
        op_cases.some(rng),
        rng.choice([None, None, 0]),
        frozen,
        constant,
        rng.choice(["nothing", "gradients", "main_grad" if "backward" in waits else "nothing"]),
        dtype == torch.float64 and call.twice and bool(call.inputs) and rng.random() < 0.3,
        rng.choice([slice(None), slice(None), slice(1), slice(1, None)]),
        op_cases.some(rng),
    )


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values, elsewhere in memory."""
    if layout == "one number" and tensor.numel():
        return tensor.flatten()[0].expand(tensor.shape)
    if layout == "every second" and tensor.dim():
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.mT.contiguous().mT if layout == "transposed" and tensor.dim() > 1 else tensor


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def outputs(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def loss_of(y: tuple[Tensor, ...], dy: Sequence[Tensor], slopes_of: Sequence[Tensor]) -> Tensor:
    """slopes_of: the inputs whose derivatives are a part of it."""
    loss = sum((a * b.to(a.dtype)).sum() for a, b in zip(y, dy, strict=True))
    if not slopes_of:
        return loss
    slopes = torch.autograd.grad(loss, slopes_of, create_graph=True, allow_unused=True)
    return loss.square() + sum(slope.square().sum() for slope in slopes if slope is not None)


class Trial:
    """A call made in a way, beside torch's in float64."""

    def __init__(self, call: Call, way: Way, seed: int) -> None:
        self.call, self.way = call, way
        self.generator = torch.Generator().manual_seed(seed)
        self.slack, self.scale = (
            (0.05 if way.autocast else SLACK[way.dtype]),
            0.1 if way.dtype == torch.float64 else 1.0,
        )
        self.parameters = [
            self.random(s).requires_grad_(not f) for s, f in zip(call.parameters, way.frozen, strict=True)
        ]
        self.others = copies(self.parameters)
        self.terms: list[list[float]] = [[] for _ in self.others]  # the largest value of each that a gradient adds up
        for ours, other, terms in zip(self.parameters, self.others, self.terms, strict=True):
            if other.requires_grad:
                other.register_hook(lambda term, terms=terms: terms.append(term.abs().max().item()))
            if way.begun == "gradients" and ours.requires_grad:
                ours.grad, other.grad = torch.ones_like(ours), torch.ones_like(other)
            elif way.begun == "main_grad":
                ours.main_grad = torch.zeros_like(ours, dtype=torch.promote_types(way.dtype, torch.float32))

    def random(self, shape: Sequence[int]) -> Tensor:
        """Under autocast of numbers that its casts do not round."""
        values = torch.randn(tuple(shape), dtype=torch.float64, generator=self.generator)
        return (values.bfloat16() if self.way.autocast else values).to(self.way.dtype)

    def compare(self, got: Tensor | None, expected: Tensor | None, name: str, terms: Sequence[float] = ()) -> None:
        """Each of the terms may have an error; their sum may be smaller than that."""
        assert (got is None) == (expected is None), name
        if got is not None:
            testing.assert_close(got, expected, name, self.slack, max(self.scale, sum(terms)))

    def run(self) -> None:
        way, queue = (
            self.way,
            None if self.way.waits == "no queue" else zbkern.WGradQueue(self.way.max_bytes, self.way.merge),
        )
        for key in range(way.microbatches):
            self.microbatch(key, queue)
        if queue is not None:
            for keys in [queue.keys()] if way.merge else reversed(queue.keys()):
                queue.run(keys)
            assert queue.bytes == 0
        for ours, other, terms in zip(self.parameters, self.others, self.terms, strict=True):
            if way.begun == "main_grad":
                assert ours.grad is None
                wanted = torch.zeros_like(other) if other.grad is None else other.grad
                self.compare(ours.main_grad, wanted, "main_grad", terms)
            else:
                self.compare(ours.grad, other.grad, "gradient", terms)
                assert ours.grad is None or ours.grad.dtype == ours.dtype

    def microbatch(self, key: int, queue: zbkern.WGradQueue | None) -> None:
        way = self.way
        inputs = [
            laid_out(self.random(shape), way.inputs_layout).requires_grad_(not constant)
            for shape, constant in zip(self.call.inputs, way.constant, strict=True)
        ]
        others = copies(inputs)

        def scope(where: str) -> Any:
            return queue.defer(key) if queue is not None and where in way.waits else contextlib.nullcontext()

        with scope("forward"), torch.autocast("cpu", torch.bfloat16, enabled=way.autocast):
            y = outputs(self.call.ours(*inputs, *self.parameters))
            with torch.no_grad():
                again = outputs(self.call.ours(*inputs, *self.parameters))
        expected = outputs(self.call.torchs(*others, *self.others))
        for got, without, wanted in zip(y, again, expected, strict=True):
            self.compare(got, wanted, "output")
            assert torch.equal(without, got)
            assert not without.requires_grad
        assert any(t.requires_grad for t in y) == any(t.requires_grad for t in expected)
        if len(y) > 1:
            y, expected = y[way.used], expected[way.used]
        dy = [laid_out(self.random(t.shape), way.gradients_layout) for t in y]
        if not any(t.requires_grad for t in expected):
            return
        before = [p.grad for p in self.parameters]
        loss_of(expected, dy, self.slopes(others, self.others)).backward()
        with scope("backward"):
            loss_of(y, dy, self.slopes(inputs, self.parameters)).backward()
        for ours, other in zip(inputs, others, strict=True):
            self.compare(ours.grad, other.grad, "dx")
        given = [t.grad for t in inputs if t.grad is not None and t.grad.numel()]
        assert len({t.data_ptr() for t in given}) == len(given), "gradients share memory"
        if "backward" in way.waits and way.max_bytes is None and not way.penalty:
            assert all(p.grad is grad for p, grad in zip(self.parameters, before, strict=True)), "W did not wait"

    def slopes(self, inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        """Of which the loss has derivatives; of weights only where theirs do not wait: then they are no part of it."""
        tensors = inputs if "backward" in self.way.waits else [*inputs, *parameters]
        return [t for t in tensors if t.requires_grad] if self.way.penalty else []


def test_every_op_is_drawn() -> None:
    assert {name for name in Z.__all__ if name.islower()} == op_cases.OPS.keys()


@pytest.mark.parametrize("number", [40, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", op_cases.OPS)
def test_values_and_gradients_are_torchs(op: str, number: int) -> None:
    rng = random.Random(seed(1 if number > 40 else 0))
    for trial in range(number):
        call = op_cases.draw(op, rng)
        way = draw_way(rng, call)
        try:
            with mock.patch.object(reference_grouped, "readable", lambda ends, way=way: way.readable):
                Trial(call, way, rng.getrandbits(32)).run()
        except Exception:
            print(f"trial {trial}: {call.said}; {way}")
            raise


@pytest.mark.parametrize("op", [op for op in op_cases.OPS if op not in ("rms_norm", "layer_norm", "rotary")])
def test_autocast_casts_what_an_op_is_given_and_nothing_inside_of_it(op: str) -> None:
    """To the bit; norms and rotary embeddings stay in float32 on a CPU."""
    rng = random.Random(0)
    for _ in range(20):
        call = op_cases.draw(op, rng)
        given = [op_cases.random_tensor(rng, *s).bfloat16().requires_grad_() for s in (*call.inputs, *call.parameters)]
        with torch.autocast("cpu", torch.bfloat16):
            found = outputs(call.ours(*(t.float() for t in given)))
        for got, wanted in zip(found, outputs(call.ours(*given)), strict=True):
            assert torch.equal(got, wanted.to(got.dtype)), call.said


@pytest.mark.parametrize("op", op_cases.OPS)
def test_function_transforms(op: str) -> None:
    """Forward mode and torch.func.grad, of ten calls."""
    if op in ("grouped_linear", "grouped_mlp", "attention") and OLD_TORCH:
        pytest.skip("this torch cannot read counts and ends that are tensors inside of its transforms")
    rng = random.Random(1)
    for _ in range(10):
        call = op_cases.draw(op, rng)
        shapes = (*call.inputs, *call.parameters)
        primals, tangents = (tuple(op_cases.random_tensor(rng, *shape) for shape in shapes) for _ in range(2))
        if call.forward_mode:
            found, expected = (torch.func.jvp(function, primals, tangents) for function in (call.ours, call.torchs))
            for pair in zip(found, expected, strict=True):
                for got, wanted in zip(*map(outputs, pair), strict=True):
                    testing.assert_close(got, wanted, call.said)

        def loss(*given: Tensor, function: Callable[..., Any]) -> Tensor:
            return sum((y * y.sin()).sum() for y in outputs(function(*given)))

        gradients = [
            torch.func.grad(functools.partial(loss, function=function), tuple(range(len(shapes))))(*primals)
            for function in (call.ours, call.torchs)
        ]
        for got, wanted in zip(*gradients, strict=True):
            testing.assert_close(got, wanted, call.said, scale=0.1)  # some are 0


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


@pytest.mark.parametrize("where", ["no queue", "beside a queue", "no_defer", "no_defer, hooked"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_logits_are_computed_once_where_no_w_can_wait(
    monkeypatch: pytest.MonkeyPatch, reduction: str, where: str
) -> None:
    """With a hook, the gradient comes by W all the same."""
    gc.collect()  # queues that other tests have left
    assert not zbkern.wgrad.queue.possible
    later: list[int] = []
    wgrad = reference.cross_entropy_wgrad
    monkeypatch.setattr(reference, "cross_entropy_wgrad", lambda *a: (later.append(1), wgrad(*a))[1])
    queue = None if where == "no queue" else zbkern.WGradQueue()
    never = "no_defer" in where
    x, weight, bias = ours = [torch.randn(shape).double().requires_grad_() for shape in ((7, 5), (9, 5), (9,))]
    theirs = twins(ours)
    if "hooked" in where:
        weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with zbkern.no_defer() if never else contextlib.nullcontext():
        loss = Z.linear_cross_entropy(x, weight, TARGET, bias, reduction, Z.CrossEntropyOptions(chunk=3)).sum()
    for _ in range(2):
        with queue.defer() if never else contextlib.nullcontext():
            (3 * loss).backward(retain_graph=True)
        (3 * F.cross_entropy(F.linear(*theirs), TARGET, reduction=reduction).sum()).backward()
    for got, expected in zip(ours, theirs, strict=True):
        testing.assert_close(got.grad, expected.grad)
    assert len(later) == (0 if where in ("no queue", "no_defer") and reduction != "none" else 2)
    assert queue is None or queue.pending() == 0


def extreme() -> tuple[Tensor, ...]:
    """exp of any of these logits is 0 or infinite; one word of the vocabulary is masked out by its bias."""
    weight, bias = torch.full((9, 2), -100.0), torch.zeros(9)
    weight[3], bias[8] = 100, -torch.inf
    return torch.tensor([[1.0, 2.0], [-3.0, 1.0], [50.0, 50.0]]), weight, torch.tensor([0, 3, 3]), bias


def head(target: list[int], dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    return torch.randn(3, 5), torch.randn(9, 5), torch.tensor(target, dtype=dtype), torch.randn(9)


HEADS: dict[str, tuple[Callable[[], tuple[Tensor, ...]], dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "extreme logits": (extreme, {"reduction": "sum"}, torch.sum),
    # The mean of nothing is nan, and its gradients are zeros
    **{f"all labels ignored, {r}": (lambda: head([-100] * 3), {"reduction": r}, torch.sum) for r in ("mean", "none")},
    # The square root of a loss of 0 has an infinite gradient; an ignored row gets zeros
    "infinite gradients": (lambda: head([1, -100, 8]), {"reduction": "none"}, lambda y: y.sqrt().sum()),
    **{f"{k}": (lambda k=k: head([1, 8, 0], k), {}, torch.sum) for k in (torch.uint8, torch.int16, torch.int32)},
}


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_not_drawn(name: str, queued: bool) -> None:
    make, options, of_loss = HEADS[name]
    x, weight, target, bias = make()
    ours, smoothing = [t.double().requires_grad_() for t in (x, weight, bias)], 0.1 * ("ignored" in name)
    theirs, more = twins(ours), Z.CrossEntropyOptions(chunk=2, label_smoothing=smoothing)
    with deferral(queued):
        loss = Z.linear_cross_entropy(*ours[:2], target, ours[2], options=more, **options)
        of_loss(loss).backward()
    expected = F.cross_entropy(F.linear(*theirs), target.long(), label_smoothing=smoothing, **options)
    of_loss(expected).backward()
    torch.testing.assert_close(loss, expected, equal_nan=True)
    for mine, other in zip(ours, theirs, strict=True):
        testing.assert_close(mine.grad, other.grad)


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


def test_queries_that_see_no_key_are_zero_beside_a_sequence_of_more_keys() -> None:
    """Few draws are such: all keys together are as many as all queries, and torch's own core takes none of it."""
    q, k, v = (torch.randn(rows, 4, 6).double().requires_grad_() for rows in (5, 6, 6))
    y = Z.attention(q, k, v, True, Z.AttentionOptions(), [0, 4, 5], [0, 2, 6])
    y.sum().backward()
    for seen in (y, q.grad):
        assert not seen[:2].any()
        assert seen[3:].isfinite().all()
    assert k.grad.isfinite().all()


def test_the_backward_of_a_pack_writes_no_more_for_more_sequences() -> None:
    """Counted where tensors are made: numbers for each sequence, and none of them for the tokens of others."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Written(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            self.numbers += sum(each.numel() for each in (out if isinstance(out, (tuple, list)) else [out]))
            return out

    def written(sequences: int) -> int:
        qkv = torch.randn(3, 64, 2, 8, requires_grad=True)
        y = Z.attention(*qkv.unbind(), True, Z.AttentionOptions(), [*range(0, 65, 64 // sequences)])
        with Written() as found:
            y.sum().backward()
        return found.numbers

    assert written(32) <= 1.1 * written(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_rounds_once(interleaved: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(2, 5, 3, 8).to(dtype).requires_grad_(), torch.randn(5, 3)
    y = Z.rotary(x, angles.cos(), angles.sin(), interleaved)
    wide = op_cases.rotated_by_hand(x.detach().float(), angles, interleaved)
    testing.assert_close(y, wide, tolerance=torch.finfo(dtype).eps)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype


@pytest.mark.parametrize("function", [Z.rms_norm, Z.layer_norm])
def test_the_residual_of_a_norm_may_be_its_input_or_of_another_dtype(function: Callable[..., Any]) -> None:
    """The sum is torch's, to the bit."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 5).bfloat16(), torch.randn(3, 5), torch.randn(5)
    for a, b in ((x, residual), (residual, x), (residual, residual)):
        a, b = a.clone().requires_grad_(), b if b is not a else None
        y, summed = function(a, weight, residual=a if b is None else b)
        assert torch.equal(summed, a + (a if b is None else b))
        testing.assert_close(y, function(summed, weight))
        y.sum().backward(retain_graph=True)
        wide = a.detach().clone().requires_grad_()
        function(wide + (wide if b is None else b), weight).sum().backward()
        testing.assert_close(a.grad, wide.grad, scale=1.0)
