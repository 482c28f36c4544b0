"""Every family of language models of the transformers library as a small random model."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import gradients_of, step_and_evaluate
from tests.support.small_families import OWN
from tests.support.small_models import batch, transformers
from zbkern.pipeline import schedules, token_loss, token_targets

# Whatever of these a configuration has becomes small
SMALL: dict[str, Any] = {
    name: size
    for size, names in (
        (0, "pad_token_id"),
        (1, "n_shared_experts n_group topk_group first_k_dense_replace bos_token_id"),
        (2, "num_hidden_layers num_key_value_heads num_experts_per_tok n_layer n_layers num_layers eos_token_id"),
        (4, "num_attention_heads num_local_experts num_experts n_routed_experts qk_rope_head_dim qk_nope_head_dim"),
        (4, "n_head n_heads state_size rotary_dim"),
        (8, "head_dim kv_lora_rank v_head_dim qk_head_dim hidden_size_per_layer_input mamba_chunk_size"),
        (16, "q_lora_rank"),
        (24, "moe_intermediate_size shared_expert_intermediate_size"),
        (32, "hidden_size n_embd d_model word_embed_proj_dim attention_hidden_size"),
        (48, "intermediate_size ffn_dim ffn_hidden_size"),
        (61, "vocab_size vocab_size_per_layer_input"),
        (64, "max_position_embeddings n_positions n_ctx"),
        (0.0, "resid_pdrop embd_pdrop attn_pdrop hidden_dropout attention_dropout dropout hidden_dropout_prob"),
        (0.0, "attention_probs_dropout_prob activation_dropout"),
    )
    for name in names.split()
}
HEADS = ("head_dim", "qk_head_dim", "v_head_dim", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
CODERS = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
FOUR_BLOCKS: dict[str, Any] = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4)
FOUR_BLOCKS |= dict.fromkeys(("resid_dropout", "residual_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0)
FOUR_BLOCKS |= {"embedding_size": 32}
# Attempts, the first that gives a model counts: what a family does not bear, and what it needs
ATTEMPTS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((), {}),
    (HEADS[:1], {}),
    (HEADS, {}),
    ((), {"num_hidden_layers": 4}),
    ((), {f"{coder}_{name}": value for coder in ("encoder", "decoder") for name, value in CODERS.items()}),
    ((), {"num_experts_per_tok": 1}),
    ((), {"num_heads": 8, "expand": 2, "n_groups": 1, "is_decoder": True}),
]


def families() -> list[str]:
    """By their names alone: to import every family takes seconds, and each process of the tests collects them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING_NAMES)


def small(name: str, without: tuple[str, ...], other: dict[str, Any]) -> nn.Module:
    kind = transformers.CONFIG_MAPPING[name]
    default = kind()
    values = {
        key: value
        for key, value in {**SMALL, **other}.items()
        if key not in without
        and isinstance(getattr(default, key, ""), int | float | None)
        and not isinstance(getattr(kind, key, None), property)
    }
    return configured(name, values)


def configured(name: str, values: dict[str, Any]) -> nn.Module:
    """The family's model of these settings; skips what is not small."""
    kind = transformers.CONFIG_MAPPING[name]
    config = kind(**values)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind](config).parameters())
    if size > 20e6:
        pytest.skip(f"{size / 1e6:.0f} million parameters: this family needs a configuration of its own")
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind](config)


def loss_of(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    indices = torch.randint(3, 60, (2, 12))
    return model(input_ids=indices, labels=indices).loss


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Skips what takes longer: a configuration that could not be made small."""

    def stop(*_: Any) -> None:
        pytest.skip(f"takes more than {seconds} s: this family needs a configuration of its own")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def first_that_computes_a_loss(attempts: Iterable[Callable[[], nn.Module]]) -> Callable[[], nn.Module]:
    """The first attempt that gives a model; skips where none does."""
    reasons = []
    for make in attempts:
        torch.manual_seed(0)
        try:
            loss_of(make().float())
        except Exception as error:  # whatever a configuration that does not fit raises
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        return make
    pytest.skip(f"no small configuration: {reasons[0]}")


def models_of(name: str) -> tuple[nn.Module, nn.Module]:
    """Two equal small models of the family."""
    attempts = [functools.partial(small, name, *attempt) for attempt in ATTEMPTS]
    make = first_that_computes_a_loss([functools.partial(configured, name, OWN[name])] if name in OWN else attempts)
    model, twin = (make().float().train() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    return model, twin


def of_four_blocks(name: str) -> nn.Module:
    """A small model of the family of which each of four ranks can have a block."""
    make = first_that_computes_a_loss(
        functools.partial(small, name, without, {**other, **FOUR_BLOCKS, "num_key_value_heads": heads})
        for heads in (4, 2)
        for without, other in ATTEMPTS
    )
    return make().float().train()


def through_ranks(
    model: nn.Module, partition: Sequence[float], as_side: bool = False
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients by name, of a step on as many ranks with the batch of small_models.py.

    as_side: every chunk gets the token ids.
    """
    tokens, mask, labels = batch()
    schedule, targets = schedules.one_f_one_b(len(partition), 1), token_targets(labels, 1)
    given = {"input_ids": tokens, "attention_mask": mask}
    arguments = (None, targets, given) if as_side else (given, targets)
    losses, chunks = step_and_evaluate(model, schedule, partition, token_loss, *arguments)
    return losses[0], gradients_of(chunks)
