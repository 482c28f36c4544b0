"""Models of the transformers library in slices: the loss and the gradients of one process on whole sequences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import on_threads, results_on_threads
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

transformers = pytest.importorskip("transformers", reason="needs the transformers library: pip install zbkern[test]")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("slices are for transformers 5", allow_module_level=True)

LENGTH = 24
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 61}
TEXT = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 32, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
FAMILIES: dict[str, tuple[str, dict[str, Any], float]] = {  # and how exact: some compute in float32
    "llama": ("LlamaConfig", {**TEXT, "tie_word_embeddings": True}, 1e-12),
    "qwen3": ("Qwen3Config", {**TEXT, "head_dim": 8}, 1e-12),
    "qwen3_moe": ("Qwen3MoeConfig", {**TEXT, **EXPERTS, "num_experts": 4, "head_dim": 8}, 1e-12),
    "gemma3": ("Gemma3TextConfig", {**TEXT, "head_dim": 8, "sliding_window": 4}, 1e-6),
    "gpt_oss": ("GptOssConfig", {**TEXT, "head_dim": 8, "num_local_experts": 4, "sliding_window": 4}, 1e-12),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**TEXT, **EXPERTS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
        1e-6,
    ),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 61, "n_positions": 32, **NO_DROPOUT},
        1e-12,
    ),
    "opt": (
        "OPTConfig",
        {**SIZES, "ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0},
        1e-12,
    ),
    "mamba2": (
        "Mamba2Config",
        {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 61, "state_size": 8, "num_heads": 8, "head_dim": 8}
        | {"n_groups": 2, "chunk_size": 8},
        2e-6,
    ),
    "bamba": ("BambaConfig", {**TEXT, **SPACE, "attn_layer_indices": [1, 3]}, 5e-6),
    "lfm2": ("Lfm2Config", {**TEXT, "full_attn_idxs": [1, 3]}, 1e-12),
    # its decays have gradients of 1e-5, sums in float32 of terms a thousand times as large
    "qwen3_next": (
        "Qwen3NextConfig",
        {**TEXT, **EXPERTS, **LINEAR, "num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 16}
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
        2e-3,
    ),
}


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    name, sizes, _ = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes, **TOKENS)).double()
    if "experts" in str(sizes):
        model.set_experts_implementation("eager")  # the library's grouped product takes no float64
    return model.train()


def batch(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """plain; padded on the right or on the left; or three sequences packed into each row."""
    torch.manual_seed(1)
    tokens = torch.randint(3, 61, (4, LENGTH))
    if kind == "plain":
        return {"input_ids": tokens}, tokens
    if kind == "packed":
        ends = [torch.arange(count) for count in (7, 11, 6)]
        return {"input_ids": tokens, "position_ids": torch.cat(ends).expand(4, LENGTH).contiguous()}, tokens
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[1, 15:] = mask[3, 6:] = 0
    counted = mask
    if kind == "left":
        mask = mask.flip(1)
        counted = mask * mask.roll(1, 1)  # what padding predicts is of no account
    return {"input_ids": tokens, "attention_mask": mask}, tokens.masked_fill(counted == 0, -100)


def check(family: str, kind: str, schedule: Schedule) -> None:
    model, (arguments, labels) = make(family), batch(kind)
    targets = token_targets(labels, schedule.sequences)
    ranks = [copy.deepcopy(model) for _ in range(schedule.stages)]
    rows = [slice(4 * i // schedule.sequences, 4 * (i + 1) // schedule.sequences) for i in range(schedule.sequences)]
    parts = [{name: value[each] for name, value in arguments.items()} for each in rows]
    losses = [
        token_loss(model(**part, use_cache=False).logits, target) / schedule.sequences
        for part, target in zip(parts, targets, strict=True)
    ]
    expected = torch.stack(losses).sum()
    expected.backward()

    def run(transport: LocalTransport) -> list[Tensor | None]:
        chunks = cut(ranks[transport.rank], schedule, rank=transport.rank)
        with Pipeline(chunks, schedule, token_loss, transport) as pipe:
            return [pipe.step(arguments, targets), pipe.evaluate(arguments, targets)]

    for found in results_on_threads(schedule.stages, run):
        for loss in found:
            if loss is not None:
                torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        found = [each for rank in ranks if (each := rank.get_parameter(name).grad) is not None]
        if parameter.grad is not None and parameter.grad.abs().max() > 1e-8:
            difference = (found[0] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert difference < FAMILIES[family][2], (name, difference)


KINDS = ["plain", "right", "left", "packed"]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=[] if column == number % len(KINDS) else [pytest.mark.slow])
        for number, family in enumerate(FAMILIES)
        for column, kind in enumerate(KINDS)
    ],
)
def test_families(family: str, kind: str) -> None:
    check(family, kind, schedules.zb_h1(2, 2, slices=(3, 2, 5, 2)))


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


def own(kind: str, **sizes: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**{**TEXT, **sizes, **TOKENS})


@pytest.mark.parametrize(
    ("kind", "automatic", "config", "message"),
    [
        ("Mamba", "CausalLM", {}, "begins each forward with a new state"),
        (
            "RecurrentGemma",
            "CausalLM",
            {"lru_width": 32, "head_dim": 8},
            "keeps states of earlier tokens in its",
        ),
        ("MiniMax", "CausalLM", {"num_local_experts": 4, "head_dim": 8}, "in a cache of its own"),
        ("Bert", "MaskedLM", {}, "has no cache of earlier tokens"),
        ("Bert", "CausalLM", {}, "attends to later tokens, too"),
        ("Llama", "SequenceClassification", {}, "looks for the last token of whole sequences"),
    ],
)
def test_what_needs_whole_sequences(kind: str, automatic: str, config: dict[str, Any], message: str) -> None:
    model = getattr(transformers, f"AutoModelFor{automatic}").from_config(own(kind, **config))
    schedule = schedules.one_f_one_b(1, 2, slices=2)

    def run(transport: LocalTransport) -> None:
        Pipeline(cut(model, schedule, rank=0), schedule, token_loss, transport)

    [error] = on_threads(1, run)
    assert isinstance(error, ValueError)
    assert message in str(error)


def test_checkpointing_masks_of_other_shapes_and_layers_without_cache() -> None:
    schedule = schedules.one_f_one_b(1, 2, slices=2)
    arguments, labels = batch("plain")
    checkpointed, masked, forgetful = make("llama"), make("llama"), make("llama")
    forgetful.get_submodule("model.layers.1").register_forward_pre_hook(
        lambda layer, inputs, keywords: (inputs, {**keywords, "past_key_values": None}), with_kwargs=True
    )
    checkpointed.gradient_checkpointing_enable()  # type: ignore[operator]
    mask = {"attention_mask": torch.ones(4, 1, LENGTH, LENGTH, dtype=torch.bool)}

    def run(transport: LocalTransport, model: nn.Module, more: dict[str, Tensor]) -> None:
        with Pipeline(cut(model, schedule, rank=0), schedule, token_loss, transport) as pipe:
            pipe.step({**arguments, **more}, token_targets(labels, 2))

    for model, more, message in [
        (checkpointed, {}, "call model.gradient_checkpointing_disable()"),
        (masked, mask, "attention_mask must be [rows, tokens]"),
        (forgetful, {}, "model.layers.1.self_attn of LlamaForCausalLM reads nothing of earlier slices"),
    ]:
        [error] = on_threads(1, lambda transport, given=(model, more): run(transport, *given))
        assert isinstance(error, ValueError | PipelineError)
        assert message in str(error)
