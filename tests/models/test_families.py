"""Of every family of language models in the transformers library, at least 99 % of the weight gradients wait.

Configurations are tiny and weights random; shares are by elements of parameters with two or more dimensions. What
convert changes of a model is undone by restore.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.families import CODERS, at_most, families, loss_of, models_of, transformers
from zbkern import testing

USUAL = ["gemma", "gpt_oss", "jetmoe", "mixtral", "qwen3_moe", "whisper"]
EXPERTS = ("eager", "batched_mm", "grouped_mm")


def check(model: nn.Module, twin: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor] = loss_of) -> None:
    state = [*twin.state_dict()]
    zbkern.convert(twin)
    assert [*twin.state_dict()] == state
    waits = zbkern.coverage(twin, lambda: loss_of(twin))
    assert waits.share >= 0.99, str(waits)
    loss = loss_of(model)
    loss.backward()
    queue = zbkern.WGradQueue()
    with queue.defer():
        own = loss_of(twin)
        own.backward()
    testing.assert_close(own, loss, "loss", 1e-6)
    queue.run()
    testing.assert_same_gradients(twin, model, tolerance=1e-4)
    classes = [[type(module) for module in each.modules()] for each in (zbkern.restore(twin), model)]
    assert classes[0] == classes[1]  # BigBird's forward has put other modules into both


@pytest.mark.parametrize("name", USUAL)
def test_usual(name: str) -> None:
    check(*models_of(name))


@pytest.mark.parametrize("experts", EXPERTS)
def test_every_implementation_of_experts(experts: str) -> None:
    models = models_of("mixtral")
    for model in models:
        model.set_experts_implementation(experts)
    check(*models)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in families() if name not in USUAL])
def test_family(name: str) -> None:
    with at_most(40):
        check(*models_of(name))


BLOCK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def clip(T: Any) -> nn.Module:
    text = {"vocab_size": 61, **BLOCK, "max_position_embeddings": 16, "eos_token_id": 2}
    return T.CLIPModel(T.CLIPConfig(text_config=text, vision_config={**BLOCK, "image_size": 16, "patch_size": 4}))


def whisper(T: Any) -> nn.Module:
    coders = {f"{coder}_{name}": value for coder in ("encoder", "decoder") for name, value in CODERS.items()}
    lengths = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = T.WhisperConfig(vocab_size=61, d_model=32, dropout=0.0, **coders, **lengths, **tokens)
    return T.WhisperForConditionalGeneration(config)


def t5(T: Any) -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    return T.T5ForConditionalGeneration(T.T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0))


def swin(T: Any) -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "window_size": 4}
    config = T.SwinConfig(**sizes, depths=[2, 2], num_heads=[2, 4], drop_path_rate=0.0, **DROP)
    return T.SwinForImageClassification(config)


def convnext(T: Any) -> nn.Module:
    config = T.ConvNextConfig(depths=[1, 1], hidden_sizes=[8, 16], num_stages=2, drop_path_rate=0.0)
    return T.ConvNextForImageClassification(config)


def encoder_layer(T: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("make", [clip, whisper, t5, swin, convnext, encoder_layer], ids=lambda make: make.__name__)
def test_other_models(make: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 60, (2, 12), generator=generator)
    images, labels = torch.randn(2, 3, 16, 16, generator=generator), torch.tensor([0, 1])
    batch: dict[str, Any] = {
        "clip": {"input_ids": text, "pixel_values": images, "return_loss": True},
        "whisper": {"input_features": torch.randn(2, 8, 40, generator=generator), "labels": text},
        "t5": {"input_ids": text, "labels": text},
        "encoder_layer": {"src": torch.randn(2, 5, 16, generator=generator)},
    }.get(make.__name__, {"pixel_values": images, "labels": labels})
    torch.manual_seed(0)
    model, twin = (make(transformers).train() for _ in range(2))
    twin.load_state_dict(model.state_dict())

    def loss(model: nn.Module) -> torch.Tensor:
        found = model(**batch)
        return found.square().mean() if isinstance(found, torch.Tensor) else found.loss

    check(model, twin, loss)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral", "mamba", "t5"])
def test_norms_are_the_librarys_and_round_less_in_bf16(name: str) -> None:
    """The library rounds what it has normalised before the weight, too: ours is nearer to float64 in everything."""
    if name == "t5":
        theirs = transformers.models.t5.modeling_t5.T5LayerNorm(32)
    else:
        theirs = next(module for key, module in models_of(name)[0].named_modules() if key.endswith("norm"))
    with torch.no_grad():
        theirs.weight.normal_()
    ours = zbkern.convert(copy.deepcopy(theirs))
    assert isinstance(ours, zbkern.nn.ForeignRMSNorm)
    assert isinstance(ours, type(theirs))
    x, dy = torch.randn(2, 64, 32)
    assert torch.equal(ours(x), theirs(x))
    results = []
    for module, dtype in ((ours, torch.bfloat16), (theirs, torch.bfloat16), (theirs, torch.float64)):
        own = x.bfloat16().to(dtype).requires_grad_()
        y = module.bfloat16().to(dtype)(own)
        assert y.dtype == dtype
        y.backward(dy.bfloat16().to(dtype))
        results.append([t.detach().double() for t in (y, own.grad, module.weight.grad)])
        module.zero_grad()
    for a, b, exact in zip(*results, strict=True):
        assert (a - exact).norm() <= (1.05 if name == "gpt_oss" else 0.8) * (b - exact).norm()


def test_conv1d_stays_what_the_library_recognises() -> None:
    from transformers.pytorch_utils import Conv1D

    layers = [module for module in zbkern.convert(models_of("gpt2")[0]).modules() if isinstance(module, Conv1D)]
    assert len(layers) == 8
    assert all(isinstance(layer, zbkern.nn.TransposedLinear) for layer in layers)
