"""The shapes of a transformer's layers, read from the config.json that the transformers library writes with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbkern.pipeline.simulation.json_file import parse_object

DEFAULTS = Path(__file__).parent / "config_defaults.json"
"""By model type, the numbers of version 5 of the transformers library that are not None."""


@dataclass(frozen=True)
class Attention:
    """Attention with `heads` heads and `key_heads` of keys and values; window: tokens that each sees, None for all."""

    heads: int
    key_heads: int
    head_size: int
    window: int | None = None


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention (arXiv 2412.19437): queries, keys and values come from small vectors.

    query_rank: of the queries' vector, 0 where they come from the input itself; key_rank: of keys' and values'.
    content_size, rotary_size: of a head's queries and keys, without and with rotary positions; value_size: of values.
    """

    heads: int
    query_rank: int
    key_rank: int
    content_size: int
    rotary_size: int
    value_size: int
    window: int | None = None


@dataclass(frozen=True)
class Experts:
    """`count` gated MLPs of `hidden` features, of which every token takes `chosen`.

    shared: hidden features of the MLP that all tokens take. A token's experts are of `chosen_groups` of the `groups` of
    neighbours that the experts are divided into.
    """

    count: int
    chosen: int
    hidden: int
    shared: int = 0
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True)
class Block:
    """One layer: attention, then an MLP of so many hidden features, or experts; norms: 2, or 4 around both.

    gated: an MLP has three products, gate, up and down; without it up and down alone.
    """

    attention: Attention | LatentAttention
    mlp: int | Experts
    norms: int = 2
    gated: bool = True


@dataclass(frozen=True)
class Architecture:
    """A language model: embedding, blocks, norm and head. predictors: blocks that predict further tokens (MTP), each
    with the head's loss once more. tied: the head is the embedding."""

    kind: str
    features: int
    vocabulary: int
    blocks: tuple[Block, ...]
    predictors: int = 0
    tied: bool = False


def load_architecture(path: str | Path) -> Architecture:
    """What a config.json describes, or that in a folder. Raises OSError, or ValueError as `architecture` does."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    text = path.read_text(encoding="utf-8")
    return architecture(parse_object(f"load_architecture: {path}", text, '{"model_type": "llama", ...}'))


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that the contents of a config.json describe.

    Raises ValueError for a model_type that is not in KINDS, and for a number that is missing or not a whole number.
    """
    if isinstance(config.get("text_config"), Mapping):
        config = _with_defaults(config)
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(
            f"architecture: model_type must be one of {', '.join(KINDS)}; got {kind!r}; for another model, write its "
            "layers' costs (ModelCosts.save) and give them as --costs"
        )
    config = {_NAMES_OF_GPT2.get(name, name): value for name, value in config.items()} if kind == "gpt2" else config
    numbers = _Numbers(config)
    windows = _windows(numbers, kind)
    blocks = [
        Block(
            _attention(numbers, kind, window),
            _mlp(numbers, kind, index),
            4 if kind in _FOUR_NORMS else 2,
            kind != "gpt2",
        )
        for index, window in enumerate(windows)
    ]
    predictors = numbers.get("num_nextn_predict_layers", numbers.get("num_mtp_layers", 0))
    return Architecture(
        kind,
        numbers["hidden_size"],
        numbers["vocab_size"],
        tuple(blocks),
        predictors,
        bool(config.get("tie_word_embeddings", kind in _TIED)),
    )


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text decoder of a model that also takes images.

    In such a part the library leaves out what is the default of its class; in the file of a model for text nothing.
    """
    text = config["text_config"]
    defaults = json.loads(DEFAULTS.read_text(encoding="utf-8")).get(str(text.get("model_type")), {})
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return {**defaults, **tied, **text}


_GEMMA = ("gemma", "gemma2", "gemma3_text")
_DENSE = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", *_GEMMA, "phi3", "granite", "olmo", "olmo2", "olmo3"),
    *("smollm3", "ernie4_5", "seed_oss", "glm", "glm4", "exaone4", "stablelm"),
    *("qwen2_5_vl_text", "qwen3_vl_text", "gpt2"),
)
_SPARSE = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "kimi_k2"),
    *("olmoe", "flex_olmo", "glm4_moe", "minimax_m2", "qwen3_vl_moe_text"),
)
_NAMES_OF_GPT2 = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
}
_FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")
_TIED = (*_GEMMA, "smollm3", "ernie4_5", "gpt2")  # where config.json does not say
_NO_WINDOW = ("smollm3", *(kind for kind in (*_DENSE, *_SPARSE) if kind.startswith("qwen")))  # where it does not say
_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "olmo3": 4, "exaone4": 4}  # of so many layers the last sees all
KINDS = (*_DENSE, *_SPARSE)
"""The model types whose shapes are known."""


_MOST_COUNTED = 10_000  # layers, heads, experts: each of them is worked on
_LARGEST = 10**8  # of sizes


class _Numbers:
    """The whole numbers of a configuration, with an error that names the one that is missing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def __getitem__(self, name: str) -> int:
        value = self.config.get(name)
        most = _MOST_COUNTED if name.startswith("num_") or name.endswith(("_experts", "_group")) else _LARGEST
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            got = repr(value)[:60]
            raise ValueError(f"architecture: {name} must be a whole number, at least 1 and at most {most:,}; got {got}")
        return value

    def get(self, name: str, default: int) -> int:
        """default where the name is missing, null or 0."""
        return self[name] if self.config.get(name) else default

    def first(self, *names: str) -> int:
        """The first of these names that is there."""
        return self[next((name for name in names if self.config.get(name)), names[0])]

    def list(self, name: str) -> Sequence[Any]:
        """Nothing where the name is missing or null."""
        value = self.config.get(name) or []
        if not isinstance(value, list):
            raise ValueError(f"architecture: {name} must be a list; got {value!r}")
        return value


def _windows(numbers: _Numbers, kind: str) -> list[int | None]:
    """The window of every layer."""
    config, count = numbers.config, numbers["num_hidden_layers"]
    window = numbers.get("sliding_window", 0)
    if not window or not config.get("use_sliding_window", kind not in _NO_WINDOW):
        return [None] * count
    kinds = numbers.list("layer_types")
    if not kinds:
        return [window if _has_window(numbers, kind, index) else None for index in range(count)]
    if len(kinds) != count:
        raise ValueError(f"architecture: layer_types must name {count} layers, num_hidden_layers; got {len(kinds)}")
    return [window if each == "sliding_attention" else None for each in kinds]


def _has_window(numbers: _Numbers, kind: str, index: int) -> bool:
    """Of a layer whose kind the file does not say, as in files of earlier versions of the library."""
    if kind in _EVERY:
        every = numbers.get("sliding_window_pattern", _EVERY[kind])
        return index % every != every - 1
    if kind in ("qwen2", "qwen2_moe", "qwen3", "qwen2_5_vl_text"):
        border = 28 if numbers.config.get("max_window_layers") is None else numbers.get("max_window_layers", 0)
        return index < border and index % 2 == 0 if kind == "qwen2_moe" else index >= border
    return True


def _attention(numbers: _Numbers, kind: str, window: int | None) -> Attention | LatentAttention:
    heads = numbers["num_attention_heads"]
    if kind.startswith(("deepseek", "kimi")):
        sizes = (numbers[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return LatentAttention(heads, numbers.get("q_lora_rank", 0), *sizes)
    size = numbers.get("head_dim", numbers["hidden_size"] // heads)
    return Attention(heads, numbers.get("num_key_value_heads", heads), size, window)


def _mlp(numbers: _Numbers, kind: str, index: int) -> int | Experts:
    dense = index < numbers.get("first_k_dense_replace", 0) or index in numbers.list("mlp_only_layers")
    if kind in _DENSE or dense or (index + 1) % numbers.get("decoder_sparse_step", 1):
        if kind == "gpt2":
            return numbers.get("intermediate_size", 4 * numbers["hidden_size"])
        return numbers["intermediate_size"]
    hidden = numbers.first("moe_intermediate_size", "intermediate_size")
    count = numbers.first("n_routed_experts", "num_experts", "num_local_experts")
    shared = numbers.get("shared_expert_intermediate_size", numbers.get("n_shared_experts", 0) * hidden)
    chosen, groups = numbers["num_experts_per_tok"], numbers.get("n_group", 1)
    if chosen > count:
        raise ValueError(
            f"architecture: num_experts_per_tok must be at most the number of experts, {count}; got {chosen}"
        )
    return Experts(count, chosen, hidden, shared, groups, numbers.get("topk_group", groups))
