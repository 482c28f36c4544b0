"""convert keeps objects, parameters, hooks and keys; restore undoes it; left_alone says what stayed and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zbkern


class Special(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def make() -> nn.Module:
    return nn.ModuleDict(
        {
            "plain": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.RMSNorm(4)),
            "embedding": nn.Embedding(5, 4),
            "special": Special(4, 4),
            "sparse": nn.Embedding(5, 4, sparse=True),
            "planes": nn.LayerNorm((2, 4)),
            "convolution": nn.Conv1d(2, 2, 1),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        }
    )


def test_convert_keeps_everything_and_restore_undoes_it() -> None:
    model = make()
    kinds, objects = [type(m) for m in model.modules()], [id(m) for m in model.modules()]
    parameters, keys = [id(p) for p in model.parameters()], list(model.state_dict())
    calls = []
    model["plain"][0].register_forward_hook(lambda *_: calls.append(1))
    assert zbkern.convert(model) is model
    assert type(model["plain"][0]) is zbkern.nn.Linear
    assert type(model["plain"][2]) is zbkern.nn.LayerNorm
    assert type(model["plain"][3]) is zbkern.nn.RMSNorm
    assert type(model["embedding"]) is zbkern.nn.Embedding
    assert isinstance(model["plain"][0], nn.Linear)
    assert model["plain"][0].zbkern_name == "plain.0"
    model["plain"](torch.randn(2, 4))
    assert calls == [1]
    zbkern.convert(model)  # a second time changes nothing
    assert [id(m) for m in model.modules()] == objects
    assert [id(p) for p in model.parameters()] == parameters
    assert list(model.state_dict()) == keys
    assert zbkern.restore(model) is model
    assert [type(m) for m in model.modules()] == kinds


def test_left_alone_gives_names_and_reasons() -> None:
    reasons = zbkern.left_alone(zbkern.convert(make()))
    assert "subclass of Linear" in reasons.pop("special")
    assert "sparse" in reasons.pop("sparse")
    assert "2 dimensions" in reasons.pop("planes")
    assert "Conv1d has no zbkern twin" in reasons.pop("convolution")
    assert [name for name in reasons if name.startswith("normed")]
    assert all(name.startswith("normed") for name in reasons)


def test_filter_chooses() -> None:
    model = zbkern.convert(make(), filter=lambda name, module: name == "plain.0")
    assert type(model["plain"][0]) is zbkern.nn.Linear
    assert type(model["embedding"]) is nn.Embedding
    assert "filtered out" in zbkern.left_alone(model)["embedding"]
    zbkern.convert(model)
    zbkern.restore(model, filter=lambda name, module: name == "embedding")
    assert type(model["plain"][0]) is zbkern.nn.Linear
    assert type(model["embedding"]) is nn.Embedding


def test_a_single_module_is_a_model_too() -> None:
    assert type(zbkern.convert(nn.Linear(2, 2))) is zbkern.nn.Linear


@pytest.mark.parametrize("function", [zbkern.convert, zbkern.restore])
def test_arguments_are_checked(function) -> None:
    with pytest.raises(TypeError, match=f"{function.__name__}: model must be a torch.nn.Module; got str"):
        function("model")
    with pytest.raises(TypeError, match=f"{function.__name__}: filter must be callable"):
        function(nn.Linear(2, 2), filter="plain")
