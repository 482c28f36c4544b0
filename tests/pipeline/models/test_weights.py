"""Chunks from the meta device read only their own tensors; random ones do not depend on the cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.chunks import assert_same
from tests.support.resident import Resident
from tests.support.small_models import BERT, KINDS, TEXT, config_of, make, small, tensors, transformers
from zbkern.pipeline import cut, export, schedules
from zbkern.pipeline.models import weights as loading

safetensors = pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")

FAMILIES = [
    "llama",
    "qwen3_moe",
    *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "mixtral", "deepseek_v3")),
]
ALONE, TWO = schedules.one_f_one_b(1, 2), schedules.zb_h1(2, 2)


def empty(model: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(model.config)


def test_a_rank_reads_its_own_tensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()

    class Recorded:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, index: Any) -> torch.Tensor:
            read.add(self.name)
            return self.inner[index]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    stored = loading._stored
    monkeypatch.setattr(loading, "_stored", lambda *a: {name: Recorded(name, s) for name, s in stored(*a).items()})
    model = make("llama").float()
    model.save_pretrained(tmp_path)
    skeleton = empty(model)
    first, last = (cut(skeleton, TWO, weights=tmp_path, rank=rank) and (set(read), read.clear())[0] for rank in (0, 1))
    names = {name for name in model.state_dict() if name != "lm_head.weight"}
    assert first | last == names
    assert first & last == {"model.embed_tokens.weight"}  # it is the head, too
    assert all(parameter.is_meta for parameter in skeleton.parameters())


def test_random_weights_are_those_of_a_seed() -> None:
    """On any cut: test_models_differential.py."""
    config = make("llama").config
    whole, other = (tensors(cut(config, ALONE, seed=seed)) for seed in (3, 4))
    assert torch.equal(whole["lm_head.weight"], whole["model.embed_tokens.weight"])
    matrices = [name for name, value in whole.items() if value.dim() > 1]
    assert not any(torch.equal(whole[name], other[name]) for name in matrices)
    assert all(0 < whole[name].std() < 0.1 for name in matrices)


def test_on_the_meta_device_nothing_is_read_or_drawn() -> None:
    (chunk,) = cut(make("llama").config, ALONE, device="meta", weights="no folder")
    assert all(parameter.is_meta for parameter in chunk.parameters())


def test_tied_weights_of_a_rank_are_one_parameter(tmp_path: Path) -> None:
    model = make("llama").float()
    model.save_pretrained(tmp_path)
    for weights in (None, tmp_path):
        first, last = cut(empty(model), schedules.zb_v(2, 2), weights=weights, rank=0)
        assert first.get_parameter("model.embed_tokens.weight") is last.get_parameter("lm_head.weight")


def test_modules_of_ones_own(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))

    with torch.device("meta"):
        model = build()
    drawn = tensors(chunk for rank in range(2) for chunk in cut(model, TWO, [0, 1], rank=rank))
    assert all(torch.equal(value, drawn[name]) for name, value in tensors(cut(model, ALONE, [0])).items())
    export(tmp_path, cut(model, ALONE, [0]))
    read = tensors(chunk for rank in range(2) for chunk in cut(model, TWO, [0, 2], weights=tmp_path, rank=rank))
    assert all(torch.equal(value, read[name]) for name, value in drawn.items())

    def ones(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    assert all((value == 1).all() for value in tensors(cut(model, ALONE, [0], init=ones)).values())


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    model = make("llama").float()
    model.save_pretrained(tmp_path)
    for weights in (None, tmp_path):
        skeleton = empty(model)
        skeleton.model.layers[0].requires_grad_(False)
        chunk = cut(skeleton, ALONE, weights=weights)[0]
        frozen = {name for name, parameter in chunk.named_parameters() if not parameter.requires_grad}
        assert frozen == {name for name in chunk.state_dict() if name.startswith("model.layers.0.")}


@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_a_tied_head_is_found_under_the_librarys_names(kind: str, tmp_path: Path) -> None:
    """Files of models with images have other names than these models."""
    name, sizes, *_ = KINDS[kind]
    config = config_of(name, {**sizes, "tie_word_embeddings": True})
    config.text_config.tie_word_embeddings = True
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        again = type(model)(model.config)
    loaded = tensors(chunk for rank in range(2) for chunk in cut(again, TWO, weights=tmp_path, rank=rank))
    assert_same(loaded, dict(model.state_dict()))


def test_a_tied_head_that_is_defined_first_is_found(tmp_path: Path) -> None:
    """The library stores it under the name of the embedding, which is not the first that the model has for it."""
    model = transformers.XLMRobertaForCausalLM(config_of("XLMRoberta", {**BERT, "is_decoder": True})).float()
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    loaded = tensors(chunk for rank in range(2) for chunk in cut(config, TWO, weights=tmp_path, rank=rank))
    assert_same(loaded, dict(model.state_dict()))


def test_what_cannot_be_filled_is_named(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    with torch.device("meta"):
        model = nn.Sequential(Scale())
    with pytest.raises(
        ValueError, match=r"'0.factor' must get its values from weights=, from init=, or from reset_par"
    ):
        cut(model, ALONE, [0])
    with pytest.raises(ValueError, match=r"must be a folder that holds model.safetensors.index.json or"):
        cut(model, ALONE, [0], weights=tmp_path)
    safetensors.torch.save_file({"0.factor": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'0.factor' is \[3\] in the model and \[4\]"):
        cut(model, ALONE, [0], weights=tmp_path)
    safetensors.torch.save_file({"1.factor": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'0.factor' is not there"):
        cut(model, ALONE, [0], weights=tmp_path)


def test_a_buffer_that_nothing_fills_is_named(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)

    with torch.device("meta"):
        model = nn.Sequential(Masked())
    safetensors.torch.save_file({"0.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'0.mask' must get its values from"):
        cut(model, ALONE, [0], weights=tmp_path)


def test_files_of_the_model_without_its_head(tmp_path: Path) -> None:
    """As GPT-2 is on the hub: names begin below the base model, and a tied head is not there."""
    for family in ("llama", "gpt2"):
        model = make(family).float()
        model.base_model.save_pretrained(tmp_path / family)
        loaded = tensors(c for rank in range(2) for c in cut(model.config, TWO, weights=tmp_path / family, rank=rank))
        assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    model = make("llama").float()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = safetensors.torch.load_file(path)
    safetensors.torch.save_file({f"module.{name}": value for name, value in stored.items()}, path)
    with pytest.raises(
        ValueError, match=r"'model.embed_tokens.weight' is not there; names there are such as 'module\."
    ):
        cut(model.config, TWO, weights=tmp_path, rank=0)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors: "):
        cut(model.config, TWO, weights=tmp_path, rank=0)
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    (tmp_path / "parts" / "model-00002-of-00008.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*model-00002-of-00008\.safetensors: there is no such file"):
        cut(model.config, TWO, weights=tmp_path / "parts", rank=0)
    path.unlink()
    with pytest.raises(ValueError, match="has neither: from_pretrained"):
        cut(model.config, TWO, weights=tmp_path, rank=0)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("shards", ["10MB", pytest.param("1GB", marks=pytest.mark.slow)])
def test_no_rank_holds_the_whole_model(tmp_path: Path, shards: str) -> None:
    """What a rank has in memory while it cuts and reads is about its chunk, with one file and with many."""
    sizes = {"num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(hidden_size=512, intermediate_size=2048, **sizes)
    model = transformers.LlamaForCausalLM(config)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert whole > 128e6
    model.save_pretrained(tmp_path, max_shard_size=shards)
    del model
    four = schedules.one_f_one_b(4, 4)
    cut(config, four, weights=tmp_path, rank=0)  # what is imported on the way
    for rank, source in ((0, tmp_path), (2, tmp_path), (3, None)):
        with Resident() as resident:
            chunks = cut(config, four, weights=source, rank=rank)
        mine = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
        assert mine < 0.3 * whole
        assert resident.peak < mine + 0.15 * whole, f"rank {rank}: {resident.peak / 1e6:.0f} MB, {mine / 1e6:.0f} MB"
        del chunks


def test_weights_that_one_layer_has_twice(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.bias = self.a.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model = nn.Sequential(Twice(), nn.Linear(4, 2))
    export(tmp_path, cut(model, ALONE, [0]))
    with torch.device("meta"):
        empty_model = nn.Sequential(Twice(), nn.Linear(4, 2))
    (chunk,) = cut(empty_model, ALONE, [0], weights=tmp_path)
    assert chunk.get_parameter("0.a.bias") is chunk.get_parameter("0.b.bias")
    assert all(torch.equal(value, chunk.state_dict()[name]) for name, value in model.state_dict().items())


def test_an_index_names_files_of_its_folder(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    export(inside, cut(small(), ALONE, [0]), max_shard_bytes=50)
    index = inside / "model.safetensors.index.json"
    text = index.read_text()
    for outside in ("../model.safetensors", str(tmp_path / "model.safetensors")):
        index.write_text(text.replace("model-00001-of-00003.safetensors", outside))
        with torch.device("meta"):
            model = small()
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json must name files of its own folder; got"):
            cut(model, ALONE, [0], weights=inside)


@pytest.mark.parametrize("index", ['{"weight_map": {"0.weight": 3}}', '{"weight_map": [1]}', "[]", "{}", "no JSON"])
def test_an_index_that_is_none_is_refused(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with torch.device("meta"):
        model = small()
    with pytest.raises(ValueError, match=r'cut: weights: .*index.json must have a "weight_map" of names'):
        cut(model, ALONE, [0], weights=tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"0.weight": "pipe"}}')
    with torch.device("meta"):
        model = small()
    with pytest.raises(ValueError, match=r"cut: weights: cannot read .*pipe: there is no such file"):
        cut(model, ALONE, [0], weights=tmp_path)


@pytest.mark.parametrize("reads", [True, False])
def test_buffers_that_the_model_around_them_sets(reads: bool, tmp_path: Path) -> None:
    """Falcon-H1's multipliers, which are in no file and are those of the configuration."""
    sizes = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}
    config = transformers.FalconH1Config(
        **sizes, mamba_n_groups=1, mamba_d_state=8, mamba_expand=2, ssm_multipliers=[0.5, 2.0, 3.0, 4.0, 5.0]
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    for rank in range(2):
        (chunk,) = cut(config, TWO, weights=tmp_path if reads else None, rank=rank)
        own = [name for name in chunk.layer_names if ".layers." in name]
        assert own
        for name in own:
            buffer = f"{name}.mamba.mup_vector"
            assert torch.equal(chunk.get_buffer(buffer), model.get_buffer(buffer))
