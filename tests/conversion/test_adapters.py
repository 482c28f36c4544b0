"""Low-rank adapters, as the peft library puts them beside frozen linears: their W waits, the base has none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.deferred import deferred
from zbkern import testing


class Adapted(nn.Module):
    """In the place of a linear. Has no parameters of its own: the linears inside are called."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        dtype = base.weight.dtype
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False, dtype=dtype)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False, dtype=dtype)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


def with_adapters(model: nn.Sequential) -> nn.Sequential:
    torch.manual_seed(1)
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            setattr(model, name, Adapted(module))
    return model


@pytest.mark.parametrize("adapted_first", [True, False])
def test_w_of_adapters_waits(adapted_first: bool) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    module = with_adapters(copy.deepcopy(base))
    twin = copy.deepcopy(module) if adapted_first else with_adapters(zbkern.convert(base))
    zbkern.convert(twin)  # the adapters, too, where they came later
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    assert zbkern.coverage(twin, lambda: twin(x[0]).sum()) == (1.0, {})
    queue = deferred(module, twin, x, 1e-12)
    trainable = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    assert queue.pending() == len(x) * len(trainable) == 12
    assert all(parameter.grad is None for parameter in twin.parameters())
    queue.run()
    testing.assert_same_gradients(twin, module, tolerance=1e-12)
    assert list(zbkern.restore(twin).state_dict()) == list(module.state_dict())
