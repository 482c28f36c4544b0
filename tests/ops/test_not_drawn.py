"""What no random call of an op meets: numbers at their limits, buffers that are filled again, memory, rounding."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zbkern
from tests.support import op_cases
from zbkern import functional as Z
from zbkern import testing
from zbkern.kernels import reference

TARGET = torch.tensor([1, 4, -100, 0, 4, 8, 2])


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
