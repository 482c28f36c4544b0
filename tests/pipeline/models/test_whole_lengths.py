"""Models that compute longer sequences in another way: slices and packs equal whole sequences, or are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.chunks import gradients_of, one_rank, step_and_evaluate
from tests.support.small_models import DECODER, LENGTH, PACKED, batch, config_of, rows_of, transformers
from zbkern.pipeline import PipelineError, cut, schedules, token_loss, token_targets
from zbkern.pipeline.runtime.forward_state import ForwardState
from zbkern.pipeline.runtime.slices.carry import Carries

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}


def model_of(kind: str, limit: int) -> nn.Module:
    """Whose sequences of more than `limit` tokens are computed in another way."""
    family, _, rope = kind.partition(" ")
    sizes: dict[str, Any] = {**DECODER, "num_hidden_layers": 2, "max_position_embeddings": limit}
    if family == "Doge":
        sizes |= {"keep_window_size": limit, "hidden_dropout": 0.0, "max_position_embeddings": 64}
    if family == "Phimoe":
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    if rope == "dynamic":
        sizes["rope_parameters"] = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    if rope == "longrope":
        sizes |= {"max_position_embeddings": 64, "original_max_position_embeddings": limit}
        own = {"original_max_position_embeddings": limit, "short_mscale": 1.0, "long_mscale": 1.2}
        sizes["rope_parameters"] = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, **FACTORS, **own}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, sizes)).double()
    if family == "Phimoe":
        model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):  # of Doge, zero at first
            nn.init.normal_(parameter)
    return model.train(family != "Phimoe")  # whose experts are drawn at random in training


LONGROPE = ["Phi3 longrope", "Phimoe longrope", "Llama longrope"]
DYNAMIC = ["Llama dynamic", "Qwen2 dynamic", "Doge"]


def one_by_one(model: nn.Module, sequences: list[Tensor], labels: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of labelled tokens, and gradients, in one process."""
    total, count = torch.zeros((), dtype=torch.float64), sum(int((each[1:] != -100).sum()) for each in labels)
    for tokens, targets in zip(sequences, labels, strict=True):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, targets[1:], reduction="sum") / count
    total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model: nn.Module, rows: str, slices: int, partition: list[float] | None) -> None:
    arguments, labels = rows_of(rows)
    schedule = schedules.zb_h1(2, 2, slices=slices) if slices > 1 else schedules.zb_h1(2, 2)
    tokens = arguments["input_ids"]
    if rows == "packed":
        sequences = [part for row in tokens for part in row.split(PACKED)]
        parts = [part for row in labels for part in row.split(PACKED)]
        firsts = [sum(PACKED[:n]) for n in range(len(PACKED))]
        labels = labels.clone()
        labels[:, firsts] = -100
    else:
        sequences, parts = [*tokens], [*labels]
    loss, gradients = one_by_one(copy.deepcopy(model), sequences, parts)
    (found, _), chunks = step_and_evaluate(model, schedule, partition, token_loss, arguments, token_targets(labels, 2))
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    for name, gradient in gradients_of(chunks).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=2e-5, atol=1e-6 * gradients[name].abs().max())


@pytest.mark.parametrize(
    ("kind", "rows", "slices"),
    [
        *(("Phi3 longrope", "plain", 4), ("Phimoe longrope", "right", 3)),
        *(pytest.param(kind, "right", 3, marks=pytest.mark.slow) for kind in ("Phi3 longrope", "Llama longrope")),
    ],
)
def test_slices_have_the_frequencies_of_their_whole_sequence(kind: str, rows: str, slices: int) -> None:
    check(model_of(kind, 16), rows, slices, [0, 1.5])


@pytest.mark.parametrize("kind", DYNAMIC)
def test_what_is_another_for_every_length_is_refused_beyond_the_limit_in_slices(kind: str) -> None:
    if kind != "Doge":  # whose mask, drawn from values, the probe refuses in any slices
        check(model_of(kind, LENGTH), "plain", 2, None)
    refused = (
        r"for sequences of more than 16 tokens, .* which slices do not show|DogeAttention\) gives another gradient"
    )
    with pytest.raises(PipelineError, match=refused):
        check(model_of(kind, 16), "plain", 2, None)


@pytest.mark.parametrize(
    "kind",
    [
        *("Phi3 longrope", "Llama dynamic", "Doge"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (*LONGROPE[1:], "Qwen2 dynamic")),
    ],
)
def test_a_pack_of_sequences_on_both_sides_of_the_limit_is_refused(kind: str) -> None:
    refused = r"more than 8 tokens, .* which (packed sequences|slices) do not|computes something else"
    with pytest.raises(PipelineError, match=refused):
        check(model_of(kind, 8), "packed", 1, None)
    with pytest.raises(PipelineError, match=refused):
        check(model_of(kind, 8), "packed", 2, None)
    check(model_of(kind, 11), "packed", 1, None)


@pytest.mark.parametrize("kind", ["Phi3 longrope", "Llama longrope"])
def test_packs_of_sequences_beyond_the_limit_have_the_same_frequencies(kind: str) -> None:
    check(model_of(kind, 4), "packed", 1, [0, 1.5])


def test_a_probe_refuses_packs_where_short_sequences_would_be_scaled_as_long_ones() -> None:
    with pytest.raises(PipelineError, match=r"PhimoeRotaryEmbedding\) computes something else"):
        check(model_of("Phimoe longrope", 4), "packed", 1, [0, 1.5])


def test_a_slice_of_a_sequence_of_unknown_length_is_refused_where_the_first_was_short() -> None:
    schedule = schedules.gpipe(1, 1, slices=4)
    tokens = rows_of("plain")[0]["input_ids"]
    for limit, until in ((4, 24), (8, 12), (24, 24)):
        (chunk,) = cut(model_of("Phi3 longrope", limit), schedule, rank=0)
        carries = Carries(schedule)
        for number, part in enumerate(tokens.split(6, 1)):
            side = carries.begin(number, 6, part)
            if 6 * (number + 1) < until or until == LENGTH:
                chunk(part, **side)
            else:
                with pytest.raises(ValueError, match="for sequences of more than 8 tokens"):
                    chunk(part, **side)
                break


def test_positions_that_count_the_tokens_are_no_packs() -> None:
    schedule, (arguments, labels) = schedules.zb_h1(1, 2, slices=2), rows_of("plain")
    positions = torch.arange(LENGTH).expand(4, -1)
    losses = []
    for more in ({}, {"position_ids": positions}):
        with one_rank(cut(model_of("Phi3 longrope", 16), schedule, rank=0), schedule, token_loss) as pipe:
            losses.append(pipe.step({**arguments, **more}, token_targets(labels, 2)))
    assert torch.equal(*losses)


@pytest.mark.parametrize("kind", ["Llama dynamic", "Phi3 longrope"])
def test_a_forward_that_is_taken_back_leaves_no_frequencies(kind: str) -> None:
    """The longest length that dynamic NTK has seen is an attribute, and its frequencies a buffer."""
    model, fresh = model_of(kind, 8), model_of(kind, 8)
    tokens = batch()[0][:1]
    model(tokens[:, :6])
    state = ForwardState([model], torch.device("cpu"))
    model(tokens.repeat(1, 2))
    state.restore()
    assert torch.equal(model(tokens).logits, fresh(tokens).logits)


def test_numbers_that_modules_have_as_attributes_are_restored() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).train()
    part: Any = module[1]
    part.seen, part.largest, part.text = 3, torch.tensor(2.0), "a"
    part.table = table = torch.ones(3)
    state = ForwardState([module], torch.device("cpu"))
    part.seen, part.largest, part.text, part.late = 4, torch.tensor(5.0), None, 1
    part.kept, part.table = [1], table * 2
    module.eval()
    state.restore()
    assert (part.seen, part.largest.item(), part.text, hasattr(part, "late"), part.kept) == (3, 2.0, "a", False, [1])
    assert part.table is table
    assert not part.training
