"""Models of the transformers library in slices: the loss and the gradients of one process on whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import one_rank
from tests.support.small_models import DECODER, LENGTH, config_of, make, rows_of, transformers
from zbkern.pipeline import PipelineError, cut, schedules, token_loss, token_targets


def told(model: nn.Module, rows: str = "plain", more: dict[str, Tensor] | None = None) -> str:
    """What a step in two slices raises; more: of the batch."""
    schedule, (arguments, labels) = schedules.one_f_one_b(1, 2, slices=2), rows_of(rows)
    try:
        with one_rank(cut(model, schedule, rank=0), schedule, token_loss) as pipe:
            pipe.step({**arguments, **(more or {})}, token_targets(labels, 2))
    except (ValueError, PipelineError) as error:
        return str(error)
    return ""


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
    assert message in told(model)


def test_checkpointing_masks_of_other_shapes_and_layers_without_cache() -> None:
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
    assert "call model.gradient_checkpointing_disable()" in told(checkpointed)
    assert "attention_mask must be [rows, tokens]" in told(masked, more=mask)
    assert "chunk 0 cannot take its sequences in slices" in told(forgetful)


def test_checkpointing_that_is_switched_on_later() -> None:
    """Attention that takes no mask would be that of each slice by itself."""
    schedule, (arguments, labels) = schedules.one_f_one_b(1, 2, slices=2), rows_of("plain")
    (chunk,) = cut(make("llama"), schedule, rank=0)
    with one_rank(chunk, schedule, token_loss) as pipe:
        pipe.step(arguments, token_targets(labels, 2))
        chunk.whole.gradient_checkpointing_enable()
        with pytest.raises(PipelineError, match="reads no cache with gradient checkpointing"):
            pipe.step(arguments, token_targets(labels, 2))


def test_packed_rows_that_a_family_does_not_take() -> None:
    """ALiBi is added to masks of padding alone: packed rows end in an error of the library's in slices."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    for rows in ("plain", "right", "left", "packed"):
        found = told(transformers.AutoModelForCausalLM.from_config(config_of("Falcon", sizes)), rows)
        refused = "slices: where it can take whole ones, a slice of packed rows (position_ids)" in found
        assert refused == (rows == "packed")
        assert (found == "") == (rows != "packed")
