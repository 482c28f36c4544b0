"""Models of the transformers library in slices: the loss and the gradients of one process on whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import on_threads
from tests.support.small_models import DECODER, LENGTH, config_of, make, rows_of, transformers
from zbkern.pipeline import (
    Pipeline,
    PipelineError,
    cut,
    schedules,
    token_loss,
    token_targets,
)
from zbkern.pipeline.transport.local import LocalTransport

KINDS = ["plain", "right", "left", "packed"]


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

    arguments, labels = rows_of("plain")

    def run(transport: LocalTransport) -> None:
        with Pipeline(cut(model, schedule, rank=0), schedule, token_loss, transport) as pipe:
            pipe.step(arguments, token_targets(labels, 2))

    [error] = on_threads(1, run)
    assert isinstance(error, ValueError | PipelineError)
    assert message in str(error)


def test_checkpointing_masks_of_other_shapes_and_layers_without_cache() -> None:
    schedule = schedules.one_f_one_b(1, 2, slices=2)
    arguments, labels = rows_of("plain")
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
        arguments, labels = rows_of(kind)
        with Pipeline(cut(model, schedule, rank=0), schedule, token_loss, transport) as pipe:
            pipe.step(arguments, token_targets(labels, 2))

    for kind in KINDS:
        [error] = on_threads(1, lambda transport, kind=kind: run(transport, kind))
        told = (
            "cannot take its sequences in slices: where it can take whole ones, a slice of packed rows (position_ids)"
        )
        assert told in str(error) if kind == "packed" else error is None
