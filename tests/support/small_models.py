"""Small models of the transformers library by name: decoders of text, and other kinds with their heads; what they are
trained with, and what they compute in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

transformers = pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**SIZES, **TOKENS, "vocab_size": 61, "max_position_embeddings": 32}
DECODER = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTING = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 61, "n_positions": 32, **TOKENS}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**DECODER, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**DECODER, "head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "mixtral": ("Mixtral", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", {**DECODER, "head_dim": 8}),
    "gemma3": ("Gemma3Text", {**DECODER, "head_dim": 8, "sliding_window": 4}),
    "gpt_oss": ("GptOss", {**DECODER, "head_dim": 8, "num_local_experts": 4, "sliding_window": 4}),
    "deepseek_v3": (
        "DeepseekV3",
        {**DECODER, **LATENT, **ROUTING, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"num_key_value_heads": 4},
    ),
    "gpt2": ("GPT2", {**GPT2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "opt": ("OPT", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "mamba2": (
        "Mamba2",
        {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 61, "state_size": 8, "num_heads": 8, "head_dim": 8}
        | {"n_groups": 2, "chunk_size": 8, **TOKENS},
    ),
    "bamba": ("Bamba", {**DECODER, **SPACE, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1", {**DECODER, **SPACE, "head_dim": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1}),
    "zamba2": (
        "Zamba2",
        {**DECODER, "mamba_d_state": 8, "mamba_expand": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1}
        | {"chunk_size": 8, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "use_mem_rope": True},
    ),
    "nemotron_h": (
        "NemotronH",
        {**DECODER, "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2}
        | {"chunk_size": 8, "layers_block_type": ["mamba", "attention", "mamba", "attention"]},
    ),
    "llama4": (
        "Llama4Text",
        {**DECODER, "head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
    ),
    "lfm2": ("Lfm2", {**DECODER, "full_attn_idxs": [1, 3]}),
    "qwen3_next": (
        "Qwen3Next",
        {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16}
        | {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
}
BERT = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
BART = {"vocab_size": 61, "d_model": 32, "max_position_embeddings": 32, "dropout": 0.0, "decoder_start_token_id": 2}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 4, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
QUIET = dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "attention_dropout", "activation_dropout"), 0.0)
WHISPER = {**BART, "encoder_layers": 2, "decoder_layers": 6, "max_source_positions": 20, "max_target_positions": 32}
WHISPER |= {"num_mel_bins": 8, **TOKENS}
HEARD = {**SIZES, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}
SEEN = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 16}
QWEN = {"hidden_size": 32, "depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3}
SPECIAL = {"image_token_id": 57, "vision_start_token_id": 58, "vision_end_token_id": 59, "video_token_id": 60}
QWEN_TEXT = {**DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
SEQ2SEQ, SPEECH, IMAGES = "Seq2SeqLM", "SpeechSeq2Seq", "ImageTextToText"
# the configuration, the head, and how exact it is: the norms and rotary embeddings of some are in float32
KINDS: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "t5": ("T5", T5, SEQ2SEQ, 1e-6),
    "t5_untied": ("T5", {**T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}, SEQ2SEQ, 2e-6),
    "switch": ("SwitchTransformers", {**T5, "num_experts": 4, "router_jitter_noise": 0.0}, SEQ2SEQ, 3e-6),
    "bart": ("Bart", BART, SEQ2SEQ, 1e-12),
    "marian": ("Marian", {**BART, "pad_token_id": 1, "eos_token_id": 2}, SEQ2SEQ, 1e-12),
    "bart_classifier": ("Bart", BART, "SequenceClassification", 1e-12),
    "reward": ("Llama", {**DECODER, "num_labels": 1}, "SequenceClassification", 1e-6),
    "odd_padding": ("Qwen3", {**DECODER, "num_labels": 3, "pad_token_id": 60}, "SequenceClassification", 1e-6),
    "tokens": ("Llama", {**DECODER, "num_labels": 5, "classifier_dropout": 0.0}, "TokenClassification", 1e-6),
    "answers": ("Llama", DECODER, "QuestionAnswering", 1e-6),
    "bert": ("Bert", BERT, "MaskedLM", 1e-12),
    "bert_classifier": ("Bert", {**BERT, "num_labels": 3}, "SequenceClassification", 1e-12),
    "bert_choices": ("Bert", BERT, "MultipleChoice", 1e-12),
    "vit": ("ViT", {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 3}, "ImageClassification", 1e-12),
    "whisper": ("Whisper", WHISPER, SPEECH, 1e-12),
    "ast": ("AST", {**HEARD, "num_labels": 3}, "AudioClassification", 1e-12),
    "m2m_100": ("M2M100", {**BART, **QUIET, **TOKENS}, SEQ2SEQ, 1e-12),
    "llava": (
        "Llava",
        {
            "vision_config": {**SEEN, "model_type": "clip_vision_model", "patch_size": 8, "projection_dim": 32},
            "text_config": {**DECODER, "model_type": "llama"},
            "image_token_id": 57,
        },
        IMAGES,
        1e-6,
    ),
    "gemma3": (
        "Gemma3",
        {
            "vision_config": {**SEEN, "model_type": "siglip_vision_model", "patch_size": 4},
            "text_config": {**DECODER, "model_type": "gemma3_text", "head_dim": 8},
            "mm_tokens_per_image": 4,
            "image_token_id": 57,
            "boi_token_id": 58,
            "eoi_token_id": 59,
        },
        IMAGES,
        1e-6,
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"vision_config": {**QWEN, "embed_dim": 32, "temporal_patch_size": 2}, "text_config": QWEN_TEXT, **SPECIAL},
        IMAGES,
        1e-6,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "vision_config": {**QWEN, "out_hidden_size": 32, "intermediate_size": 48, "window_size": 16},
            "text_config": QWEN_TEXT,
            **SPECIAL,
        },
        IMAGES,
        1e-6,
    ),
}


# images among the embeddings, as in those above
_LLAMA, _SIGLIP = {**DECODER, "model_type": "llama"}, {**SEEN, "model_type": "siglip_vision_model"}
_CLIP = {**SEEN, "model_type": "clip_vision_model", "patch_size": 8, "projection_dim": 32}
for name, family, vision, text, more in (
    (
        "paligemma",
        "PaliGemma",
        {**_SIGLIP, "patch_size": 8, "projection_dim": 32},
        {**DECODER, "model_type": "gemma", "head_dim": 8},
        {"projection_dim": 32, "hidden_size": 32},
    ),
    (
        "internvl",
        "InternVL",
        {**SEEN, "image_size": [16, 16], "patch_size": [4, 4]},
        {**_LLAMA, "model_type": "qwen2"},
        {"downsample_ratio": 0.5},
    ),
    ("smolvlm", "SmolVLM", {**SEEN, "patch_size": 4}, _LLAMA, {"scale_factor": 2, "pad_token_id": 0}),
    (
        "mistral3",
        "Mistral3",
        {**SEEN, "model_type": "pixtral", "patch_size": 4, "head_dim": 8},
        {**_LLAMA, "model_type": "mistral", "head_dim": 8},
        {"spatial_merge_size": 2},
    ),
    (
        "aya_vision",
        "AyaVision",
        {**_SIGLIP, "patch_size": 4},
        {**_LLAMA, "model_type": "cohere2"},
        {"downsample_factor": 2},
    ),
    ("vipllava", "VipLlava", _CLIP, _LLAMA, {"vision_feature_layers": [-1, -2]}),
    (
        "glm4v",
        "Glm4v",
        {**QWEN, "out_hidden_size": 32, "intermediate_size": 48, "image_size": 16, "temporal_patch_size": 2},
        {**QWEN_TEXT, "head_dim": 8},
        {"image_start_token_id": 58, "image_end_token_id": 59, "video_token_id": 60},
    ),
):
    KINDS[name] = (family, {"vision_config": vision, "text_config": text, "image_token_id": 57, **more}, IMAGES, 2e-6)


def config_of(name: str, sizes: dict[str, Any]) -> Any:
    return getattr(transformers, f"{name}Config")(**sizes)


def make(family: str) -> nn.Module:
    """One of DECODERS, in float64."""
    torch.manual_seed(0)
    name, sizes = DECODERS[family]
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, sizes)).double()
    if "experts" in str(sizes):
        model.set_experts_implementation("eager")  # the library's grouped product takes no float64
    return model.train()


def make_kind(kind: str) -> nn.Module:
    """One of KINDS, in float64."""
    torch.manual_seed(0)
    name, sizes, head, _ = KINDS[kind]
    return getattr(transformers, f"AutoModelFor{head}").from_config(config_of(name, sizes)).double().train()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens with padding behind, the mask, and labels of 4 rows, of which each has another number."""
    tokens = torch.randint(3, 60, (4, 10), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(10) < torch.tensor([10, 4, 7, 2])[:, None]).long()
    return tokens.masked_fill(mask == 0, 0), mask, tokens.masked_fill(mask == 0, -100)


ROWS, LENGTH, PACKED = 4, 24, (7, 11, 6)


def rows_of(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """plain; padded on the right or on the left; or three sequences packed into each row."""
    torch.manual_seed(1)
    tokens = torch.randint(3, 61, (ROWS, LENGTH))
    if kind == "plain":
        return {"input_ids": tokens}, tokens
    if kind == "packed":
        ends = [torch.arange(count) for count in PACKED]
        return {"input_ids": tokens, "position_ids": torch.cat(ends).expand(ROWS, LENGTH).contiguous()}, tokens
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 15:] = mask[3, 6:] = 0
    counted = mask
    if kind == "left":
        mask = mask.flip(1)
        counted = mask * mask.roll(1, 1)  # what padding predicts is of no account
    return {"input_ids": tokens, "attention_mask": mask}, tokens.masked_fill(counted == 0, -100)


def one_process(model: nn.Module, sequences: list[dict[str, list[int]]]) -> float:
    """The mean loss over all labelled tokens, sequence by sequence; leaves the gradients."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sequence in sequences:
        tokens, labels = (torch.tensor(sequence[name])[None] for name in ("input_ids", "labels"))
        logits = model(input_ids=tokens).logits[0, :-1]
        total = total + nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
        count += int((labels[0, 1:] != -100).sum())
    (total / max(count, 1)).backward()
    return (total / max(count, 1)).item()


class InFloat64(TorchFunctionMode):
    """Inside, on this thread, whatever asks a function of torch for float32 gets float64."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = Tensor.double if function is Tensor.float else function
        args = tuple(map(_wide, args))
        return function(*args, **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def small() -> nn.Module:
    """Of nobody's library."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def tensors(chunks: Any) -> dict[str, torch.Tensor]:
    return {name: value for chunk in chunks for name, value in chunk.state_dict().items()}
