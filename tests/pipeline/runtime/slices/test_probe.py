"""The comparison that the first forward of a chunk in slices makes: what it finds, and what it lets alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbkern
from tests.support.chunks import one_rank, results_on_threads
from tests.support.probed import TOKENS, WIDTH, Alone, Causal, Chunk, Unprobed, batch, chunk_with
from zbkern.pipeline import Pipeline, PipelineError, schedules
from zbkern.pipeline.runtime.slices.carry import Carry
from zbkern.pipeline.transport.local import LocalTransport

DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]


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


def of_the_first(chosen: Tensor) -> Tensor:
    """Up to half as many as there are tokens."""
    return chosen * (chosen.cumsum(1) <= chosen.shape[1] // 2)


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (lambda chosen, scores: chosen * scores[..., 1], None),
        (lambda chosen, scores: scores.amax(-1) + scores.argmax(-1), None),
        (lambda chosen, scores: chosen & (chosen.cumsum(1) <= chosen.shape[1] // 2), "computes"),
        (lambda chosen, scores: of_the_first((scores[..., 0] * 8).long() == 1), "computes"),
        (
            lambda chosen, scores: of_the_first(
                torch.bucketize(scores[..., 0].contiguous(), torch.tensor([0.5, 0.9])) > 0
            ),
            "computes",
        ),
        (lambda chosen, scores: of_the_first(scores[..., 0].clone().gt_(0.5)), "computes"),
        (lambda chosen, scores: of_the_first(torch.gt(input=scores[..., 0], other=0.5)), "computes"),
        (lambda chosen, scores: of_the_first(torch.ge(scores[..., 0], 0.5, out=torch.empty_like(chosen))), "computes"),
        (lambda chosen, scores: of_the_first((scores[..., 0] - 0.5).heaviside(scores.new_zeros(()))), "computes"),
        (lambda chosen, scores: scores[..., 1] * (scores[..., 0] * 8).long(), None),
        (lambda chosen, scores: scores[..., 1] * scores[..., 0].clone().lt_(0.5), None),
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
