"""A model's layers, read from the config.json that the transformers library writes with it.

What the file leaves out is read from the library's own configuration of that model type, where it is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zbkern.planning.cost_model import layer_kinds as kinds
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
    names: tuple[str, str, str] = ("model.embed_tokens", "model.layers", "model.norm")
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
    whole, text = config, config.get("text_config")
    config = text if isinstance(text, Mapping) else config  # the decoder of a model that also takes images
    kind = config.get("model_type")
    if kind not in [*FAMILIES]:
        raise ValueError(
            f"architecture: model_type must be that of a decoder that is known; got {kind!r}, known are "
            + ", ".join(FAMILIES)
            + "; for another model, write its layers' costs (ModelCosts.save) and give them as --costs"
        )
    numbers = _Numbers(config, whole is not config)
    blocks = tuple(_blocks(numbers))
    sizes = numbers["hidden_size"], numbers["vocab_size"]
    left_out = [name for name in whole if name.endswith("_config") and isinstance(whole[name], Mapping)]
    return Architecture(
        kind,
        *sizes,
        blocks,
        numbers.get("num_nextn_predict_layers", numbers.get("num_mtp_layers", 0)),
        bool(whole["tie_word_embeddings"] if "tie_word_embeddings" in whole else numbers.known("tie_word_embeddings")),
        tuple(numbers.family.get("names", Architecture.names)),
        tuple(name for name in left_out if name not in ("text_config", "quantization_config")),
    )


FAMILIES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8"))
"""What is known of models by their model_type, where it is not as in most: names of embedding, blocks and norm; norms
of a block; parallel, as in `Block`; gated: MLPs are; hidden: the name of their size; experts: in some layers; clamped:
gate and up of these; mixed: layers of several kinds, also without a window; alone: a layer is attention or MLP or what
is in the place of one; latent: attention; output_gate: on attention's output; state_space: names of heads, their size,
states, groups, kernel and chunk."""

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of nemotron_h
_DELTA_RULE = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
_MOST_COUNTED = 10_000  # layers, heads, experts: each of them is worked on
_LARGEST = 10**8  # of sizes


class _Numbers:
    """The numbers of a configuration, with an error that names the one that is missing or wrong.

    partial: the file leaves out what is the default of the library's class, as for the text part of a larger model.
    """

    def __init__(self, config: Mapping[str, Any], partial: bool) -> None:
        self.config, self.partial, self.kind = dict(config), partial, config["model_type"]
        self.family = FAMILIES[self.kind]
        if self.config.get("layer_types", ()) is None:  # which says that the library works them out
            del self.config["layer_types"]

    @cached_property
    def library(self) -> Any:
        """The library's configuration with the file's contents; None where it is not installed."""
        try:
            from transformers import CONFIG_MAPPING
        except ImportError:
            return None
        for name, value in self.config.items():  # before the library makes as many layers
            if type(value) is int and name.startswith(("num_", "n_", "hidden_size")):
                self._check(name, value, 0)
        plain = {name: value for name, value in self.config.items() if "{" not in str(value)}  # not its infinities
        try:
            return CONFIG_MAPPING[self.kind].from_dict(plain)
        except Exception as error:  # of its own kinds, for what it does not take
            raise ValueError(f"architecture: the transformers library does not take it: {error}") from error

    def value(self, name: str) -> Any:
        """What the file says, or what the library has for it; None where neither does, or the library is missing."""
        return self.config[name] if name in self.config else getattr(self.library, name, None)

    def known(self, name: str) -> Any:
        """The same, of what may not be taken for false or empty where neither says it."""
        value = self.value(name)
        if value is None and self.library is None:
            raise ValueError(
                f"architecture: {name} is not in the file, which leaves out defaults: write it, or install "
                "transformers, whose configuration knows"
            )
        return value

    def __getitem__(self, name: str) -> int:
        return self._check(name, self.value(name), 1)

    def each(self, *names: str) -> list[int]:
        return [self[name] for name in names]

    def get(self, name: str, default: int) -> int:
        """default where the name is missing, null or 0."""
        value = self.value(name) if self.partial else self.config.get(name)
        return self._check(name, value, 1) if value else default

    def first(self, *names: str) -> int:
        """The first of these names that is there."""
        there = (name for value in (self.config.get, self.value) for name in names if value(name))
        return self[next(there, names[0])]

    def list(self, name: str) -> Sequence[Any]:
        """Empty where it is null, or where neither the file nor the library has it."""
        value = self.known(name) or []
        if not isinstance(value, list):
            raise ValueError(f"architecture: {name} must be a list; got {value!r}")
        return value

    def _check(self, name: str, value: Any, least: int) -> int:
        most = _MOST_COUNTED if name.startswith("num_") or name.endswith(("_experts", "_group", "_layer")) else _LARGEST
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            got = repr(value)[:60]
            raise ValueError(f"architecture: {name} must be a whole number, at least 1 and at most {most:,}; got {got}")
        return value


def _blocks(numbers: _Numbers) -> list[Block]:
    """A table of positions counts as the first block's."""
    kind, family, features, types = numbers.kind, numbers.family, numbers["hidden_size"], _layer_types(numbers)
    mixers = {each: _mixer(numbers, each) for each in dict.fromkeys(types)}
    norms, parallel = family.get("norms", 2), family.get("parallel", False)
    if kind == "falcon":
        norms = 1 if numbers.known("parallel_attn") and not numbers.known("new_decoder_architecture") else 2
        parallel = bool(numbers.known("parallel_attn") or numbers.known("new_decoder_architecture"))
    if kind == "stablelm":
        parallel = bool(numbers.value("use_parallel_residual"))
    parts = [(*mixers[each], *(() if "alone" in family else _mlp(numbers, index))) for index, each in enumerate(types)]
    blocks = [Block(each, norms, parallel) for each in parts]
    if kind == "gpt2" and (positions := numbers.get("n_positions", 0)):
        first, *rest = blocks[0].parts
        blocks[0] = replace(blocks[0], parts=(replace(first, other=positions * features), *rest))
    return blocks


def _layer_types(numbers: _Numbers) -> list[str]:
    """The kind of every layer, by the library's names."""
    kind = numbers.kind
    if kind == "nemotron_h":
        types = numbers.config.get("hybrid_override_pattern") or numbers.list("layers_block_type")
        return [_LETTERS.get(each, each) for each in types]
    count = numbers["num_hidden_layers"]
    if kind == "mamba2":
        return ["linear_attention"] * count
    if kind == "jamba":
        period, offset = numbers["attn_layer_period"], numbers.known("attn_layer_offset")
        return ["full_attention" if index % period == offset else "linear_attention" for index in range(count)]
    given = bool(numbers.config.get("layer_types"))
    windowed = numbers.get("sliding_window", 0) and (given or numbers.value("use_sliding_window") is not False)
    if not (windowed or "mixed" in numbers.family):
        return ["full_attention"] * count
    types = numbers.list("layer_types") or ["sliding_attention"] * count
    if len(types) != count:
        raise ValueError(f"architecture: layer_types must name {count} layers, num_hidden_layers; got {len(types)}")
    return list(types)


def _mixer(numbers: _Numbers, layer_type: str) -> tuple[Part, ...]:
    """What a layer of this type has in the place of attention, or all of it."""
    kind, family, features = numbers.kind, numbers.family, numbers["hidden_size"]
    if layer_type == "linear_attention" and kind == "jamba":
        sizes = numbers["mamba_expand"] * features, *numbers.each("mamba_d_state", "mamba_dt_rank", "mamba_d_conv")
        return (kinds.selective_scan(features, *sizes),)
    if layer_type in ("linear_attention", "mamba") and "state_space" in family:
        return (kinds.state_space(features, *numbers.each(*family["state_space"])),)
    if layer_type == "linear_attention":
        return (kinds.delta_rule(features, *(numbers[f"linear_{name}"] for name in _DELTA_RULE)),)
    if kind == "nemotron_h" and layer_type == "mlp":
        return (kinds.mlp(features, numbers["intermediate_size"], gated=False),)
    if kind == "nemotron_h" and layer_type == "moe" and not numbers.config.get("moe_latent_size"):
        return _experts(numbers)
    if kind == "nemotron_h" and layer_type not in ("full_attention", "attention"):
        raise ValueError(f"architecture: nemotron_h with layers of {layer_type!r} (or a moe_latent_size) is not known")
    window = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(layer_type)
    size = None if window is None else numbers[window]
    return (_attention(numbers, size, layer_type == "chunked_attention"),)


def _attention(numbers: _Numbers, window: int | None, chunked: bool) -> Part:
    features, heads = numbers["hidden_size"], numbers["num_attention_heads"]
    if "latent" in numbers.family:
        sizes = numbers.each("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return kinds.latent_attention(features, heads, numbers.get("q_lora_rank", 0), *sizes)
    size = numbers.get("head_dim", features // heads)
    keys = numbers.get("num_key_value_heads", heads)
    if numbers.kind == "falcon":
        keys = heads if not numbers.known("multi_query") else 1
        keys = numbers["num_kv_heads"] if numbers.known("new_decoder_architecture") else keys
    gate = heads * size if "output_gate" in numbers.family else 0
    return kinds.attention(features, heads, keys, size, window, chunked, gate)


def _mlp(numbers: _Numbers, index: int) -> tuple[Part, ...]:
    """Of one layer: an MLP, or experts and the MLP that all tokens take beside them."""
    family, features = numbers.family, numbers["hidden_size"]
    if "experts" in family and _has_experts(numbers, index):
        return _experts(numbers)
    name = family.get("hidden", "intermediate_size")
    hidden = numbers.get("n_inner", 4 * features) if numbers.kind == "gpt2" else numbers[name]
    return (kinds.mlp(features, hidden, family.get("gated", True)),)


def _experts(numbers: _Numbers) -> tuple[Part, ...]:
    kind, features, gated = numbers.kind, numbers["hidden_size"], numbers.family.get("gated", True)
    hidden = numbers.first("moe_intermediate_size", "intermediate_size")
    count = numbers.first("n_routed_experts", "num_experts", "num_local_experts")
    chosen, groups = numbers["num_experts_per_tok"], numbers.get("n_group", 1)
    if chosen > count:
        raise ValueError(
            f"architecture: num_experts_per_tok must be at most the number of experts, {count}; got {chosen}"
        )
    shared = numbers.get("shared_expert_intermediate_size", numbers.get("n_shared_experts", 0) * hidden)
    if kind == "llama4_text":
        shared = hidden
    if kind == "nemotron_h":
        shared = numbers["moe_shared_expert_intermediate_size"] * numbers.get("n_shared_experts", 1)
    experts = Experts(count, chosen, groups, numbers.get("topk_group", groups))
    routed = kinds.routed_mlp(features, hidden, experts, gated, "clamped" in numbers.family)
    return (routed, kinds.mlp(features, shared, gated, beside=True)) if shared else (routed,)


def _has_experts(numbers: _Numbers, index: int) -> bool:
    if numbers.kind == "jamba":
        return index % numbers["expert_layer_period"] == numbers.known("expert_layer_offset")
    if numbers.kind == "llama4_text":
        return index in numbers.list("moe_layers")
    listed = numbers.list("mlp_only_layers") if "mlp_only_layers" in numbers.config else ()
    dense = index < numbers.get("first_k_dense_replace", 0) or index in listed
    return not dense and (index + 1) % numbers.get("decoder_sparse_step", 1) == 0
