"""What a model's configuration says of its layers: as its card and the library have it, and what cannot be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.configurations import CONFIGURATIONS, H100
from tests.support.cost_settings import SMALL
from zbkern.pipeline import layers_of
from zbkern.planning.cost_model.architecture import Architecture, architecture, load_architecture
from zbkern.planning.cost_model.configuration import FAMILIES
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.layer_kinds import attention, mlp
from zbkern.planning.cost_model.model_costs import Setting


@pytest.mark.parametrize(
    ("name", "total", "active"),  # in billions, from the models' cards
    [
        ("llama-3-8b", 8.03, 8.03),
        ("llama-3-70b", 70.6, 70.6),
        ("llama-3-405b", 406, 406),
        ("qwen3-235b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("gpt-oss-120b", 117, 5.7),  # its card leaves the embedding out of the active ones: 5.1
        ("gemma-2-9b", 9.24, 9.24),
    ],
)
def test_parameters_are_those_that_are_published(name: str, total: float, active: float) -> None:
    model = load_architecture(CONFIGURATIONS / f"{name}.json")
    assert (model.parameters(), model.parameters(active=True)) == (
        pytest.approx(total * 1e9, rel=0.005),
        pytest.approx(active * 1e9, rel=0.02),
    )


def test_flops_of_a_token_are_six_per_parameter_and_those_of_attention() -> None:
    model = load_architecture(CONFIGURATIONS / "llama-3-405b.json")
    assert model.flops(8192) * 15.6e12 == pytest.approx(3.8e25, rel=0.05)  # arXiv 2407.21783, section 3


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("jamba", [(0, None)] * 4 + [(8192, None)] + [(0, None)] * 3),
        ("llama4_text", [(10240, 8192)] * 3 + [(10240, None)]),
        ("qwen3_next", [(16384, 64)] * 3 + [(8192, None)]),
        ("mamba2", [(8192 + 8 * 128, 256)] * 4),
        ("falcon", [(2 * 4544, None)] * 4),
        ("cohere2", [(16384, 4096)] * 3 + [(16384, None)]),
    ],
)
def test_layers_of_several_kinds_are_in_the_librarys_order(kind: str, wanted: list[tuple[int, int | None]]) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="kinds are those of version 5")
    config = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    cores = [block.parts[0].core for block in architecture(config).blocks[: len(wanted)]]
    assert [(core.width, core.window) if core else (0, None) for core in cores] == wanted


def test_gpt2_has_other_names_and_two_products() -> None:
    found = architecture({"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257})
    assert found.blocks[0].parts == (attention(1600, 25, 25, 64), mlp(1600, 6400, gated=False))
    assert found.names[1] == "transformer.h"
    assert found.tied
    assert found.parameters() == pytest.approx(1.558e9, rel=2e-3)  # less biases and positions


def windows(model: Architecture) -> list[int | None]:
    return [block.parts[0].core.window for block in model.blocks]


def test_what_a_file_leaves_out_is_the_librarys_default() -> None:
    """As in google/gemma-3-4b-pt, whose file has no heads and no vocabulary."""
    pytest.importorskip("transformers", minversion="5.0", reason="defaults are those of version 5")
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    vision = {"vision_config": {"hidden_size": 1152}, "quantization_config": {}}
    found = architecture({"model_type": "gemma3", **vision, "text_config": {**text, "sliding_window": 1024}})
    assert found.blocks[0].parts[0] == attention(2560, 8, 4, 256, 1024)
    assert (found.vocabulary, found.tied, len(found.blocks)) == (262208, True, 34)
    assert found.left_out == ("vision_config",)
    untied = {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": text}
    assert not architecture(untied).tied


def test_without_the_library_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert architecture({**SMALL, "tie_word_embeddings": True}).tied
    for types in ({}, {"layer_types": None}):
        with pytest.raises(ValueError, match=r"layer_types is not in the file, .* install transformers"):
            architecture({**SMALL, "sliding_window": 8, **types})
    with pytest.raises(ValueError, match="vocab_size must be a whole number"):
        architecture({name: value for name, value in SMALL.items() if name != "vocab_size"})
    with pytest.raises(ValueError, match=r"tie_word_embeddings is not in the file, .* install transformers"):
        architecture({**SMALL, "model_type": "gemma"})


@pytest.mark.parametrize(
    "kind", ["gemma2", "gemma3_text", "gpt_oss", "olmo3", "exaone4", "cohere2", "mistral", "phi3", "qwen2", "qwen3_moe"]
)
@pytest.mark.parametrize("use", [None, True])
def test_windows_are_those_of_the_library(kind: str, use: bool | None) -> None:
    """The library names the kind of every layer, which files of earlier versions do not have."""
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="kinds are those of version 5")
    told = {"use_sliding_window": use} if use and kind.startswith("qwen") else {}
    library = transformers.CONFIG_MAPPING[kind](sliding_window=16, num_hidden_layers=30, **told)
    config = json.loads(library.to_json_string(use_diff=False))
    config["sliding_window"] = 16  # which the library clears where it is not used
    expected = config.pop("layer_types", None)
    if expected is None:
        expected = ["full_attention" if kind.startswith("qwen") and not told else "sliding_attention"] * 30
    assert windows(architecture(config)) == [16 if each == "sliding_attention" else None for each in expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type must be .* that is known; got 'mamba', known are llama, .*--costs"),
        ({"hidden_size": None}, "hidden_size must be a whole number, at least 1 and at most 100,000,000; got None"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a whole number, at least 1 .*; got 2.5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be .*, at least 1 and at most 10,000; got 1"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers must be .* at most 10,000; got 1000000000"),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "num_local_experts must be .* at most 10,000; got 1"),
        ({"hidden_size": 10**400}, "hidden_size must be .*, at least 1 and at most 100,000,000; got 1000"),
        ({"vocab_size": -(10**400)}, "vocab_size must be a whole number, at least 1 .*; got -1000"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ({"sliding_window": 4, "layer_types": 3}, "layer_types must be a list; got 3"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "mlp_only_layers must be a list; got 1"),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok must be at most the number of experts, 4; got 5",
        ),
        (
            {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": -1},
            "attn_layer_offset must be a whole number, at least 0 and at most 100,000,000; got -1",
        ),
        ({"model_type": "bert"}, "model_type must be that of a decoder that is known; got 'bert'"),
    ],
)
def test_a_configuration_that_cannot_be_read(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        architecture({**SMALL, **change})


DIFFERENT = {"llama", "gpt2", "gemma3_text", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_next", "nemotron_h"}


DIFFERENT |= {"mamba2", "bamba", "cohere", "falcon", "phi3", "glm4_moe"}  # the others are like one of these


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind not in DIFFERENT))
        for kind in FAMILIES
        if kind != "kimi_k2" and "_vl_" not in kind  # not models of their own
    ],
)
def test_parameters_are_those_of_the_librarys_models(kind: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="kinds are those of version 5")
    sizes = {"num_hidden_layers": 4, **({"num_experts_per_tok": 6} if kind == "deepseek_v2" else {})}
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    made = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = (made[0] if isinstance(made, tuple) else made)(config)
    found = architecture(json.loads(config.to_json_string(use_diff=False)))
    expected = sum(p.numel() for p in model.parameters())
    assert found.parameters() == pytest.approx(expected, rel=2e-3 if kind == "gpt2" else 1e-3)  # biases
    for place, name in enumerate(found.names):
        assert model.get_submodule(f"{name}.1" if place == 1 else name) is not None
    block = model.get_submodule(f"{found.names[1]}.1")
    norms = [name for name, _ in block.named_children() if "norm" in name.lower() or name.startswith("ln_")]
    assert found.blocks[1].norms == len(norms)
    costs = Setting(found, H100, Job(4096, halves=True)).costs
    names = [layer.name for layer in costs.layers]
    assert names[: names.index(found.names[2])] == [
        layer.name for layer in layers_of(model, halves=True) if layer.kind in ("embedding", "block")
    ]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("falcon", {"parallel_attn": False}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("stablelm", {"use_parallel_residual": True}),
    ],
)
def test_a_switch_for_parallel_blocks_keeps_them_whole(kind: str, more: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="kinds are those of version 5")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    config = transformers.CONFIG_MAPPING[kind](**sizes, **more)
    model = architecture(json.loads(config.to_json_string(use_diff=False)))
    costs = Setting(model, H100, Job(4096, halves=True)).costs
    names = [layer.name for layer in layers_of(config, halves=True)]
    assert [layer.name for layer in costs.layers[:-1]] == names[: len(costs.layers) - 1]
    assert (len(names) > 5) == ("parallel_attn" in more)


def test_layers_of_nemotron_h_by_their_letters() -> None:
    sizes = {"hidden_size": 64, "vocab_size": 100, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
    sizes |= {"conv_kernel": 4, "chunk_size": 16, "model_type": "nemotron_h", "tie_word_embeddings": False}
    found = architecture({**sizes, "hybrid_override_pattern": "M-M*-"})
    assert [[part.parameters() for part in block.parts] for block in found.blocks[1:]] == [
        [2 * 64 * 96],
        [part.parameters() for part in found.blocks[0].parts],
        [64 * 16 * (2 * 4 + 2 * 2)],
        [2 * 64 * 96],
    ]
    assert found.names[2] == "model.norm_f"
    assert Setting(found, H100, Job(64)).costs.layers[1].name == "model.layers.0"
    with pytest.raises(ValueError, match=r"nemotron_h with layers of 'moe' \(or a moe_latent_size\) is not known"):
        architecture({**sizes, "hybrid_override_pattern": "ME", "moe_latent_size": 8})


def test_a_folder_and_capitals_will_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert load_architecture(tmp_path) == architecture(SMALL)
    assert load_hardware("H100") == H100
