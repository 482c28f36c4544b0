"""Models of the transformers library, small and with random weights: deferred gradients equal the untouched model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zbkern
from zbkern import testing

transformers = pytest.importorskip("transformers", reason="needs the transformers library: pip install zbkern[test]")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
TEXT = {**SMALL, "intermediate_size": 48, "max_position_embeddings": 32}


def text(rows: int, length: int, seed: int, vocabulary: int = 61) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(3, vocabulary, (rows, length), generator=generator)
    return {"input_ids": indices, "labels": indices}


def llama(T: Any) -> nn.Module:
    return T.LlamaForCausalLM(T.LlamaConfig(**TEXT, num_key_value_heads=2, tie_word_embeddings=True))


def gpt2(T: Any) -> nn.Module:
    config = T.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return T.GPT2LMHeadModel(config)


def bert(T: Any) -> nn.Module:
    return T.BertForMaskedLM(T.BertConfig(**TEXT, hidden_dropout_prob=0, attention_probs_dropout_prob=0))


def t5(T: Any) -> nn.Module:
    config = T.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=61, dropout_rate=0, decoder_start_token_id=0
    )
    return T.T5ForConditionalGeneration(config)


def vit(T: Any) -> nn.Module:
    config = T.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=5,
    )
    return T.ViTForImageClassification(config)


def mixtral(T: Any) -> nn.Module:
    config = T.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    model = T.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")  # the library's grouped product takes no float64
    return model


def qwen(T: Any) -> nn.Module:
    return T.Qwen2ForCausalLM(T.Qwen2Config(**TEXT, num_key_value_heads=2, tie_word_embeddings=True))


def mamba(T: Any) -> nn.Module:
    config = T.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=61, state_size=4)
    return T.MambaForCausalLM(config)


def images(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(rows, 3, 16, 16, dtype=torch.float64, generator=generator),
        "labels": torch.randint(5, (rows,), generator=generator),
    }


MODELS: list[Callable[[Any], nn.Module]] = [llama, gpt2, bert, t5, vit, mixtral, qwen, mamba]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_state_and_restore(make: Callable[[Any], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make(transformers).double()
    twin = copy.deepcopy(model)
    state = {name: value.clone() for name, value in twin.state_dict().items()}
    kinds = [type(module) for module in twin.modules()]
    parameters = [id(p) for p in twin.parameters()]  # ties show as one parameter less
    assert zbkern.convert(twin) is twin
    assert [id(p) for p in twin.parameters()] == parameters
    assert any(type(module).__module__.startswith("zbkern") for module in twin.modules())
    assert list(twin.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in twin.state_dict().items())

    queue = zbkern.WGradQueue()
    own_precision = Precision()
    for key in range(3):
        batch = images(2, key) if make is vit else text(2, 6 + key, key)
        with own_precision:
            expected = model(**batch).loss
        loss = twin(**batch).loss
        testing.assert_close(loss, expected, "loss", 1e-6)
        expected.backward()
        with queue.defer(key):
            loss.backward()
    assert queue.pending() >= 3 * 8
    for key in reversed(queue.keys()):
        queue.run(key)
    testing.assert_same_gradients(twin, model, tolerance=1e-6 if make in ROUND else 1e-10)
    assert (own_precision.rounded > 3) == (make in ROUND)  # every language model rounds its logits for the loss

    zbkern.restore(twin)
    assert [type(module) for module in twin.modules()] == kinds
    assert not any("zbkern_name" in module.__dict__ for module in twin.modules())


ROUND = (llama, mixtral, qwen, mamba, t5)  # in their norms, rotations or scans


class Precision(TorchDispatchMode):
    """Counts how often a model in float64 rounds to float32 on the way, itself: its gradients are no better then."""

    rounded = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        output = function(*arguments, **(keywords or {}))
        if function is torch.ops.aten._to_copy.default:
            tensor = arguments[0]
            self.rounded += tensor.requires_grad and tensor.dtype == torch.float64 and output.dtype == torch.float32
        return output


def gemma(T: Any) -> nn.Module:
    return T.GemmaForCausalLM(T.GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=8))


@pytest.mark.parametrize("make", [*MODELS, gemma], ids=lambda make: make.__name__)
def test_nothing_stays_unconverted(make: Callable[[Any], nn.Module]) -> None:
    assert zbkern.unconverted(zbkern.convert(make(transformers))) == {}


@pytest.mark.parametrize("make", [llama, t5, mixtral, qwen, mamba], ids=lambda make: make.__name__)
def test_norms_are_the_librarys_and_round_less_in_bf16(make: Callable[[Any], nn.Module]) -> None:
    """The library rounds what it has normalised before the weight, too: ours is nearer to float64 in everything."""
    theirs = next(module for name, module in make(transformers).named_modules() if name.endswith("norm"))
    with torch.no_grad():
        theirs.weight.normal_()
    ours = zbkern.convert(copy.deepcopy(theirs))
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
        assert (a - exact).norm() < 0.8 * (b - exact).norm()


def test_conv1d_stays_what_the_library_recognises() -> None:
    from transformers.pytorch_utils import Conv1D

    model = zbkern.convert(gpt2(transformers))
    layers = [module for module in model.modules() if isinstance(module, Conv1D)]
    assert len(layers) == 8
    assert all(isinstance(layer, zbkern.nn.TransposedLinear) for layer in layers)
