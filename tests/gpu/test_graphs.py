"""Passes of a pipeline in CUDA graphs against the same steps without: losses, gradients, weights, random numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from tests.support import needs_gpu
from tests.support.chunks import on_threads
from zbkern.pipeline import Pipeline, StepOptions, schedules
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.transport.local import LocalTransport

pytestmark = [*needs_gpu.MARKS, pytest.mark.alone]

WIDTH, STEPS = 256, 7


class Block(nn.Module):
    """Layers of zbkern's, a parameter of its own, and dropout."""

    def __init__(self, waits: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)
        self.scale, self.dropout = nn.Parameter(torch.ones(WIDTH)), nn.Dropout(0.2)
        self.waits = waits

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.dropout(self.norm(x))))) * self.scale
        return x + (y if not self.waits or y.sum().item() > 0 else -y)


def losses_and_weights(
    model: list[nn.Module], schedule: Schedule, graphs: bool, fill: str, set_to_none: bool, main_grad: bool
) -> Any:
    model = [zbkern.convert(copy.deepcopy(module)).cuda() for module in model]

    def of_rank(transport: LocalTransport) -> Any:
        mine = [model[chunk] for chunk in schedule.chunks_of(transport.rank)]
        parameters = [parameter for module in mine for parameter in module.parameters()]
        generator, losses = torch.Generator().manual_seed(1), []
        with Pipeline(
            mine, schedule, F.mse_loss, transport, "cuda", fill=fill, options=StepOptions(graphs=graphs)
        ) as pipe:
            for _ in range(STEPS):
                x, y = torch.randn(2, 4 * schedule.microbatches, 32, WIDTH, generator=generator).cuda()
                losses.append(pipe.step(x, y))
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.sub_(parameter.main_grad if parameter.grad is None else parameter.grad, alpha=0.1)
                for module in mine:
                    module.zero_grad(set_to_none=set_to_none)
                for parameter in parameters:
                    if main_grad:
                        parameter.main_grad.zero_()
        return [loss for loss in losses if loss is not None], [parameter.detach() for parameter in parameters]

    for parameter in [parameter for module in model for parameter in module.parameters()] if main_grad else []:
        parameter.main_grad = torch.zeros_like(parameter)
    torch.manual_seed(0)
    results = on_threads(schedule.stages, of_rank)
    assert not [result for result in results if isinstance(result, BaseException)], results
    return results


def check(model: list[nn.Module], schedule: Schedule, **options: Any) -> None:
    options = {"fill": "planned", "set_to_none": True, "main_grad": False, **options}
    expected = losses_and_weights(model, schedule, graphs=False, **options)
    found = losses_and_weights(model, schedule, graphs=True, **options)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("options", [{}, {"fill": "eager"}, {"set_to_none": False}, {"main_grad": True}])
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_h2"])
def test_steps_are_those_without_graphs(name: str, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    check([Block()], getattr(schedules, name)(1, 4), **options)
    assert not [message for message in caplog.messages if "CUDA graphs" in message]


@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
def test_two_ranks_on_threads(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without dropout: threads share the device's random numbers, in whatever order they come."""
    schedule = getattr(schedules, name)(2, 4)
    torch.manual_seed(0)
    check([Block().eval() for _ in schedule.placement], schedule)
    assert not [message for message in caplog.messages if "CUDA graphs" in message]


def test_random_numbers_go_on_after_a_capture_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    check([Block(waits=True)], schedules.zb_h1(1, 2))
    assert "without CUDA graphs, because" in caplog.text
    check([Block()], schedules.zb_h1(1, 2))
