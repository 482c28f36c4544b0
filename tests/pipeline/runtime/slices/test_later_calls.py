"""What the first call of a chunk could not show, and a later one is probed for: masks, arguments, switches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbkern
from tests.support.chunks import one_rank
from tests.support.probed import ROWS, TOKENS, WIDTH, Alone, Causal, batch
from zbkern.pipeline import PipelineError, schedules
from zbkern.pipeline.runtime.slices.carry import Carry


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
