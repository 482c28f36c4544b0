"""Models of the transformers library through convert and restore: keys, classes, and gradients in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zbkern
from tests.support.families import models_of
from zbkern import testing

transformers = pytest.importorskip("transformers", minversion="5.0", reason="families are those of version 5 and later")

ROUND = ("llama", "mixtral", "qwen2", "mamba")  # in their norms, rotations or scans
MODELS = ("gpt2", "bert", *ROUND)


def small(name: str) -> nn.Module:
    model = models_of(name)[0]
    if name == "mixtral":
        model.set_experts_implementation("eager")  # the library's grouped product takes no float64
    return model


def text(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    indices = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": indices, "labels": indices}


class Precision(TorchDispatchMode):
    """Counts how often a model in float64 rounds to float32 on the way, itself: its gradients are no better then."""

    rounded = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        output = function(*arguments, **(keywords or {}))
        if function is torch.ops.aten._to_copy.default:
            tensor = arguments[0]
            self.rounded += tensor.requires_grad and tensor.dtype == torch.float64 and output.dtype == torch.float32
        return output


@pytest.mark.parametrize("name", MODELS)
def test_gradients_state_and_restore(name: str) -> None:
    model = small(name).double()
    twin = copy.deepcopy(model)
    state = {key: value.clone() for key, value in twin.state_dict().items()}
    kinds = [type(module) for module in twin.modules()]
    parameters = [id(p) for p in twin.parameters()]  # ties show as one parameter less
    assert zbkern.convert(twin) is twin
    assert zbkern.unconverted(twin) == {}
    assert [id(p) for p in twin.parameters()] == parameters
    assert list(twin.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in twin.state_dict().items())

    queue, own_precision = zbkern.WGradQueue(), Precision()
    for key in range(3):
        batch = text(2, 6 + key, key)
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
    testing.assert_same_gradients(twin, model, tolerance=1e-6 if name in ROUND else 1e-10)
    assert (own_precision.rounded > 3) == (name in ROUND)  # every language model rounds its logits for the loss

    zbkern.restore(twin)
    assert [type(module) for module in twin.modules()] == kinds
    assert not any("zbkern_name" in module.__dict__ for module in twin.modules())


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral", "mamba", "t5"])
def test_norms_are_the_librarys_and_round_less_in_bf16(name: str) -> None:
    """The library rounds what it has normalised before the weight, too: ours is nearer to float64 in everything."""
    if name == "t5":
        theirs = transformers.models.t5.modeling_t5.T5LayerNorm(32)
    else:
        theirs = next(module for key, module in small(name).named_modules() if key.endswith("norm"))
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

    layers = [module for module in zbkern.convert(small("gpt2")).modules() if isinstance(module, Conv1D)]
    assert len(layers) == 8
    assert all(isinstance(layer, zbkern.nn.TransposedLinear) for layer in layers)
