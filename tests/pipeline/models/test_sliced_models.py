"""Models of the transformers library in slices: the loss and the gradients of one process on whole sequences."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import on_threads, results_on_threads
from tests.support.small_models import DECODER, config_of, make, transformers
from zbkern.pipeline import (
    Costs,
    Pipeline,
    PipelineError,
    Schedule,
    cut,
    plan,
    schedules,
    token_loss,
    token_targets,
)
from zbkern.pipeline.transport.local import LocalTransport

LENGTH = 24
PACKED = (7, 11, 6)
MAKE_NO_MASKS = ("gpt_oss", "opt")  # of positions that begin anew: packed sequences see each other there
EXACT = {  # how exact, by family: some compute in float32
    **dict.fromkeys(("llama", "qwen3", "qwen3_moe"), 1e-12),
    "gemma3": 1e-6,
    "gpt_oss": 1e-12,
    "deepseek_v3": 1e-6,
    "gpt2": 1e-12,
    "opt": 1e-12,
    "mamba2": 2e-6,
    "bamba": 5e-6,
    "falcon_h1": 5e-6,
    "zamba2": 5e-6,
    "nemotron_h": 5e-6,
    "llama4": 1e-6,
    "lfm2": 1e-12,
    "qwen3_next": 2e-3,  # its decays have gradients of 1e-5, sums in float32 of terms a thousand times as large
}


def batch(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """plain; padded on the right or on the left; or three sequences packed into each row."""
    torch.manual_seed(1)
    tokens = torch.randint(3, 61, (4, LENGTH))
    if kind == "plain":
        return {"input_ids": tokens}, tokens
    if kind == "packed":
        ends = [torch.arange(count) for count in PACKED]
        return {"input_ids": tokens, "position_ids": torch.cat(ends).expand(4, LENGTH).contiguous()}, tokens
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[1, 15:] = mask[3, 6:] = 0
    counted = mask
    if kind == "left":
        mask = mask.flip(1)
        counted = mask * mask.roll(1, 1)  # what padding predicts is of no account
    return {"input_ids": tokens, "attention_mask": mask}, tokens.masked_fill(counted == 0, -100)


def logits_of(model: nn.Module, part: dict[str, Tensor], apart: bool) -> Tensor:
    """apart: of each packed sequence by itself."""
    if not apart:
        return model(**part, use_cache=False).logits
    every = part["input_ids"].split(PACKED, 1)
    return torch.cat([model(input_ids=tokens, use_cache=False).logits for tokens in every], 1)


def check(family: str, kind: str, schedule: Schedule, partition: Sequence[float] | None = None) -> None:
    model, (arguments, labels) = make(family), batch(kind)
    targets = token_targets(labels, schedule.microbatches)
    ranks = [copy.deepcopy(model) for _ in range(schedule.ranks)]
    count = schedule.microbatches
    rows = [slice(4 * i // count, 4 * (i + 1) // count) for i in range(count)]
    parts = [{name: value[each] for name, value in arguments.items()} for each in rows]
    apart = kind == "packed" and family in MAKE_NO_MASKS
    losses = [
        token_loss(logits_of(model, part, apart), target) / count for part, target in zip(parts, targets, strict=True)
    ]
    expected = torch.stack(losses).sum()
    expected.backward()

    def run(transport: LocalTransport) -> list[Tensor | None]:
        chunks = cut(ranks[transport.rank], schedule, partition, rank=transport.rank)
        with Pipeline(chunks, schedule, token_loss, transport) as pipe:
            return [pipe.step(arguments, targets), pipe.evaluate(arguments, targets)]

    for found in results_on_threads(schedule.ranks, run):
        for loss in found:
            if loss is not None:
                torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        found = [each for rank in ranks if (each := rank.get_parameter(name).grad) is not None]
        if parameter.grad is not None and parameter.grad.abs().max() > 1e-8:
            difference = (found[0] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert difference < EXACT[family], (name, difference)


KINDS = ["plain", "right", "left", "packed"]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=[] if column == number % len(KINDS) else [pytest.mark.slow])
        for number, family in enumerate(EXACT)
        for column, kind in enumerate(KINDS)
    ],
)
def test_families(family: str, kind: str) -> None:
    ranks = 1 if family == "zamba2" else 2  # whose blocks use embeddings, so that cut refuses more chunks
    check(family, kind, schedules.zb_h1(ranks, 2, slices=(3, 2, 5, 2)))


@pytest.mark.parametrize(
    ("family", "kind", "schedule"),
    [
        ("llama", "packed", schedules.one_f_one_b(1, 4, slices=8)),
        ("gemma3", "left", schedules.zb_v(2, 2, slices=(5, 19))),
        ("gpt_oss", "right", schedules.zb_h1(4, 4, slices=3)),
        ("qwen3_moe", "plain", plan(Costs(), 2, 2, effort=0, slices=4).schedule),
    ],
)
def test_ranks_and_schedules(family: str, kind: str, schedule: Schedule) -> None:
    check(family, kind, schedule)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gemma3", "left"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("llama", "packed"), ("bamba", "plain")]),
    ],
)
def test_chunks_that_begin_within_a_block(family: str, kind: str) -> None:
    check(family, kind, schedules.zb_v(2, 2, slices=(3, 2, 5, 2)), [0, 1.5, 3, 4.5])
    check(family, kind, schedules.one_f_one_b(2, 2, slices=2), [0, 2.5])


@pytest.mark.parametrize(
    ("kind", "automatic", "config", "message"),
    [
        ("Mamba", "CausalLM", {}, "begins each forward with a new state"),
        (
            "RecurrentGemma",
            "CausalLM",
            {"lru_width": 32, "head_dim": 8},
            "(RecurrentGemmaRecurrentBlock) computes something else",
        ),
        ("MiniMax", "CausalLM", {"num_local_experts": 4, "head_dim": 8}, "in a cache of its own"),
        ("xLSTM", "CausalLM", {}, "in a cache of its own"),
        ("Bert", "MaskedLM", {}, "has no cache of earlier tokens"),
        ("Bert", "CausalLM", {}, "(BertSelfAttention) computes something else"),
        ("Llama", "SequenceClassification", {}, "looks for the last token of whole sequences"),
    ],
)
def test_what_needs_whole_sequences(kind: str, automatic: str, config: dict[str, Any], message: str) -> None:
    model = getattr(transformers, f"AutoModelFor{automatic}").from_config(config_of(kind, {**DECODER, **config}))
    schedule = schedules.one_f_one_b(1, 2, slices=2)

    arguments, labels = batch("plain")

    def run(transport: LocalTransport) -> None:
        with Pipeline(cut(model, schedule, rank=0), schedule, token_loss, transport) as pipe:
            pipe.step(arguments, token_targets(labels, 2))

    [error] = on_threads(1, run)
    assert isinstance(error, ValueError | PipelineError)
    assert message in str(error)


def test_checkpointing_masks_of_other_shapes_and_layers_without_cache() -> None:
    schedule = schedules.one_f_one_b(1, 2, slices=2)
    arguments, labels = batch("plain")
    checkpointed, masked, forgetful = make("llama"), make("llama"), make("llama")
    forgetful.get_submodule("model.layers.1").register_forward_pre_hook(
        lambda layer, inputs, keywords: (
            inputs,
            {**keywords, **dict.fromkeys({"cache", "past_key_values"} & keywords.keys())},
        ),
        with_kwargs=True,
    )
    checkpointed.gradient_checkpointing_enable()  # type: ignore[operator]
    mask = {"attention_mask": torch.ones(4, 1, LENGTH, LENGTH, dtype=torch.bool)}

    def run(transport: LocalTransport, model: nn.Module, more: dict[str, Tensor]) -> None:
        with Pipeline(cut(model, schedule, rank=0), schedule, token_loss, transport) as pipe:
            pipe.step({**arguments, **more}, token_targets(labels, 2))

    for model, more, message in [
        (checkpointed, {}, "call model.gradient_checkpointing_disable()"),
        (masked, mask, "attention_mask must be [rows, tokens]"),
        (forgetful, {}, "chunk 0 cannot take its sequences in slices"),
    ]:
        [error] = on_threads(1, lambda transport, given=(model, more): run(transport, *given))
        assert isinstance(error, ValueError | PipelineError)
        assert message in str(error)


def test_packed_rows_that_a_family_does_not_take() -> None:
    """ALiBi is added to masks of padding alone: packed rows end in an error of the library's in slices."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    schedule = schedules.one_f_one_b(1, 2, slices=2)

    def run(transport: LocalTransport, kind: str) -> None:
        model = transformers.AutoModelForCausalLM.from_config(config_of("Falcon", sizes))
        arguments, labels = batch(kind)
        with Pipeline(cut(model, schedule, rank=0), schedule, token_loss, transport) as pipe:
            pipe.step(arguments, token_targets(labels, 2))

    for kind in KINDS:
        [error] = on_threads(1, lambda transport, kind=kind: run(transport, kind))
        told = (
            "cannot take its sequences in slices: where it can take whole ones, a slice of packed rows (position_ids)"
        )
        assert told in str(error) if kind == "packed" else error is None
