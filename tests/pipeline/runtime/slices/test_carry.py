"""Sequences in slices beside what random cases draw: packed rows, compiled and 16-bit chunks, what cannot be sliced."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import needed, one_rank, run_pipelines
from tests.support.counted import counted_time as counted_time
from tests.support.counted import sleep
from zbkern.pipeline import (
    Pipeline,
    PipelineError,
    ProfileOptions,
    check_slices,
    profile,
    schedules,
)
from zbkern.pipeline.runtime.slices.carry import Carry

TOKENS, WIDTH, LETTERS = 24, 16, 29


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(LETTERS, (rows, TOKENS + 1))
    return tokens[:, :-1], tokens[:, 1:], torch.rand(rows, TOKENS, dtype=torch.float64)


class Chunk(nn.Module):
    """A layer of attention. packed: where sequences end in every row."""

    def __init__(self, first: bool, last: bool, packed: Tensor | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH) if first else nn.Identity()
        self.attention = zbkern.nn.Attention(WIDTH, 4, 2, causal=True)
        self.head, self.packed = nn.Linear(WIDTH, LETTERS if last else WIDTH), packed

    def forward(self, x: Tensor, positions: Tensor | None = None, carry: Carry | None = None) -> Tensor:
        x = self.embedding(x)
        if positions is not None:
            x = x + positions[..., None] / TOKENS
        if self.packed is None:
            return self.head(x + self.attention(x, carry=carry))
        return self.head(x + torch.stack([self.attention(row, self.packed, carry=carry) for row in x]))


def make(count: int, packed: Tensor | None = None) -> list[Chunk]:
    torch.manual_seed(0)
    return [Chunk(i == 0, i == count - 1, packed).double() for i in range(count)]


def gradients_of(chunks: list[Chunk], slices: Any) -> list[Tensor]:
    """Of a step; of plain torch on whole sequences without slices."""
    inputs, labels, _ = batch(2)  # a row of each microbatch
    if slices is None:
        loss_fn(chunks[1](chunks[0](inputs)), labels).backward()
    else:
        schedule = schedules.zb_h1(2, 2, slices=slices)
        run_pipelines(schedule, chunks, lambda pipe: pipe.step(*needed(pipe, inputs, labels)), loss_fn)
    return [p.grad for chunk in chunks for p in chunk.parameters() if p.grad is not None]


@pytest.mark.parametrize("change", ["packed", pytest.param("compiled", marks=pytest.mark.slow)])
def test_packed_rows_and_compiled_chunks_cross_slices(change: str) -> None:
    chunks = make(2, torch.tensor([0, 5, 14, 15, TOKENS]) if change == "packed" else None)
    expected = gradients_of(copy.deepcopy(chunks), None)
    for chunk in chunks if change == "compiled" else ():
        zbkern.convert(chunk).compile(backend="aot_eager")
    for gradient, other in zip(gradients_of(chunks, (7, 3, 5, 9)), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-12)


def test_gradients_in_bfloat16_are_as_close_as_those_of_whole_sequences() -> None:
    """What slices leave to each other is summed in float32."""
    expected = gradients_of(make(2), None)

    def error(slices: int) -> float:
        found = gradients_of([zbkern.convert(chunk.bfloat16()) for chunk in make(2)], slices)
        return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))

    assert error(6) < 1.5 * error(1)


def told(outputs: Tensor, labels: Tensor) -> Tensor:
    return 1e-2 * nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum")


told.reduction = "sum"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("loss", "calls"), [(told, 8), (loss_fn, 2)])
def test_how_often_a_loss_is_called(loss: Any, calls: int) -> None:
    """For metrics that it collects: a sum once per slice, any other once per sequence, in each step and evaluation."""
    seen: list[Tensor] = []

    def collect(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.append(outputs.detach())
        return loss(outputs, labels) if torch.is_grad_enabled() else outputs.new_zeros(())

    if loss is told:
        collect.reduction = "sum"  # type: ignore[attr-defined]
    inputs, labels, _ = batch(4)
    with one_rank(make(1)[0], schedules.zb_h1(1, 2, slices=4), collect) as pipe:
        for call in (pipe.evaluate, pipe.evaluate, pipe.step, pipe.step):
            seen.clear()
            call(inputs, labels)
            assert len(seen) == calls
            assert sum(outputs.shape[0] * outputs.shape[1] for outputs in seen) == labels.numel()


def test_an_evaluation_keeps_no_outputs() -> None:
    outputs: list[weakref.ref[Tensor]] = []

    def noting(whole: Tensor, labels: Tensor) -> Tensor:
        outputs.append(weakref.ref(whole))
        return loss_fn(whole, labels)

    with one_rank(make(1)[0], schedules.zb_h1(1, 2, slices=4), noting) as pipe:
        pipe.evaluate(*batch(4)[:2])
        gc.collect()
        assert [reference() for reference in outputs] == [None, None]


class Summary(nn.Module):
    """Returns something of its slice beside what is of its tokens, or something of its own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.linear, self.scale, self.own = zbkern.nn.Linear(1, LETTERS), nn.Parameter(torch.ones(())), own

    def forward(self, x: Tensor, carry: Carry | None = None) -> tuple[Tensor, Tensor]:
        y = self.linear(x[..., None].double())
        return y, self.scale * 1 if self.own else y.square().mean()


@pytest.mark.parametrize("own", [True, False])
def test_outputs_beside_those_of_tokens(own: bool) -> None:
    inputs, labels, _ = batch(2)
    module = Summary(own).double()
    plain, loss = copy.deepcopy(module), lambda outputs, labels: outputs[1] * loss_fn(outputs[0], labels)
    with one_rank(module, schedules.zb_h1(1, 1, slices=3), loss) as pipe:
        if not own:
            with pytest.raises(PipelineError, match=r"it \(Summary\)"):
                pipe.step(inputs, labels)
            return
        found = pipe.step(inputs, labels)
    expected = loss(plain(inputs), labels)
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Forgetful(nn.Module):
    """How a module can fail to keep what `Carry` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(1, LETTERS)

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        x = x[..., None].float()
        if carry is None:
            return self.linear(x)
        if self.how == "appends once" and carry.start:
            carry.append("keys", x, 1) if carry.start > TOKENS // 2 else None
        if self.how == "one key":
            carry.append("keys", x, 1)
            carry.append("keys", 2 * x, 1)
        if self.how == "keeps nothing":
            carry.state("state")
        y = self.linear(x)
        if self.how == "of no output":
            seen = carry.append("keys", y if carry.start else self.linear(x), 1)
            return seen[:, -x.shape[1] :] if carry.start else y
        return y


class Plain(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Mixed(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        return self.part(x)


@pytest.mark.parametrize(
    ("module", "loss", "slices", "length", "message"),
    [
        (Plain(1, 1), loss_fn, 3, TOKENS, "Plain must take the keyword argument carry"),
        (Mixed(nn.BatchNorm1d(4)), loss_fn, 3, TOKENS, "part is a BatchNorm1d, which needs whole sequences"),
        (Forgetful(""), loss_fn, 25, TOKENS, "long enough for 25 slices"),
        (Forgetful(""), told, 3, 1, "targets must have the 24 tokens of a sequence as dimension 1"),
        (Forgetful("appends once"), loss_fn, 3, TOKENS, "every slice must append to 'keys'; slice 0 has not"),
        (Forgetful("one key"), loss_fn, 3, TOKENS, "got 'keys' twice in a slice"),
        (Forgetful("keeps nothing"), loss_fn, 3, TOKENS, "every slice must keep 'state'; slice 0 has not"),
        (Forgetful("of no output"), loss_fn, 3, TOKENS, "what slice 0 has appended under keys got no gradient"),
    ],
)
def test_what_cannot_be_sliced_says_so(module: nn.Module, loss: Any, slices: int, length: int, message: str) -> None:
    inputs, labels, _ = batch(2)
    with (
        pytest.raises((TypeError, ValueError, PipelineError), match=re.escape(message)),
        one_rank(module, schedules.one_f_one_b(1, 2, slices=slices), loss) as pipe,
    ):
        pipe.step(inputs, labels[:, :length])


def test_ranks_that_cut_other_side_inputs() -> None:
    """A rank without the batch takes the sequence's length from its side inputs: another one is found out."""
    chunks = make(2)
    inputs, labels, positions = batch(2)

    def run(pipe: Pipeline) -> None:
        pipe.step(*needed(pipe, inputs, labels), {"bias": torch.zeros(2, 6), "positions": positions})

    for error in run_pipelines(schedules.zb_h1(2, 2, slices=2), chunks, run, loss_fn, keep_errors=True):
        assert "unexpected keyword argument 'bias'" in str(error)


class Slow(nn.Module):
    """Takes 2 ms, 1 ms per token, and 0.5 ms per token and token before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, LETTERS)

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        x = x[..., None].to(self.linear.weight.dtype).requires_grad_()
        seen = x if carry is None else carry.append("seen", x, 1)
        start = 0 if carry is None else carry.start
        sleep(0.002 + 0.001 * x.shape[1] + 0.0005 * x.shape[1] * (2 * start + x.shape[1]))
        return self.linear(x) + 0 * seen.sum()


@pytest.mark.usefixtures("counted_time")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_slices_take_is_measured(dtype: torch.dtype) -> None:
    inputs, labels, _ = batch(2)
    costs = profile([Slow().to(dtype)], [0], loss_fn, inputs, labels, 2, options=ProfileOptions(slices=True))
    flat = costs.per_chunk(1)
    [forward], [attention], [overhead], [carried] = flat.forward, flat.attention_forward, flat.overhead, flat.carried
    assert TOKENS * dtype.itemsize <= carried <= (TOKENS + 16) * dtype.itemsize  # sixteen times a sixteenth, rounded up
    assert flat.carried_gradients == (TOKENS * 4,)  # in fp32
    assert attention == pytest.approx(0.5 * TOKENS**2)
    assert forward == pytest.approx(2 + TOKENS + 0.5 * TOKENS**2)
    assert overhead == pytest.approx(1)  # the mean of 2, and of what a B takes
    assert costs.tokens == TOKENS


class Looking(nn.Module):
    """A module that looks at whole sequences, or loses a gradient, unless it is right."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, zbkern.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        y = self.linear(x)
        if self.how == "mean":
            return y - y.mean(1, keepdim=True)
        state = None if carry is None else carry.state("sum")
        sums = y.cumsum(1) + (0 if state is None else state)
        if carry is not None:
            carry.keep("sum", sums[:, -1:].detach() if self.how == "detached" else sums[:, -1:])
        return sums


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("right", None),
        ("mean", "Looking. computes something else"),
        ("detached", r"it \(Looking\) gives another gradient for what it is given"),
    ],
)
def test_check_slices(how: str, message: str | None) -> None:
    module, x = Looking(how).double(), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    module.linear.weight.grad = torch.ones_like(module.linear.weight)
    if message is None:
        check_slices(module, x, (5, 3, 16))
        check_slices(make(1)[0], batch(2)[0], side={"positions": batch(2)[2]})
    else:
        with pytest.raises(ValueError, match=message):
            check_slices(module, x)
    torch.testing.assert_close(module.linear.weight.grad, torch.ones_like(module.linear.weight))
