"""Training with captured passes and without, for comparison. Graphs are recorded operations (recorded_graphs.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbkern
from tests.support.chunks import WIDTH, needed, run_pipelines
from tests.support.recorded_graphs import RecordedGraphs
from zbkern.pipeline import Pipeline, StepOptions, schedules
from zbkern.pipeline.schedules.schedule import Schedule

GRAPHS = StepOptions(graphs=True)


def batches(schedule: Schedule, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = (2 * schedule.microbatches, 5, WIDTH), (2 * schedule.microbatches, 5, 3)
    return [
        tuple(torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes) for _ in range(steps)
    ]


def train(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    options: StepOptions | None,
    data: Sequence[Any],
    between: Callable[[int, Sequence[nn.Module]], None] = lambda step, modules: None,
    loss_fn: Any = F.mse_loss,
    set_to_none: bool = True,
    **more: Any,
) -> list[Any]:
    """By rank, of every step: its loss, the gradients; at the end the weights and buffers, too."""
    modules = [zbkern.convert(module) for module in copy.deepcopy([*modules])]
    torch.manual_seed(0)

    def of_rank(pipe: Pipeline) -> list[Any]:
        mine = [modules[chunk] for chunk in schedule.chunks_of(pipe.rank)]
        parameters = [*dict.fromkeys(parameter for module in mine for parameter in module.parameters())]
        optimizer, found = torch.optim.AdamW(parameters, lr=0.05), []
        for step, batch in enumerate(data):
            between(step, mine)
            loss = pipe.step(*needed(pipe, *batch))
            found.append((loss, [None if p.grad is None else p.grad.clone() for p in parameters]))
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return [*found, [module.state_dict() for module in mine]]

    return run_pipelines(schedule, modules, of_rank, loss_fn, options=options, **more)


def check(modules: Sequence[nn.Module], schedule: Schedule, data: Sequence[Any], **more: Any) -> int:
    """Trains with graphs and without: the same but for the rounding of float64. Returns how many graphs there were."""
    expected = train(modules, schedule, None, data, **{key: each for key, each in more.items() if key != "graphs"})
    before = RecordedGraphs.graphs
    found = train(modules, schedule, more.pop("graphs", GRAPHS), data, **more)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    return RecordedGraphs.graphs - before


def check_one(module: nn.Module, steps: int = 5, microbatches: int = 2, **more: Any) -> int:
    schedule = schedules.zb_h1(1, microbatches)
    return check([module], schedule, more.pop("data", None) or batches(schedule, steps), **more)


def assert_told(caplog: pytest.LogCaptureFixture, reason: str, what: str = "F, B and W") -> None:
    assert caplog.messages == [f"chunk 0: its {what} run without CUDA graphs, because {reason}"]


class Wrapped(nn.Module):
    """A linear layer and what a subclass makes of its output."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(WIDTH, 3).double()
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.double)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)
