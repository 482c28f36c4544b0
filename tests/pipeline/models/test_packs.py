"""Sequences packed into a row: what a model gives for each by itself, or an error before the first gradient."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import gradients_of, on_threads, one_rank, results_on_threads
from tests.support.small_models import InFloat64, make, one_process, transformers
from zbkern import functional
from zbkern.pipeline import (
    Costs,
    DeferredLogits,
    Pipeline,
    PipelineError,
    PlannedBatches,
    cut,
    per_sequence,
    plan_batch,
    schedules,
    sequence_targets,
    token_log_probs,
    token_loss,
)
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.planner import native

masking_utils = pytest.importorskip("transformers.masking_utils")
pytestmark = pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")

LENGTHS = (7, 11, 6, 2, 3)
COSTS = Costs(2.0, 3.0, 1.0, overhead=0.9, tokens=20)  # so that short sequences are packed
WIDTH = 8


def dataset() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in LENGTHS]


def step(model: nn.Module, packs: bool = True) -> list[Any]:
    """The loss of one step with all sequences in a few rows, or what each rank raised. Leaves the gradients."""
    schedule = schedules.zb_v(2, 2)
    [batch] = PlannedBatches(dataset(), COSTS, 2, sequences=len(LENGTHS), multiple=32, packs=packs)
    assert any(batch.side) == packs

    def run(transport: LocalTransport) -> Tensor | None:
        chunks = cut([model, twin][transport.rank], schedule, rank=transport.rank)
        with InFloat64(), Pipeline([*map(zbkern.convert, chunks)], schedule, token_loss, transport, timeout=60) as pipe:
            return pipe.step(batch.inputs, batch.targets, batch.side, schedule=batch.plan.schedule)

    twin = copy.deepcopy(model)
    found = on_threads(2, run)
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            model.get_parameter(name).grad = parameter.grad
    return found


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *((family, "eager") for family in ("llama", "gemma3", "gpt_oss", "llama4")),
        *((family, "sdpa") for family in ("llama", "opt")),
        *(pytest.param(family, "eager", marks=pytest.mark.slow) for family in ("deepseek_v3", "gpt2", "opt")),
        *(pytest.param(family, "sdpa", marks=pytest.mark.slow) for family in ("gemma3", "deepseek_v3", "gpt2")),
    ],
)
def test_models_of_transformers(family: str, implementation: str) -> None:
    """Two of them make no masks of positions: gpt-oss and OPT."""
    model = make(family)
    model.set_attn_implementation(implementation)  # type: ignore[operator]
    plain = copy.deepcopy(model)
    with InFloat64():
        expected = one_process(plain, [{"input_ids": tokens, "labels": tokens} for tokens in dataset()])
    loss, nothing = step(model)
    assert nothing is None
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def by_lengths(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """As FlashAttention is called by the library; of packs it must be told the ends, and get no mask."""
    assert attention_mask is None
    ends = kwargs.get("cu_seq_lens_q")
    if ends is not None:
        TOLD.append((ends.tolist(), kwargs["max_length_q"], kwargs["max_length_k"]))
    tokens = [t[0].transpose(0, 1) for t in (query, key, value)]
    options = functional.AttentionOptions(scale=scaling)
    return functional.attention(*tokens, causal=True, options=options, cu_seqlens=ends)[None], None


TOLD: list[tuple[list[int], int, int]] = []


def test_attention_that_takes_lengths_gets_no_mask() -> None:
    transformers.AttentionInterface.register("by_lengths", by_lengths)
    transformers.AttentionMaskInterface.register("by_lengths", masking_utils.flash_attention_mask)
    model = make("llama")
    plain = copy.deepcopy(model)
    model.set_attn_implementation("by_lengths")  # type: ignore[operator]
    with InFloat64():
        expected = one_process(plain, [{"input_ids": tokens, "labels": tokens} for tokens in dataset()])
    loss, _ = step(model)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert max(len(ends) for ends, *_ in TOLD) > 3
    assert all(longest == most == max(b - a for a, b in pairwise(ends)) for ends, longest, most in TOLD)


@pytest.mark.parametrize(
    "family",
    [
        "mamba2",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("bamba", "falcon_h1", "lfm2", "nemotron_h", "qwen3_next")
        ),
    ],
)
def test_states_that_would_go_on_into_the_next_sequence_are_refused(family: str) -> None:
    model = make(family)
    for error in step(model):
        assert isinstance(error, PipelineError)
        assert "packed" in str(error), str(error)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss, _ = step(model, packs=False)
    assert isinstance(loss, Tensor)


class Own(nn.Module):
    """A chunk of one's own, which may forget to say where sequences end."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        self.attention, self.forgets = zbkern.nn.Attention(WIDTH, 2, causal=True), forgets

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        if cu_seqlens is None or self.forgets:
            return x + self.attention(x)
        return x + self.attention(x[0], cu_seqlens)[None]


def mean_of_rows(output: Tensor, target: Tensor) -> Tensor:
    """GRPO's: the mean over a sequence's tokens."""
    return (output - target).square().sum(-1).mean(1).sum()


def ratio(output: Tensor, target: Tensor) -> Tensor:
    """GSPO's: one per sequence, of the mean over its tokens, clipped."""
    each = torch.exp((output * target).sum(-1).mean(1))
    return torch.minimum(each, each.clamp(0.8, 1.2)).sum()


def own_batch(lengths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs, targets = (
        [torch.randn(1, length, WIDTH, generator=generator, dtype=torch.double) / 2 for length in lengths]
        for _ in range(2)
    )
    return inputs, targets


class Sliced(Own):
    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, carry: Any = None) -> Tensor:
        return super().forward(x, cu_seqlens) if carry is None else x + self.attention(x, carry=carry)


@pytest.mark.parametrize("loss_fn", [mean_of_rows, ratio])
def test_losses_of_whole_sequences_in_packs_and_slices(loss_fn: Any) -> None:
    lengths = (90, 3, 5, 4, 40, 8, 2, 6)
    costs = Costs(3.0, 5.0, 1.0, attention_forward=1.0, attention_backward=2.5, overhead=0.2, tokens=40)
    plan = plan_batch(lengths, costs, 2, multiple=8)
    assert max(map(len, plan.rows)) > 1
    assert max(map(len, plan.schedule.own_slices)) > 1
    inputs, targets = own_batch(lengths)
    torch.manual_seed(0)
    chunks = [Sliced().double() for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(chunks))
    expected = torch.stack([loss_fn(plain(x), y) for x, y in zip(inputs, targets, strict=True)]).mean()
    expected.backward()
    rows = [torch.cat([inputs[number] for number in row], 1) for row in plan.rows]
    side = [{"cu_seqlens": torch.tensor(ends)} if len(ends) > 2 else {} for ends in plan.ends]

    def run(transport: LocalTransport) -> Tensor | None:
        mine = [zbkern.convert(chunks[chunk]) for chunk in plan.schedule.chunks_of(transport.rank)]
        with Pipeline(mine, plan.schedule, per_sequence(loss_fn), transport, timeout=60) as pipe:
            found = pipe.step(rows, sequence_targets(targets, plan), side)
            again = pipe.evaluate(rows, sequence_targets(targets, plan), side)
            assert (found is None and again is None) or torch.allclose(found, again, rtol=1e-12, atol=0)
            return found

    loss, _ = results_on_threads(2, run)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for chunk, other in zip(chunks, plain, strict=True):
        for parameter, its in zip(chunk.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, its.grad, rtol=1e-9, atol=1e-12)


def of_policy(logits: Any, tokens: Tensor) -> Tensor:
    log_probs, entropy = token_log_probs(logits, nn.functional.pad(tokens[1:], (0, 1), value=-100)[None])
    return (log_probs.sum() / 9).exp() - entropy.mean()


@pytest.mark.parametrize("lengths", [(7, 11, 6, 2, 3), (90, 3, 5, 4, 40, 8, 2, 6)], ids=["packs", "slices, too"])
def test_a_policy_of_whole_sequences(lengths: tuple[int, ...]) -> None:
    """Without logits, whether or not sequences are in slices."""
    generator, kinds = torch.Generator().manual_seed(1), set()
    costs = Costs(3.0, 5.0, 1.0, attention_forward=1.0, attention_backward=2.5, overhead=0.9, tokens=40)
    rows = [torch.randint(3, 60, (length,), generator=generator) for length in lengths]
    [batch] = PlannedBatches([row.tolist() for row in rows], costs, 2, sequences=len(lengths), multiple=8)
    plan, model, schedule = batch.plan, make("llama"), schedules.zb_v(2, 2)
    assert max(map(len, plan.rows)) > 1
    plain, copies = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(2)]
    targets = sequence_targets([rows[number] for number in batch.sequences], plan)

    def loss_fn(logits: Any, tokens: Tensor) -> Tensor:
        kinds.add(type(logits))
        return of_policy(logits, tokens)

    loss_fn.takes_deferred_logits = True  # type: ignore[attr-defined]

    def run(transport: LocalTransport) -> Any:
        modules = [*map(zbkern.convert, chunks := cut(copies[transport.rank], schedule, rank=transport.rank))]
        with Pipeline(modules, schedule, per_sequence(loss_fn), transport, timeout=60) as pipe:
            return pipe.step(batch.inputs, targets, batch.side, schedule=plan.schedule), chunks

    found = results_on_threads(2, run)
    assert kinds == {DeferredLogits}
    expected = torch.stack([of_policy(plain(row[None], use_cache=False).logits, row) for row in rows]).mean()
    expected.backward()
    torch.testing.assert_close(found[0][0], expected.detach(), rtol=1e-6, atol=0)
    gradients = gradients_of([chunk for _, chunks in found for chunk in chunks])
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_a_module_that_forgets_where_sequences_end_is_named() -> None:
    torch.manual_seed(0)
    wrong = Own(forgets=True)
    with one_rank([wrong], schedules.gpipe(1, 1), nn.MSELoss(reduction="sum")) as pipe:
        x = torch.randn(1, 12, WIDTH)
        with pytest.raises((ValueError, PipelineError), match=r"attention \(Attention\) computes something else"):
            pipe.step([x], [x], [{"cu_seqlens": torch.tensor([0, 5, 12])}])
    assert wrong.attention.qkv.weight.grad is None


def test_a_loss_of_rows_is_refused_for_packs() -> None:
    with one_rank([Own()], schedules.gpipe(1, 1), nn.MSELoss()) as pipe:
        x = torch.randn(1, 12, WIDTH)
        pack = [{"cu_seqlens": torch.tensor([0, 5, 12])}]
        with pytest.raises((ValueError, PipelineError), match="loss_fn must say that it takes packs of sequences"):
            pipe.step([x], [x], pack)
        assert pipe.forward([x], None, pack)[0].shape == x.shape


def test_wrong_targets_of_sequences() -> None:
    plan = plan_batch([3, 4], COSTS, 1)
    with pytest.raises(ValueError, match="values must be one for each of the 2 sequences; got 1"):
        sequence_targets([1], plan)
    with pytest.raises(TypeError, match=r"targets must be what sequence_targets\(values, plan\) gives; got int"):
        per_sequence(mean_of_rows)(torch.ones(1, 2), 3)  # type: ignore[arg-type]
