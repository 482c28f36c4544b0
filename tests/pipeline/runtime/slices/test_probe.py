"""The comparison that the first forward of a chunk in slices makes: what it finds, and what it lets alone."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbkern
from tests.support.chunks import one_rank, results_on_threads
from zbkern.pipeline import Pipeline, PipelineError, check_slices, schedules
from zbkern.pipeline.runtime.slices import probe
from zbkern.pipeline.runtime.slices.carry import Carry
from zbkern.pipeline.runtime.slices.probe_inputs import Call, Draw, drawn_inputs
from zbkern.pipeline.transport.local import LocalTransport

WIDTH, TOKENS, ROWS = 8, 48, 2
DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]


class Unprobed:
    """In the place of `Probes`, which lets everything through."""

    def begin(self) -> None:
        pass

    def check(self, run: Any, inputs: Any, side: Any) -> None:
        pass

    def explain(self, error: Exception, run: Any, inputs: Any, side: Any) -> None:
        pass


class Causal(nn.Module):
    """Attention by torch, which gets its earlier keys and values from the carry."""

    def __init__(self, hands_on: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.out, self.hands_on, self.dropout = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            hands_on,
            dropout,
        )

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        q, k, v = self.inner(x).unflatten(2, (2, -1)).transpose(1, 2).chunk(3, -1)
        if carry is not None and self.hands_on:
            k, v = carry.append((id(self), "k"), k, 2), carry.append((id(self), "v"), v, 2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = F.scaled_dot_product_attention(q, k, v, seen, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class Alone(nn.Module):
    """What makes something of the tokens that it is given, by itself."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class CausalConvolution(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x.mT, (3, 0))).mT


class Positions(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.arange(x.shape[1]))


class ByToken(nn.Module):
    """Experts that choose tokens, or are chosen by them; limited: by a quarter of the tokens at most, the first."""

    def __init__(self, chooses: bool, limited: bool = False) -> None:
        super().__init__()
        count = 16 if limited else 4
        self.router, self.chooses, self.limited = nn.Linear(WIDTH, count), chooses, limited
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).flatten(0, 1).softmax(-1)
        y = torch.zeros_like(x).flatten(0, 1)
        chosen = scores.argmax(-1)
        for index, expert in enumerate(self.experts):
            rows = scores[:, index].topk(len(y) // 4).indices if self.chooses else (chosen == index).nonzero()[:, 0]
            rows = rows[: -(-len(y) // 4)] if self.limited else rows
            y = y.index_add(0, rows, expert(x.flatten(0, 1)[rows]) * scores[rows, index, None])
        return y.view_as(x)


class Chunk(nn.Module):
    """A right layer before and after another one; keywords: it takes the carry by these alone."""

    def __init__(self, part: nn.Module, takes: bool = False) -> None:
        super().__init__()
        self.before, self.part, self.after, self.takes = Causal(), part, nn.Linear(WIDTH, WIDTH), takes

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        x = x + self.before(x, carry=keywords["carry"])
        return self.after(x + self.part(x, **(keywords if self.takes else {})))


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class TorchAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention without the carry": (lambda: Causal(hands_on=False), "part (Causal)"),
    "attention of zbkern": (lambda: zbkern.nn.Attention(WIDTH, 2, causal=True), "part (Attention)"),
    "attention of torch": (lambda: TorchAttention(WIDTH, 2, batch_first=True), "part (TorchAttention)"),
    "is_causal": (lambda: Alone(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)), "part (Alone)"),
    "sums of the tokens before": (lambda: Alone(lambda x: x.cumsum(1)), "part (Alone)"),
    "a causal convolution": (lambda: CausalConvolution(WIDTH, WIDTH, 4), "part (CausalConvolution)"),
    "positions that begin anew": (lambda: Positions(TOKENS, WIDTH), "part (Positions)"),
    "a mean over tokens": (lambda: Alone(lambda x: x - x.mean(1, keepdim=True)), "part (Alone)"),
    "group norm": (lambda: Alone(lambda x: F.group_norm(x.mT, 2).mT), "part (Alone)"),
    "batch norm": (lambda: Alone(lambda x: F.batch_norm(x.mT, None, None, training=True).mT), "part (Alone)"),
    "experts that choose": (lambda: ByToken(chooses=True), "part (ByToken)"),
    "experts with a capacity": (lambda: ByToken(chooses=False, limited=True), "part (ByToken)"),
    "a recurrent layer": (lambda: Recurrent(WIDTH, WIDTH, batch_first=True), "part (Recurrent)"),
    "what begins beyond 30 tokens": (
        lambda: Alone(lambda x: x - x[:, :1] if x.shape[1] > 30 else x),
        "part (Alone)",
    ),
    "a mask for all tokens": (lambda: Alone(lambda x: x * F.dropout(torch.ones_like(x[:, :1]))), "part (Alone)"),
    "a threshold for all tokens": (lambda: Alone(lambda x: x * (torch.rand(WIDTH) < 0.1)), "part (Alone)"),
    "tokens in reverse": (lambda: Alone(lambda x: x.flip(1)), "part (Alone)"),
    "noise of its own": (lambda: Causal(dropout=0.5, hands_on=False), "part (Causal)"),
}
RIGHT: dict[str, Callable[[], nn.Module]] = {
    "attention": Causal,
    "dropout": lambda: Causal(dropout=0.5),
    "experts that are chosen": lambda: ByToken(chooses=False),
    "norms": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.1)),
    "zeros": lambda: Alone(torch.zeros_like),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "large values": lambda: Alone(lambda x: x * torch.tensor([1e4] + [1.0] * (WIDTH - 1)).to(x)),
}


def chunk_with(part: nn.Module, dtype: torch.dtype) -> nn.Module:
    return zbkern.convert(Chunk(part, isinstance(part, Causal)).to(dtype))


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(2, ROWS, TOKENS, WIDTH).to(dtype).unbind()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_what_needs_whole_sequences_is_named(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    part, message = WRONG[name]
    module = chunk_with(part(), dtype)
    with (
        pytest.raises(PipelineError, match="chunk 0 cannot take its sequences in slices") as raised,
        one_rank(module, schedules.zb_h1(1, 2, slices=2)) as pipe,
    ):
        pipe.step(*batch(dtype))
    assert message in str(raised.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_what_takes_slices_is_let_alone(name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """The gradients of the first step, and the random numbers of its dropout, are those without the comparison."""
    torch.manual_seed(0)
    module = chunk_with(RIGHT[name](), dtype)
    x, y = batch(dtype)
    found = []
    for compared in (False, True):
        again = copy.deepcopy(module)
        with one_rank(again, schedules.zb_h1(1, 2, slices=2)) as pipe:
            pipe._calls.loop.stages[0].probes = pipe._calls.loop.stages[0].probes if compared else Unprobed()
            torch.manual_seed(1)
            random.seed(1)
            pipe.step(x, y)
        found.append([parameter.grad for parameter in again.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is other is None or torch.equal(one, other)
    assert not caplog.records


def test_deep_chunks_in_16_bits() -> None:
    """Rounding of many layers does not add up, and one wrong layer among them is found."""
    torch.manual_seed(0)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Causal() for _ in range(24))

        def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
            for block in self.blocks:
                x = x + 0.05 * block(x, carry)
            return x

    right = Deep().to(torch.bfloat16)
    wrong = copy.deepcopy(right)
    wrong.blocks[19].hands_on = False
    with one_rank(right, schedules.zb_h1(1, 2, slices=3)) as pipe:
        pipe.step(*batch(torch.bfloat16))
    with (
        pytest.raises(PipelineError, match=r"blocks\.19 \(Causal\)"),
        one_rank(wrong, schedules.zb_h1(1, 2, slices=3)) as pipe,
    ):
        pipe.step(*batch(torch.bfloat16))


class Chosen(nn.Module):
    """Tokens whose first score is high; weight: of each, of those [rows, tokens] that are chosen and all scores."""

    def __init__(self, weight: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.linear, self.weight = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH), weight
        nn.init.constant_(self.router.bias, -9.0)  # no token of a probe or a batch is

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        return self.linear(x) * self.weight(scores[..., 0] > 0.5, scores)[..., None]


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (lambda chosen, scores: chosen * scores[..., 1], None),
        (lambda chosen, scores: scores.amax(-1) + scores.argmax(-1), None),
        (lambda chosen, scores: chosen & (chosen.cumsum(1) <= chosen.shape[1] // 2), "computes"),
        (lambda chosen, scores: chosen * (chosen.double().cumsum(1) <= chosen.shape[1] // 2), "computes"),
        (lambda chosen, scores: ~chosen & ((~chosen).cumsum(1) <= chosen.shape[1] // 2), "computes"),
        (lambda chosen, scores: scores[..., 0] * (0.5 if bool(chosen.any()) else 1.0), "computes"),
        (lambda chosen, scores: scores[..., 0] * (1.0 if bool(chosen.any(1).all()) else 0.5), "computes"),
        (lambda chosen, scores: scores[..., 0] > 2 * scores[..., 0].amax(1, keepdim=True), "compares"),
        (lambda chosen, scores: scores[..., 0] * ((chosen * scores[..., 0]).cumsum(1) < len(chosen[0])), "compares"),
    ],
)
def test_what_a_choice_of_tokens_may_lead_to_is_seen_whatever_tokens_are_chosen(weight: Any, what: str | None) -> None:
    torch.manual_seed(0)
    module = chunk_with(Chosen(weight), torch.float64)
    with one_rank(module, schedules.zb_h1(1, 2, slices=2)) as pipe:
        if what is None:
            pipe.step(*batch(torch.float64))
            return
        with pytest.raises(PipelineError, match=rf"part \(\w*Chosen\) {what} something else"):
            pipe.step(*batch(torch.float64))


def test_a_loop_that_waits_for_a_comparison_ends() -> None:
    """Where all tokens pass, it would not."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, carry: Any = None) -> Tensor:
            y = self.linear(x)
            while bool((y.abs() > 1).any()):
                y = torch.where(y.abs() > 1, y / 2, y)
            return y

    with one_rank(Halves().double(), schedules.zb_h1(1, 2, slices=2)) as pipe:
        pipe.step(*batch(torch.float64))


@pytest.mark.parametrize("tokens", [4, 6, TOKENS])
def test_one_draw_for_all_tokens_is_found_in_sequences_of_any_length(tokens: int) -> None:
    """Also where it has as many numbers, or twice as many, as a part has tokens."""
    module = chunk_with(Alone(lambda x: x * F.dropout(torch.ones_like(x[:, :1]))), torch.float64)
    x, y = torch.randn(2, 3, tokens, WIDTH, dtype=torch.float64)
    with (
        pytest.raises(PipelineError, match=r"part \(Alone\) computes something else"),
        one_rank(module, schedules.zb_h1(1, 1, slices=2)) as pipe,
    ):
        pipe.step(x, y)


def test_packs_are_probed_in_rows_as_long_as_those_of_the_call() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, cu_seqlens: Any = None) -> Tensor:
            return self.linear(x if x.shape[1] < 30 else x - x[:, :1])

    side = [{"cu_seqlens": torch.tensor([0, 20, 29, TOKENS])}] * 2
    with (
        pytest.raises(PipelineError, match=r"cannot take sequences packed into a row: it \(Late\) computes"),
        one_rank(Late().double(), schedules.zb_h1(1, 2), nn.MSELoss(reduction="sum")) as pipe,
    ):
        pipe.step(*batch(torch.float64), side)


def test_layers_that_take_no_single_token_are_compared_in_longer_slices() -> None:
    """As recurrent ones that write their state in place for it."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
            assert x.shape[1] > 1
            lengths.append(x.shape[1])
            sums = self.linear(x).cumsum(1)
            if carry is not None:
                before = carry.state("sums")
                sums = sums if before is None else sums + before
                carry.keep("sums", sums[:, -1:])
            return sums

    lengths: list[int] = []
    with one_rank(Sums().double(), schedules.zb_h1(1, 2, slices=2)) as pipe:
        pipe.step(*batch(torch.float64))
    (first, *probed), later = lengths[:-3], lengths[-3:]
    assert [first, *later] == [TOKENS // 2] * 4
    assert probed == [TOKENS, TOKENS, 23, 25]  # of its parts the first is not run again where the second one fails


def test_what_differs_is_named_before_what_comes_of_it() -> None:
    """A state that nothing goes on from has no gradient, which the carry refuses in other words."""

    class Forgets(nn.Linear):
        def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
            sums = super().forward(x).cumsum(1)
            if carry is not None:
                carry.state("sums")
                carry.keep("sums", sums[:, -1:])
            return sums

    with (
        pytest.raises(PipelineError, match=r"it \(Forgets\) computes something else"),
        one_rank(Forgets(WIDTH, WIDTH).double(), schedules.zb_h1(1, 2, slices=2)) as pipe,
    ):
        pipe.step(*batch(torch.float64))


class Counts(nn.Module):
    """A buffer that every forward in training changes, and a mode of its own in which alone it is wrong."""

    def __init__(self, wrong_in: bool | None) -> None:
        super().__init__()
        self.linear, self.wrong_in = nn.Linear(WIDTH, WIDTH), wrong_in
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        self.calls += 1
        return self.linear(x.cumsum(1) if self.training is self.wrong_in else x)


@pytest.mark.parametrize("wrong_in", [None, True, False])
def test_both_modes_are_compared_and_buffers_put_back(wrong_in: bool | None) -> None:
    module = Counts(wrong_in).double()
    with one_rank(module, schedules.zb_h1(1, 2, slices=2)) as pipe:
        for number, (call, mode) in enumerate([(pipe.evaluate, False), (pipe.step, True)]):
            if mode is wrong_in:
                with pytest.raises(PipelineError, match=r"it \(Counts\) computes something else"):
                    call(*batch(torch.float64))
                return
            call(*batch(torch.float64))
            assert module.calls == 4 * (number + 1)


def test_an_error_of_the_carry_names_its_remedy_once() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
            y = self.linear(x)
            if carry is not None:
                carry.keep("last", y[:, -1:])
            return y

    with (
        pytest.raises(PipelineError, match=r"does not use what slice . has kept under 'last'") as raised,
        one_rank(Keeps().double(), schedules.zb_h1(1, 2, slices=2)) as pipe,
    ):
        pipe.step(*batch(torch.float64))
    assert str(raised.value).count("use a schedule without slices") == 1


def test_a_buffer_that_comes_a_little_nearer_in_every_forward_is_named() -> None:
    """As the vectors of a spectral norm do: those of slices are others."""

    class Iterates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("estimate", torch.full((WIDTH,), 1 - 2e-4))

        def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
            self.estimate.lerp_(torch.ones_like(self.estimate), 0.5)
            return self.linear(x) * self.estimate.clone()

    with (
        pytest.raises(PipelineError, match=r"it \(Iterates\) leaves something else in its buffer estimate"),
        one_rank(Iterates(), schedules.zb_h1(1, 2, slices=2)) as pipe,
    ):
        pipe.step(*batch(torch.float32))


def test_float64_is_compared_to_what_its_rounding_leaves() -> None:
    """Where a little of all tokens is less than what float32 leaves in a part."""

    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
            return self.linear(x + 2e-4 * x.mean(dim=1, keepdim=True))

    with (
        pytest.raises(PipelineError, match=r"use a schedule without slices"),
        one_rank(Leaks().double(), schedules.zb_h1(1, 2, slices=2)) as pipe,
    ):
        pipe.step(*batch(torch.float64))


def test_a_forward_that_takes_no_whole_sequences_is_refused() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
            assert x.shape[1] == TOKENS // 2
            return self.linear(x)

    with (
        pytest.raises(PipelineError, match=r"they cannot be compared with whole ones \(AssertionError"),
        one_rank(Whole().double(), schedules.zb_h1(1, 2, slices=2)) as pipe,
    ):
        pipe.step(*batch(torch.float64))


class Padded(nn.Module):
    """Attention to what is no padding, for which it gives NaN; forgets: the mask of slices before."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.inner, self.forgets = nn.Linear(WIDTH, 3 * WIDTH), forgets

    def forward(self, x: Tensor, attention_mask: Tensor, carry: Carry | None = None) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        padding = attention_mask.unsqueeze(-1) == 0
        if carry is not None:
            k, v, seen = (carry.append(name, each, 1) for name, each in zip("kvm", (k, v, attention_mask), strict=True))
            attention_mask = F.pad(attention_mask, (carry.start, 0), value=1) if self.forgets else seen
        own = torch.eye(k.shape[1], dtype=torch.bool)[carry.start if carry else 0 :]  # or padding would see nothing
        causal = torch.ones_like(own).tril(k.shape[1] - q.shape[1])
        y = F.scaled_dot_product_attention(q, k, v, causal & attention_mask.bool()[:, None] | own)
        return y.masked_fill(padding, torch.nan)


@pytest.mark.parametrize("forgets", [False, True])
def test_padding_counts_also_where_the_first_batch_has_none(forgets: bool) -> None:
    inputs, targets = batch(torch.float64)
    mask = {"attention_mask": torch.ones(ROWS, TOKENS, dtype=torch.long)}
    with one_rank(Padded(forgets).double(), schedules.zb_h1(1, 2, slices=2)) as pipe:
        if forgets:
            with pytest.raises(PipelineError, match=r"in slices with padding \(attention_mask\): it \(Padded\)"):
                pipe.step(inputs, targets, mask)
        else:
            pipe.step(inputs, targets, mask)


class Segments(nn.Module):
    """Attention within segments, which the mask numbers; 0 is padding. hands_on: the numbers, and not that alone."""

    def __init__(self, hands_on: bool) -> None:
        super().__init__()
        self.inner, self.hands_on = nn.Linear(WIDTH, 3 * WIDTH), hands_on

    def forward(self, x: Tensor, attention_mask: Tensor, carry: Carry | None = None) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        of_keys = attention_mask
        if carry is not None:
            k, v, seen = (carry.append(name, each, 1) for name, each in zip("kvm", (k, v, attention_mask), strict=True))
            before = seen[:, : carry.start] if self.hands_on else (seen[:, : carry.start] != 0).to(seen.dtype)
            of_keys = torch.cat([before, attention_mask], 1)
        own = torch.eye(k.shape[1], dtype=torch.bool)[carry.start if carry else 0 :]
        causal = torch.ones_like(own).tril(k.shape[1] - q.shape[1])
        same = (attention_mask[..., None] == of_keys[:, None]) & (of_keys[:, None] != 0)
        return F.scaled_dot_product_attention(q, k, v, causal & same | own)


def test_a_mask_of_one_number_a_slice_is_probed_with_several() -> None:
    """Its first slice has a mask of ones."""
    torch.manual_seed(0)
    inputs, targets = batch(torch.float64)
    ids = torch.arange(TOKENS).div(TOKENS // 2, rounding_mode="floor").add(1).expand(ROWS, -1)
    for hands_on in (True, False):
        with one_rank(Segments(hands_on).double(), schedules.zb_h1(1, 2, slices=2)) as pipe:
            pipe.step(inputs, targets, {"attention_mask": torch.ones_like(ids)})
            if hands_on:
                pipe.step(inputs, targets, {"attention_mask": ids})
            else:
                with pytest.raises(PipelineError, match=r"it \(Segments\) computes something else"):
                    pipe.step(inputs, targets, {"attention_mask": ids})


@pytest.mark.parametrize("dtype", [torch.long, torch.float64])
@pytest.mark.parametrize("hands_on", [False, True])
def test_a_mask_of_other_numbers_is_probed_with_them_also_where_it_comes_later(
    hands_on: bool, dtype: torch.dtype
) -> None:
    """A first batch of ones could not tell the numbers of slices before from ones."""
    torch.manual_seed(0)
    inputs, targets = batch(torch.float64)
    module = Segments(hands_on).double()
    ids = torch.arange(TOKENS).mul(3).div(TOKENS, rounding_mode="floor").add(1).expand(ROWS, -1).to(dtype)
    expected = (
        sum(F.mse_loss(module(x, ids[:1]), y) for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True)) / 2
    )
    with one_rank(module, schedules.zb_h1(1, 2, slices=2)) as pipe:
        if hands_on:
            pipe.step(inputs, targets, {"attention_mask": torch.ones_like(ids)})
            loss = pipe.step(inputs, targets, {"attention_mask": ids})
            torch.testing.assert_close(loss, expected)
        else:
            with pytest.raises(PipelineError, match=r"it \(Segments\) computes something else"):
                pipe.step(inputs, targets, {"attention_mask": ids})


def test_attention_raises_without_the_carry_of_its_slice() -> None:
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = zbkern.nn.Attention(WIDTH, 2, causal=True)

        def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
            return self.attention(x, carry=carry if x.shape[1] > 20 else None)

    def run(transport: LocalTransport) -> None:
        with Pipeline([Forgets().double()], schedules.zb_h1(1, 2, slices=(2, 1)), F.mse_loss, transport) as pipe:
            pipe._calls.loop.stages[0].probes = Unprobed()
            pipe.step(*batch(torch.float64))

    with pytest.raises(PipelineError, match="Attention: carry must be handed to it in a schedule with slices"):
        results_on_threads(1, run)


class Decoder(nn.Module):
    """Of token numbers. forgets: its attention takes the carry, or the ends of sequences, and does nothing with it."""

    def __init__(self, forgets: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(9, WIDTH, **options), nn.Embedding(64, WIDTH)
        self.attention, self.head, self.forgets = Causal(hands_on=False), nn.Linear(WIDTH, 9), forgets

    def forward(self, x: Tensor, attention_mask: Any = None, cu_seqlens: Any = None, carry: Any = None) -> Tensor:
        y = self.embed(x)
        if attention_mask is not None:
            y = y + self.places((attention_mask.cumsum(1) - 1).clamp(min=0))  # of this slice alone
        return self.head(y + self.attention(y) if self.forgets else y)


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


of_tokens.reduction = "sum"  # type: ignore[attr-defined]
MASK = [{"attention_mask": torch.ones(1, 8, dtype=torch.long)}]
ENDS = [{"cu_seqlens": torch.tensor([0, 5, 8])}]


@pytest.mark.parametrize("tokens", [8, 2])
@pytest.mark.parametrize("slices", [1, 2])
def test_a_first_batch_that_tells_nothing_lets_nothing_pass(tokens: int, slices: int) -> None:
    """Its tokens are all the same, or each is a slice; without slices it is a pack."""
    first = torch.zeros(1, tokens, dtype=torch.long)
    ends = [{"cu_seqlens": torch.tensor([0, 1, tokens])}] if slices == 1 else None
    with (
        one_rank(Decoder(), schedules.gpipe(1, 1, slices=slices), of_tokens) as pipe,
        pytest.raises(PipelineError, match=r"attention \(Causal\) computes something else"),
    ):
        pipe.step([first], [first], ends)


def test_arguments_that_come_later_are_probed() -> None:
    x = torch.randint(9, (1, 8))
    with one_rank(Decoder(forgets=False), schedules.gpipe(1, 1, slices=2), of_tokens) as pipe:
        pipe.step([x], [x])
        with pytest.raises(PipelineError, match=r"places \(Embedding\) computes"):
            pipe.step([x], [x], MASK)


class Switched(nn.Module):
    """Mixes tokens where something says so that is no mode and no other tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mixes, self.window, self.config = nn.Linear(WIDTH, WIDTH), False, 1, SimpleNamespace(how="")
        self.function, self.other = torch.nn.Identity(), lambda x: x
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x: Tensor, how: Any = "", scale: Any = 0.0, carry: Any = None) -> Tensor:
        mixes = self.mixes or how == "mixed" or bool(scale) or torch.is_autocast_enabled("cpu")
        mixes = mixes or self.window > 1 or self.config.how == "mixed" or bool(self.gate)
        return self.linear(self.other(self.function(x.cumsum(1) if mixes else x)))


def a_flag(module: Switched) -> None:
    module.mixes = True


def a_number(module: Switched) -> None:
    module.window = 2


def a_configuration(module: Switched) -> None:
    module.config.how = "mixed"


def a_buffer(module: Switched) -> None:
    module.gate.fill_(1)


def a_part(module: Switched) -> None:
    module.function = Alone(lambda x: x.cumsum(1))


def a_function(module: Switched) -> None:
    module.other = lambda x: x.cumsum(1)


def a_hook(module: Switched) -> None:
    module.linear.register_forward_hook(lambda part, given, y: y.cumsum(1))


def a_hook_on_a_weight(module: Switched) -> None:
    module.linear.weight.register_hook(lambda gradient: gradient / gradient.norm())


@pytest.mark.parametrize(
    "later",
    [
        *(a_flag, a_number, a_configuration, a_buffer, a_part, a_function, a_hook, a_hook_on_a_weight),
        *({"how": "mixed"}, {"scale": 1.5}, {"scale": torch.tensor(2.0)}, None),
    ],
)
def test_what_is_switched_on_in_a_later_step_is_probed(later: Any) -> None:
    module, data = Switched().double(), batch(torch.float64)
    given = later if isinstance(later, dict) else {}
    begun = {name: value * 0 for name, value in given.items()}
    with one_rank(module, schedules.zb_h1(1, 2, slices=2)) as pipe:
        pipe.step(*data, [begun] * 2)
        pipe.step(*data, [begun] * 2)
        if callable(later):
            later(module)
        with (
            pytest.raises(PipelineError, match="something else"),
            torch.autocast("cpu", torch.bfloat16, enabled=later is None),
        ):
            pipe.step(*data, [given] * 2)


def test_a_number_that_every_step_changes_makes_few_probes(caplog: pytest.LogCaptureFixture) -> None:
    module, data = Switched().double(), batch(torch.float64)
    with one_rank(module, schedules.zb_h1(1, 2, slices=2)) as pipe, caplog.at_level("INFO", "zbkern"):
        for step in range(8):
            module.steps = step
            pipe.step(*data)
    assert sum("a probe of slices took" in each.message for each in caplog.records) == 3


def test_a_gradient_that_needs_the_whole_sequence_is_named() -> None:
    """Words are counted in each slice alone."""
    x = torch.randint(9, (1, 8))
    module = Decoder(False, scale_grad_by_freq=True)
    module.embed.requires_grad_(False)
    with one_rank(module, schedules.gpipe(1, 1, slices=2), of_tokens) as pipe:
        pipe.evaluate([x], [x])
        pipe.step([x], [x])
        module.embed.requires_grad_(True)
        with pytest.raises(PipelineError, match=r"the gradient of embed.weight \(Embedding\) is something else"):
            pipe.step([x], [x])


def test_a_pack_is_cut_in_slices_from_its_first_call_on() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attention = nn.Embedding(9, WIDTH), zbkern.nn.Attention(WIDTH, 2, causal=True)
            self.head = nn.Linear(WIDTH, 9)

        def forward(self, x: Tensor, cu_seqlens: Any = None, carry: Any = None) -> Tensor:
            y = self.embed(x)
            if cu_seqlens is None:
                return self.head(y + self.attention(y, carry=carry))
            return self.head(y + self.attention(y[0], cu_seqlens, carry=carry)[None])

    module, x = Packed().double(), torch.randint(9, (1, 8))
    expected = sum(of_tokens(module(part), part) for part in (x[:, :5], x[:, 5:]))
    with one_rank(module, schedules.gpipe(1, 1, slices=2), of_tokens) as pipe:
        torch.testing.assert_close(pipe.step([x], [x], ENDS), expected.detach())


class Traced(nn.Module):
    """Everything that a forward and a backward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(9, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.forwards, self.seen, self.hooked, self.stepped = 0, [], [], []
        found, stepped = self.hooked, self.stepped
        self.linear.register_forward_hook(lambda *_: found.append(1))
        self.linear.weight.register_hook(lambda gradient: found.append(2))
        self.linear.weight.register_post_accumulate_grad_hook(lambda parameter: stepped.append(parameter.grad))

    def forward(self, x: Tensor, side: Tensor, carry: Any = None) -> Tensor:
        side.add_(1)
        self.calls += 1
        self.forwards += 1
        self.seen.append(x)
        return F.dropout(self.linear(self.embed(x)), 0.3) + random.choice([0.0])


def test_a_rank_without_tokens_makes_the_probe_that_others_make() -> None:
    for resampled in (False, True):
        x, y = (torch.ones(rows, 2, WIDTH) for rows in (0, 1))
        none, some = (drawn_inputs(Call(each, {}, 2, 2), nn.Identity(), 2, Draw(resampled))[0] for each in (x, y))
        assert none.shape == some.shape == (1, 2, WIDTH)
    assert all(min(probe._in_two(count)) > 0 for count in range(2, 30))


@pytest.mark.parametrize("is_masked", [False, True])
def test_ranks_with_other_numbers_of_rows_make_as_many_runs(is_masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes are collective."""

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, attention_mask: Any = None, carry: Any = None) -> Tensor:
            forwards[-1] += 1
            y = self.linear(x)
            return y * y.argmax(-1, keepdim=True)

    forwards: list[int] = []
    monkeypatch.setattr(probe, "_is_collective", lambda _: True)
    for rows in (0, 1, 2, 5):
        forwards.append(0)
        side = {"attention_mask": torch.ones(rows, 24, dtype=torch.long)} if is_masked else None
        check_slices(Chooses(), torch.randn(rows, 24, WIDTH), side=side)
    assert forwards[0] > 0
    assert len({*forwards}) == 1, forwards


def test_a_probe_leaves_no_trace() -> None:
    torch.manual_seed(0)
    module = Traced()
    module.linear.weight.grad = gradient = torch.ones(WIDTH, WIDTH)
    x = torch.randint(9, (2, 24))
    before, numbers = copy.deepcopy(module.state_dict()), (torch.get_rng_state(), random.getstate())
    side = torch.zeros(3)
    with pytest.raises(ValueError, match="random numbers of Python"):
        check_slices(module, x, side={"side": side})
    assert bool((side == 0).all())
    assert module.linear.weight.grad is gradient
    assert bool((gradient == 1).all())
    assert (module.forwards, module.seen, module.hooked, module.stepped) == (0, [], [], [])
    assert torch.equal(numbers[0], torch.get_rng_state())
    assert numbers[1] == random.getstate()
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


class BesideAThread(nn.Module):
    """Another thread draws random numbers in its first forwards, as one that loads data does, each time more."""

    def __init__(self, own: str, forwards: int) -> None:
        super().__init__()
        self.linear, self.own, self.forwards = nn.Linear(WIDTH, WIDTH), own, iter(range(1, forwards + 1))

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        if count := next(self.forwards, 0):
            thread = threading.Thread(target=lambda: [(torch.rand(1), random.random()) for _ in range(count)])
            thread.start()
            thread.join()
        y = self.linear(x)
        return y * random.random() if self.own == "Python" else F.dropout(y, 0.3) if self.own else y


@pytest.mark.parametrize("own", ["", "torch", "Python"])
def test_random_numbers_that_another_thread_draws_are_not_those_of_a_chunk(own: str) -> None:
    torch.manual_seed(0)
    module = BesideAThread(own, 1 + 12)  # the step's own, then those of the probe
    with one_rank(module.double(), schedules.zb_h1(1, 2, slices=2)) as pipe:
        if own == "Python":
            with pytest.raises(PipelineError, match="random numbers of Python, once for all tokens"):
                pipe.step(*batch(torch.float64))
        else:
            pipe.step(*batch(torch.float64))


def test_compiled_parts_are_compared_as_they_are_written() -> None:
    torch.manual_seed(0)
    for wrong in (False, True):
        module = Chunk(Causal(hands_on=not wrong), takes=True).double()
        module.part.compile(backend="eager")
        with one_rank(module, schedules.zb_h1(1, 2, slices=2)) as pipe:
            if wrong:
                with pytest.raises(PipelineError, match=r"part \(Causal\) computes something else"):
                    pipe.step(*batch(torch.float64))
            else:
                pipe.step(*batch(torch.float64))


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("is_converted", [False, True])
def test_hooks_on_accumulation_nodes_are_refused(is_converted: bool, slices: int) -> None:
    """W would not call them, and a probe would."""
    module = Chunk(Causal(), takes=True).double() if slices > 1 else nn.Linear(WIDTH, WIDTH).double()
    module, called = zbkern.convert(module) if is_converted else module, []
    weight = [*module.parameters()][-1]
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    handle = node.register_hook(lambda *_: called.append(1))
    schedule = schedules.zb_h1(1, 2, slices=slices)
    with (
        one_rank(module, schedule) as pipe,
        pytest.raises(ValueError, match=r"must have no hooks on autograd's accumulation node"),
    ):
        pipe.step(*batch(torch.float64))
    assert not called
    handle.remove()
    with one_rank(module, schedule) as pipe:
        pipe.step(*batch(torch.float64))


def test_a_probe_keeps_nothing_of_a_pipeline() -> None:
    """A circle of tensors and their hooks would stay for good."""
    x = torch.randn(2, 8, WIDTH)
    with one_rank(Causal(), schedules.gpipe(1, 2, slices=2)) as pipe:
        pipe.step(x, torch.zeros_like(x))
    queue = weakref.ref(pipe.queue)
    del pipe
    gc.collect()
    assert queue() is None
