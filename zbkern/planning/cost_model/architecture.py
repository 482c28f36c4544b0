"""A model's layers, made from the configuration that the transformers library writes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zbkern.planning.cost_model import layer_kinds as kinds
from zbkern.planning.cost_model.configuration import Configuration, Family
from zbkern.planning.cost_model.layer_kinds import Experts, Part
from zbkern.planning.costs.json_file import parse_object, read_text


@dataclass(frozen=True)
class Block:
    """One layer: its parts, each with what it adds to the residual stream, and norms: one per part, or around each.
    parallel: what its MLP is given has nothing of its attention."""

    parts: tuple[Part, ...]
    norms: int = 2
    parallel: bool = False

    @property
    def halves(self) -> tuple[tuple[Part, ...], ...]:
        """What is in the place of attention, and the rest; a block that cannot be cut between these whole."""
        return (self.parts[:1], self.parts[1:]) if self.parts[1:] and not self.parallel else (self.parts,)

    @property
    def experts(self) -> Experts | None:
        return next((part.experts for part in self.parts if part.experts), None)


@dataclass(frozen=True)
class Architecture:
    """A model: embedding, blocks, norm and head. predictors: blocks that predict further tokens (MTP), each with the
    head's loss once more. tied: the head is the embedding. names: of embedding, blocks and norm in the transformers
    library. left_out: parts of the model that are not planned for."""

    kind: str
    features: int
    vocabulary: int
    blocks: tuple[Block, ...]
    predictors: int = 0
    tied: bool = False
    names: tuple[str, str, str] = Family.names
    left_out: tuple[str, ...] = ()

    @property
    def experts(self) -> Experts | None:
        """Of the first layer that has some."""
        return next((block.experts for block in self.blocks if block.experts), None)

    @property
    def parts(self) -> list[Part]:
        """Of all blocks."""
        return [part for block in self.blocks for part in block.parts]

    @property
    def predictor_names(self) -> list[str]:
        """Of the layers that predict further tokens."""
        blocks = len(self.blocks)
        return [f"{self.names[1]}.{number}" for number in range(blocks, blocks + self.predictors)]

    def parameters(self, active: bool = False) -> int:
        """All without those of predictors, or those that a token is computed with."""
        tables = (1 if self.tied else 2) * self.vocabulary * self.features
        return tables + sum(part.parameters(active) for part in self.parts)

    def flops(self, sequence: int) -> float:
        """Of a training step per token: forward and twice that backward, nothing twice."""
        core = sum(part.core.flops(sequence) for part in self.parts if part.core)
        lookup = 0 if self.tied else self.vocabulary * self.features
        return 3 * (2 * (self.parameters(active=True) - lookup) + core)


def load_architecture(path: str | Path) -> Architecture:
    """What a config.json describes, or that in a folder. Raises OSError, or ValueError as `architecture` does."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    text = read_text(path)
    return architecture(parse_object(f"load_architecture: {path}", text, '{"model_type": "llama", ...}'))


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that the contents of a config.json describe.

    Raises ValueError for a model_type that is not in FAMILIES, and for a number that is missing or not a whole number.
    """
    given = Configuration.of(config)
    return Architecture(
        given.kind,
        given.number("hidden_size"),
        given.number("vocab_size"),
        tuple(_blocks(given)),
        given.optional("num_nextn_predict_layers") or given.optional("num_mtp_layers"),
        given.flag("tie_word_embeddings"),
        given.family.names,
        given.left_out,
    )


_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of nemotron_h
_DELTA_RULE = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


def _blocks(given: Configuration) -> list[Block]:
    """A table of positions counts as the first block's."""
    kind, family, features, types = given.kind, given.family, given.number("hidden_size"), _layer_types(given)
    mixers = {each: _mixer(given, each) for each in dict.fromkeys(types)}
    norms, parallel = family.norms, family.parallel
    if kind == "falcon":
        norms = 1 if given.flag("parallel_attn") and not given.flag("new_decoder_architecture") else 2
        parallel = given.flag("parallel_attn") or given.flag("new_decoder_architecture")
    if kind == "stablelm":
        parallel = given.flag("use_parallel_residual")
    parts = [(*mixers[each], *(() if family.alone else _mlp(given, index))) for index, each in enumerate(types)]
    blocks = [Block(each, norms, parallel) for each in parts]
    if kind == "gpt2" and (positions := given.optional("n_positions", 0)):
        first, *rest = blocks[0].parts
        blocks[0] = replace(blocks[0], parts=(replace(first, other=positions * features), *rest))
    return blocks


def _layer_types(given: Configuration) -> list[str]:
    """The kind of every layer, by the library's names."""
    kind = given.kind
    if kind == "nemotron_h":
        types = given.said("hybrid_override_pattern") or given.entries("layers_block_type")
        return [_LETTERS.get(each, each) for each in types]
    count = given.number("num_hidden_layers")
    if kind == "mamba2":
        return ["linear_attention"] * count
    if kind == "jamba":
        period, offset = given.number("attn_layer_period"), given.number("attn_layer_offset", least=0)
        return ["full_attention" if index % period == offset else "linear_attention" for index in range(count)]
    windowed = given.optional("sliding_window") and (
        given.said("layer_types") or given.value("use_sliding_window") is not False
    )
    if not (windowed or given.family.mixed):
        return ["full_attention"] * count
    types = given.entries("layer_types") or ["sliding_attention"] * count
    if len(types) != count:
        raise ValueError(f"architecture: layer_types must name {count} layers, num_hidden_layers; got {len(types)}")
    return list(types)


def _mixer(given: Configuration, layer_type: str) -> tuple[Part, ...]:
    """What a layer of this type has in the place of attention, or all of it."""
    kind, family, features = given.kind, given.family, given.number("hidden_size")
    if layer_type == "linear_attention" and kind == "jamba":
        sizes = (
            given.number("mamba_expand") * features,
            *given.numbers("mamba_d_state", "mamba_dt_rank", "mamba_d_conv"),
        )
        return (kinds.selective_scan(features, *sizes),)
    if layer_type in ("linear_attention", "mamba") and family.state_space:
        return (kinds.state_space(features, *given.numbers(*family.state_space)),)
    if layer_type == "linear_attention":
        return (kinds.delta_rule(features, *(given.number(f"linear_{name}") for name in _DELTA_RULE)),)
    if kind == "nemotron_h" and layer_type == "mlp":
        return (kinds.mlp(features, given.number("intermediate_size"), gated=False),)
    if kind == "nemotron_h" and layer_type == "moe" and not given.said("moe_latent_size"):
        return _experts(given)
    if kind == "nemotron_h" and layer_type not in ("full_attention", "attention"):
        raise ValueError(f"architecture: nemotron_h with layers of {layer_type!r} (or a moe_latent_size) is not known")
    window = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(layer_type)
    size = None if window is None else given.number(window)
    return (_attention(given, size, layer_type == "chunked_attention"),)


def _attention(given: Configuration, window: int | None, chunked: bool) -> Part:
    features, heads = given.number("hidden_size"), given.number("num_attention_heads")
    if given.family.latent:
        sizes = given.numbers("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return kinds.latent_attention(features, heads, given.optional("q_lora_rank", 0), *sizes)
    size = given.optional("head_dim", features // heads)
    keys = given.optional("num_key_value_heads", heads)
    if given.kind == "falcon":
        keys = heads if not given.flag("multi_query") else 1
        keys = given.number("num_kv_heads") if given.flag("new_decoder_architecture") else keys
    gate = heads * size if given.family.output_gate else 0
    return kinds.attention(features, heads, keys, size, window, chunked, gate)


def _mlp(given: Configuration, index: int) -> tuple[Part, ...]:
    """Of one layer: an MLP, or experts and the MLP that all tokens take beside them."""
    family, features = given.family, given.number("hidden_size")
    if family.experts and _has_experts(given, index):
        return _experts(given)
    name = family.hidden
    hidden = given.optional("n_inner", 4 * features) if given.kind == "gpt2" else given.number(name)
    return (kinds.mlp(features, hidden, family.gated),)


def _experts(given: Configuration) -> tuple[Part, ...]:
    kind, features, gated = given.kind, given.number("hidden_size"), given.family.gated
    hidden = given.number("moe_intermediate_size", "intermediate_size")
    count = given.number("n_routed_experts", "num_experts", "num_local_experts")
    chosen, groups = given.number("num_experts_per_tok"), given.optional("n_group", 1)
    if chosen > count:
        raise ValueError(
            f"architecture: num_experts_per_tok must be at most the number of experts, {count}; got {chosen}"
        )
    shared = given.optional("shared_expert_intermediate_size", given.optional("n_shared_experts", 0) * hidden)
    if kind == "llama4_text":
        shared = hidden
    if kind == "nemotron_h":
        shared = given.number("moe_shared_expert_intermediate_size") * given.optional("n_shared_experts", 1)
    experts = Experts(count, chosen, groups, given.optional("topk_group", groups))
    routed = kinds.routed_mlp(features, hidden, experts, gated, given.family.clamped)
    return (routed, kinds.mlp(features, shared, gated, beside=True)) if shared else (routed,)


def _has_experts(given: Configuration, index: int) -> bool:
    if given.kind == "jamba":
        return index % given.number("expert_layer_period") == given.number("expert_layer_offset", least=0)
    if given.kind == "llama4_text":
        return index in given.entries("moe_layers")
    listed = given.entries("mlp_only_layers") if given.said("mlp_only_layers") else ()
    dense = index < given.optional("first_k_dense_replace", 0) or index in listed
    return not dense and (index + 1) % given.optional("decoder_sparse_step", 1) == 0
