"""Quantised checkpoints: read as the numbers that the transformers library reads, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.small_models import DECODERS, config_of, make, transformers
from zbkern.pipeline import cut, export, schedules

safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors library")
BLOCK = 16


def quantised_llama(folder: Path, family: str = "llama", **settings: Any) -> dict[str, Tensor]:
    """A model whose projections are in FP8 with a scale for each block, as DeepSeek-V3 and Qwen3 are published; its
    tensors as they were."""
    make(family).float().save_pretrained(folder)
    state: dict[str, Tensor] = safetensors.load_file(folder / "model.safetensors")
    stored = dict(state)
    for name, weight in state.items():
        if name.endswith("proj.weight") and not any(size % BLOCK for size in weight.shape):
            rows, columns = (size // BLOCK for size in weight.shape)
            tiles = weight.view(rows, BLOCK, columns, BLOCK)
            scale = tiles.abs().amax((1, 3)) / 448
            stored[name] = (tiles / scale[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
    assert len(stored) > len(state)
    safetensors.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    with_settings(folder, quantization_config=method, **settings)
    return state


def with_settings(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))


def read_by_cut(folder: Path, config: Any = None) -> dict[str, Tensor]:
    """The tensors of both chunks by name."""
    config = config or transformers.AutoConfig.from_pretrained(folder)
    chunks = [chunk for rank in range(2) for chunk in cut(config, schedules.zb_h1(2, 2), weights=folder, rank=rank)]
    return {name: value for chunk in chunks for name, value in chunk.state_dict().items()}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_block_scales_are_read_as_the_library_reads_them(family: str, tmp_path: Path) -> None:
    before = quantised_llama(tmp_path, family)
    settings = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    found = read_by_cut(tmp_path)
    assert found.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, check_dtype=False)
        if name in before:
            torch.testing.assert_close(found[name], before[name], rtol=0.1, atol=1e-3)


def test_an_export_of_them_is_one_of_numbers(tmp_path: Path) -> None:
    quantised_llama(tmp_path / "fp8")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "fp8")
    chunks = cut(config, schedules.gpipe(1, 1), weights=tmp_path / "fp8")
    export(tmp_path / "out", chunks)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    assert {value.dtype for value in safetensors.load_file(tmp_path / "out" / "model.safetensors").values()} == {
        torch.float32
    }
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    torch.testing.assert_close(back, dict(chunks[0].whole.state_dict()), rtol=0, atol=0)
    assert config.quantization_config is not None  # the caller's is as it was


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published: two numbers in each byte, and an exponent for each 32."""
    name, sizes = DECODERS["gpt_oss"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, {**sizes, "intermediate_size": 64}))
    model.save_pretrained(tmp_path)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = experts, outputs, inputs // 32
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
    safetensors.save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with_settings(tmp_path, quantization_config={"quant_method": "mxfp4"})
    settings = transformers.Mxfp4Config(dequantize=True)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings).state_dict()
    found = read_by_cut(tmp_path)
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, check_dtype=False)


@pytest.mark.parametrize("method", ["bitsandbytes", "compressed-tensors", "modelopt", "gptq", "awq"])
def test_other_methods_are_refused_by_name(method: str, tmp_path: Path) -> None:
    make("llama").float().save_pretrained(tmp_path)
    config = config_of(*DECODERS["llama"])
    config.quantization_config = {"quant_method": method}
    with pytest.raises(ValueError, match=rf"weights in .* are quantised \({method}\), .* write it in 16 bits first"):
        read_by_cut(tmp_path, config)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_quantised_files_of_a_configuration_that_does_not_say_so_are_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    make("llama").float().save_pretrained(tmp_path)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    safetensors.save_file({**stored, name: stored[name].to(dtype)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"have '{name}' in \w+, which is quantised"):
        read_by_cut(tmp_path)


def test_a_module_of_ones_own_may_have_integers_but_not_for_weights(tmp_path: Path) -> None:
    def model() -> nn.Module:
        with torch.device("meta"):
            layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        layers[1].register_buffer("steps", torch.zeros((), dtype=torch.int8, device="meta"))
        return layers

    state = {name: torch.ones(value.shape, dtype=value.dtype) for name, value in model().state_dict().items()}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    (chunk,) = cut(model(), schedules.gpipe(1, 1), weights=tmp_path)
    assert chunk.get_buffer("1.steps").dtype == torch.int8
    safetensors.save_file({**state, "0.weight": state["0.weight"].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"have '0.weight' in I8, which is quantised"):
        cut(model(), schedules.gpipe(1, 1), weights=tmp_path)


def test_tensors_that_nothing_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bias beside a weight, or its scale, would be missed; another module's may be of no account, as the library
    holds it."""
    make("llama").float().save_pretrained(tmp_path)
    stored, projection = safetensors.load_file(tmp_path / "model.safetensors"), "model.layers.3.mlp.up_proj"
    for end in ("bias", "weight_scale"):
        more = {f"{projection}.{end}": torch.ones(48)}
        safetensors.save_file({**stored, **more}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=rf"have '{projection}.{end}', which the model does not take although"):
            read_by_cut(tmp_path)
    safetensors.save_file({**stored, "visual.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    read_by_cut(tmp_path)
    assert "have tensors that the model does not take: 'visual.weight'" in caplog.text
    caplog.clear()
    safetensors.save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    read_by_cut(tmp_path)
    assert not caplog.text
