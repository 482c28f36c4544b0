"""Small configurations of families of language models whose usual settings, made small, give no model."""

from __future__ import annotations

import functools
import operator
from typing import Any

DECODER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64}
DECODER |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
DECODER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EVERY_HEAD = DECODER | {"num_key_value_heads": 4}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
ROUTED |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
EXPERTS_OF_TWO = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
SPARSE = EVERY_HEAD | ROUTED | LATENT | {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 4, "head_dim": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}
THREE = DECODER | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}
THREE |= {"attention_hidden_size": 64, "attention_head_dim": 16, "use_mamba_kernels": False}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ATTENTION_OF_TWO = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64}
PARTS: dict[str, list[dict[str, Any]]] = {
    "axk2": [SPARSE],
    "bailing_hybrid": [
        *(EVERY_HEAD, LATENT, EXPERTS_OF_TWO, LINEAR_AND_FULL),
        {"moe_intermediate_size": 24, "head_dim": 4},
    ],
    "bamba": [DECODER, MAMBA, {"attn_layer_indices": [1]}],
    "cohere_compass_text": [
        DECODER,
        {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
        {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    ],
    "dbrx": [
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 61, "pad_token_id": 0},
        {"bos_token_id": 1, "eos_token_id": 2},
        {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
        {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
    ],
    "deepseek_v32": [SPARSE],
    "gemma3n_text": [
        DECODER,
        {"num_hidden_layers": 4, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4},
        {"head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61},
        {"num_kv_shared_layers": 0, "laurel_rank": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    ],
    "glm_moe_dsa": [SPARSE],
    "gpt_neo": [
        {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 61, "num_layers": 2, "num_heads": 4},
        {"max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]]},
        {**dict.fromkeys(("attention_dropout", "embed_dropout", "resid_dropout"), 0.0)},
    ],
    "granitemoehybrid": [
        *(DECODER, MAMBA),
        {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
        {"shared_intermediate_size": 48},
    ],
    "jamba": [
        *(DECODER, EXPERTS_OF_TWO),
        {"expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
        {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ],
    "kimi_linear": [
        *(DECODER, LATENT, LINEAR_AND_FULL),
        {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 24, "num_shared_experts": 1},
        {"head_dim": 8},
    ],
    "lfm2_moe": [
        *(DECODER, EXPERTS_OF_TWO),
        {"layer_types": ["conv", "full_attention"], "moe_intermediate_size": 24, "num_dense_layers": 1},
    ],
    "longcat_flash": [
        LATENT,
        {key: value for key, value in DECODER.items() if key != "intermediate_size"},
        {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "n_routed_experts": 4, "zero_expert_num": 2},
        {"moe_topk": 2, "num_layers": 1, "head_dim": 4},
    ],
    "reformer": [
        ATTENTION_OF_TWO,
        {"is_decoder": True, "attention_head_size": 8, "num_attention_heads": 4, "axial_pos_embds": False},
        {"feed_forward_size": 48, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
        {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0, "eos_token_id": 2},
    ],
    "xmod": [
        ATTENTION_OF_TWO,
        {"num_hidden_layers": 2, "num_attention_heads": 4, "is_decoder": True, "pad_token_id": 1},
        {"default_language": "en_XX", "languages": ("en_XX",), "hidden_dropout_prob": 0.0},
        {"attention_probs_dropout_prob": 0.0},
    ],
    "zamba": [THREE, {"n_mamba_heads": 2, "mamba_dt_rank": 4, "tie_word_embeddings": False}],
    "zamba2": [THREE, {"n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 8, "num_mem_blocks": 1}],
}
OWN = {name: functools.reduce(operator.or_, parts) for name, parts in PARTS.items()}
