"""Sequences in slices: every schedule gives the loss and the gradients of whole sequences."""

from __future__ import annotations

import copy
import gc
import re
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zbkern
from tests.support.chunks import needed, one_rank, run_pipelines
from zbkern.pipeline import (
    Action,
    Optimizer,
    Pipeline,
    PipelineError,
    ProfileOptions,
    Schedule,
    StepOptions,
    check_slices,
    profile,
    schedules,
    token_loss,
    token_targets,
)
from zbkern.pipeline.runtime.slices.carry import Carry

TOKENS, WIDTH, LETTERS = 24, 16, 29


class Block(nn.Module):
    """A layer of attention and a gated sum over all tokens so far, as of a recurrent layer."""

    def __init__(self, window: int | None, packed: Tensor | None, dropout: float) -> None:
        super().__init__()
        options = zbkern.functional.AttentionOptions(window=window)
        self.attention = zbkern.nn.Attention(WIDTH, 4, 2, causal=True, options=options)
        self.up, self.down = zbkern.nn.Linear(WIDTH, 2 * WIDTH), zbkern.nn.Linear(2 * WIDTH, WIDTH)
        self.packed, self.dropout = packed, nn.Dropout(dropout)

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        if self.packed is None:
            y = self.attention(x, carry=carry)
        else:
            y = torch.stack([self.attention(row, self.packed, carry=carry) for row in x])
        x = x + self.dropout(y)
        state = None if carry is None else carry.state(self)
        sums = x.tanh().cumsum(1) + (0 if state is None else state)
        if carry is not None:
            carry.keep(self, sums[:, -1:])
        return x + self.down(nn.functional.silu(self.up(x + 0.1 * sums)))


class Chunk(nn.Module):
    def __init__(self, first: bool, last: bool, *args: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH) if first else nn.Identity()
        self.block = Block(*args)
        self.head = zbkern.nn.Linear(WIDTH, LETTERS) if last else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor | None = None, carry: Carry | None = None) -> Tensor:
        x = self.embedding(x)
        if positions is not None:
            assert positions.shape == x.shape[:2]
            x = x + positions[..., None] / TOKENS
        return self.head(self.block(x, carry=carry))


def make(count: int, window: int | None = None, packed: Tensor | None = None, dropout: float = 0.0) -> list[Chunk]:
    torch.manual_seed(0)
    return [Chunk(i == 0, i == count - 1, window, packed, dropout).double() for i in range(count)]


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(LETTERS, (rows, TOKENS + 1))
    return tokens[:, :-1], tokens[:, 1:], torch.rand(rows, TOKENS, dtype=torch.float64)


def whole(
    chunks: Sequence[nn.Module], loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Any, side: Any
) -> Tensor:
    """The loss of plain torch on whole sequences, and the gradients in copies of the chunks."""
    for chunk in chunks:
        x = chunk(x, side)
    found = loss(x, y)
    found.backward()
    return found.detach()


def check(
    schedule: Schedule, chunks: list[Chunk], rows: int = 4, side: bool = True, exact: float = 1e-12, **options: Any
) -> None:
    """A step and an evaluation against plain torch."""
    reference = copy.deepcopy(chunks)
    inputs, labels, positions = batch(rows)
    expected = whole(reference, loss_fn, inputs, labels, positions if side else None)

    def run(pipe: Pipeline) -> list[Tensor | None]:
        arguments = *needed(pipe, inputs, labels), {"positions": positions} if side else None
        found = [pipe.step(*arguments), pipe.evaluate(*arguments)]
        assert not any(stage.carries.nbytes for stage in pipe.stages.values())
        return found

    for losses in run_pipelines(schedule, chunks, run, loss_fn, **options):
        for loss in losses:
            if loss is not None:
                torch.testing.assert_close(loss, expected, rtol=exact, atol=0)
    for chunk, other in zip(chunks, reference, strict=True):
        for name, parameter in chunk.named_parameters():
            gradient = other.get_parameter(name).grad
            assert gradient is not None
            assert parameter.grad is not None
            difference = (parameter.grad - gradient).abs().max() / gradient.abs().max()
            assert difference < exact, (name, difference)


@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_schedule(name: str) -> None:
    schedule = getattr(schedules, name)(2, 2, slices=(3, 2, 5, 2))
    check(schedule, make(len(schedule.placement)))


@pytest.mark.parametrize(
    ("ranks", "slices", "window", "fill"),
    [(1, 8, None, "planned"), (2, (1, 23), 5, "eager"), (4, 3, 40, "planned"), (4, (3, 1, 1, 7), 1, "eager")],
)
def test_ranks_windows_and_fill(ranks: int, slices: Any, window: int | None, fill: str) -> None:
    check(schedules.zb_h1(ranks, 4, slices=slices), make(ranks, window), fill=fill)


def test_packed_rows_cross_slices() -> None:
    chunks = make(2, packed=torch.tensor([0, 5, 14, 15, TOKENS]))
    check(schedules.zb_h1(2, 3, slices=(7, 3, 5, 9)), chunks, rows=3)


def saving(kinds: str) -> Schedule:
    """zb_h1 on two ranks whose first chunk is recomputed (R), or goes to the host after F, or after B (O, L)."""
    plain = schedules.zb_h1(2, 2, slices=3)
    first: list[Action] = []
    for action in plain.actions[0]:
        back = action._replace(part=None)
        if action.kind == "B" and "R" in kinds:
            first.append(back._replace(kind="R"))
        if action.kind == "B" and "O" in kinds:
            first.append(back._replace(kind="L"))
        if action.kind == "W" and "P" in kinds:
            first += [back._replace(kind="O"), back._replace(kind="L")]
        first.append(action)
        if action.kind == "F" and "O" in kinds:
            first.append(back._replace(kind="O"))
    return Schedule.build([first, plain.actions[1]], plain.placement, plain.microbatches, slices=plain.slices)


@pytest.mark.parametrize(
    ("kinds", "recompute"), [("R", ()), ("R", (zbkern.nn.Attention,)), ("R", (Block,)), ("O", ()), ("P", ())]
)
def test_recomputed_and_offloaded(kinds: str, recompute: Any) -> None:
    check(saving(kinds), make(2, window=7), options=StepOptions(recompute=recompute, copy_size=64))


def train(
    schedule: Schedule, chunks: list[Chunk], loss: Any, batches: Sequence[tuple[Any, Any]], **options: Any
) -> Any:
    """The losses of steps with an Optimizer, whose step is validated in the next one."""

    def run(pipe: Pipeline) -> list[Tensor | None]:
        optimizer = Optimizer(torch.optim.SGD(chunks[pipe.rank].parameters(), lr=0.1), pipe, **options)
        losses = []
        for inputs, targets in batches:
            losses.append(pipe.step(inputs, targets))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return run_pipelines(schedule, chunks, run, loss)[-1]


def test_optimizer_rolls_back_forwards_of_slices() -> None:
    """Clipping changes every step after slices of the next one have begun."""
    chunks = make(2)
    model = nn.Sequential(*copy.deepcopy(chunks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(tokens.roll(step, 1), labels.roll(step, 1)) for step in range(3) for tokens, labels, _ in [batch(4)]]
    expected = []
    for inputs, labels in batches:
        expected.append(loss_fn(model(inputs), labels))
        optimizer.zero_grad()
        expected[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    found = train(schedules.zb_h1(2, 4, slices=4), chunks, loss_fn, batches, max_norm=1e-2)
    torch.testing.assert_close(
        torch.stack(found), torch.stack(expected).detach(), rtol=1e-9, atol=0
    )  # the norm is fp32


def nll(outputs: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), **how)


def told(outputs: Tensor, labels: Tensor) -> Tensor:
    return 1e-2 * nll(outputs, labels, reduction="sum")


told.reduction = "sum"  # type: ignore[attr-defined]


def mean_of_rows(outputs: Tensor, labels: Tensor) -> Tensor:
    each = nll(outputs, labels, reduction="none").view_as(labels)
    return (each.sum(1) / (labels != -100).sum(1)).mean()


def clipped_ratio(outputs: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """One ratio per sequence of its probability now to that under an older policy, and an advantage."""
    labels, advantages = target
    now = -nll(outputs, labels, reduction="none").view_as(labels).mean(1)
    ratio = torch.exp(now + 3.3)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def sequence_labels(outputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.mean(1), target)


LOSSES: dict[str, Any] = {
    "mean": loss_fn,
    "mean with another padding": lambda outputs, labels: nll(outputs, labels.clamp(min=0), ignore_index=0),
    "class weights": lambda outputs, labels: nll(outputs, labels, weight=torch.linspace(0.1, 3, LETTERS).double()),
    "told sum": told,
    "sum": lambda outputs, labels: 1e-2 * nll(outputs, labels, reduction="sum"),
    "mean of rows": mean_of_rows,
    "clipped ratio": clipped_ratio,
    "shifted inside": lambda outputs, labels: loss_fn(outputs[:, :-1], labels[:, 1:]),
    "a label per sequence": sequence_labels,
    "token_loss": token_loss,
}


@pytest.mark.parametrize("saves", ["", "R", "O"])
@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_is_that_of_whole_sequences(name: str, saves: str) -> None:
    """With padding that leaves a row few labels and slices none. Several steps, after which outputs are others."""
    schedule, chunks = saving(saves) if saves else schedules.zb_h1(2, 2, slices=4), make(2)
    inputs, labels, _ = batch(4)
    labels = labels.clone()
    labels[:2, 9:] = labels[2, 3:] = labels[3, 14:] = -100
    loss, model = LOSSES[name], nn.ModuleList(copy.deepcopy(chunks))
    targets: Any = {
        "clipped ratio": (labels, torch.tensor([1.0, -2.0, 0.5, 3.0]).double()),
        "a label per sequence": labels[:, 0],
        "token_loss": token_targets(labels, 2, shift=False),
    }.get(name, labels)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model[1](model[0](inputs))
        if loss is token_loss:
            expected.append(loss_fn(outputs, labels))
        else:
            halves = [pytree.tree_map(lambda each, h=half: each[h : h + 2], (outputs, targets)) for half in (0, 2)]
            expected.append(sum(loss(*half) for half in halves) / 2)
        expected[-1].backward()
        optimizer.step()
    found = train(schedule, chunks, loss, [(inputs, targets)] * 3)
    exact = 1e-6 if loss is token_loss else 1e-11  # which computes in float32
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(expected).detach(), rtol=exact, atol=0)


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


def test_a_model_without_a_trained_weight() -> None:
    inputs, labels, _ = batch(4)
    (chunk,) = make(1)
    with one_rank(chunk.requires_grad_(False), schedules.zb_h1(1, 2, slices=4), loss_fn) as pipe:
        torch.testing.assert_close(pipe.step(inputs, labels), loss_fn(chunk(inputs), labels))


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
            with pytest.raises(PipelineError, match="tokens of a slice as dimension 1 for a loss of whole sequences"):
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
        time.sleep(0.002 + 0.001 * x.shape[1] + 0.0005 * x.shape[1] * (2 * start + x.shape[1]))
        return self.linear(x) + 0 * seen.sum()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_slices_take_is_measured(dtype: torch.dtype) -> None:
    inputs, labels, _ = batch(2)
    costs = profile([Slow().to(dtype)], [0], loss_fn, inputs, labels, 2, options=ProfileOptions(slices=True))
    flat = costs.per_chunk(1)
    [forward], [attention], [carried] = flat.forward, flat.attention_forward, flat.carried
    assert TOKENS * dtype.itemsize <= carried <= (TOKENS + 2) * dtype.itemsize
    assert flat.carried_gradients == (TOKENS * 4,)  # in fp32
    assert attention == pytest.approx(0.5 * TOKENS**2, rel=0.1)
    assert forward == pytest.approx(2 + TOKENS + 0.5 * TOKENS**2, rel=0.1)
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
        ("detached", "the gradient of linear.weight in slices is off"),
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
