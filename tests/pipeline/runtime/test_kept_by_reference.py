"""What is kept by reference past a pass or a send is a copy, or is checked where it is used: one row for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import one_rank, run_pipelines
from tests.support.schedules import schedule_of
from zbkern.pipeline import PipelineError, StepOptions, schedules

ROWS = torch.arange(8.0).repeat_interleave(2)[:, None].expand(16, 4).contiguous()  # a number for each microbatch


class First(nn.Module):
    """Returns a tensor that its next forward overwrites, a buffer or an attribute."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.linear, mark = nn.Linear(4, 4), torch.zeros(8)
        self.register_buffer("mark", mark) if buffer else setattr(self, "mark", mark)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.mark.fill_(float(x[0, 0]))
        return self.linear(x), self.mark


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[float, float]] = []

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        self.seen.append((mark.min().item(), mark.max().item()))
        return self.linear(x)


@pytest.mark.parametrize("buffer", [True, False])
def test_what_a_chunk_returns_may_be_overwritten(buffer: bool) -> None:
    chunks = [zbkern.convert(First(buffer)), zbkern.convert(Last())]
    run_pipelines(schedules.gpipe(2, 8), chunks, lambda pipe: [pipe.step(ROWS, ROWS) for _ in range(3)], timeout=60)
    assert chunks[1].seen == [(float(i % 8), float(i % 8)) for i in range(24)]


class Changes(nn.Module):
    """Its forward changes something in place once it has run."""

    def __init__(self, change: Callable[[Any, Tensor, Tensor | None], object]) -> None:
        super().__init__()
        self.linear = zbkern.convert(nn.Linear(4, 4))
        self.change = change

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x).sigmoid()
        z = y * 2
        self.change(y, x, mask)
        return z if mask is None else z * mask[:, None].clone()


class ChangesTheFirst:
    """Changes what it was given first when it is given the next, which comes in the forward of another microbatch."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        self.change = change
        self.first: Tensor | None = None

    def __call__(self, y: Tensor, x: Tensor, mask: Tensor | None) -> None:
        if self.first is not None:
            self.change(self.first)
        self.first = x


PLAIN, RECOMPUTED = "0F0 0F1 0B0 0B1 0W0 0W1", "0F0 0F1 0R0 0B0 0B1 0W0 0W1"
OFFLOADED = "0F0 0O0 0F1 0L0 0B0 0B1 0W0 0W1"
W_AFTER_F, W_OFFLOADED = "0F0 0B0 0F1 0B1 0W0 0W1", "0F0 0B0 0O0 0F1 0B1 0L0 0W0 0W1"
SAVED, BEFORE_W = "was modified in place after its forward", "needs was modified in place between B and W"


@pytest.mark.parametrize(
    ("rows", "change", "where", "message"),
    [
        # what autograd saves, on the device, on the host, and what an R computes again
        (PLAIN, lambda y, x, mask: y.add_(1), "chunk", "modified by an inplace operation"),
        (OFFLOADED, lambda y, x, mask: y.add_(1), "chunk", SAVED),
        (RECOMPUTED, lambda y, x, mask: y.add_(1), "chunk", SAVED),
        # what an R, and the next forward, read again: inputs, targets, side inputs
        (RECOMPUTED, lambda y, x, mask: x.add_(1), "chunk", "was modified in place"),
        (RECOMPUTED, lambda y, x, mask: x.add_(1), "loss", "modified by an inplace operation|was modified in place"),
        (RECOMPUTED, lambda y, x, mask: mask.add_(1), "side", "modified in place"),
        (PLAIN, lambda y, x, mask: mask.add_(1), "side", "side inputs .*'mask'.* were modified in place"),
        # what W reads, written as torch counts it and as it does not
        (W_AFTER_F, lambda first: first.add_(1), "later", BEFORE_W),
        (W_AFTER_F, lambda first: first.data.add_(1), "later", BEFORE_W),
        (W_AFTER_F, lambda first: first.numpy().fill(2), "later", BEFORE_W),
        (W_OFFLOADED, lambda first: first.data.add_(1), "later", BEFORE_W),
    ],
)
def test_what_changes_while_it_is_kept_is_told(rows: str, change: Any, where: str, message: str) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            change(output, target, None)
        return nn.functional.mse_loss(output, target)

    if where == "later":
        change = ChangesTheFirst(change)
    module = Changes((lambda y, x, mask: None) if where == "loss" else change)
    inputs, targets = ([torch.ones(2, 4), torch.ones(2, 4)] for _ in range(2))  # parts of one tensor have one version
    pipe = one_rank(module, schedule_of(rows, microbatches=2), loss_fn)
    with pytest.raises(PipelineError, match=message), pipe:
        pipe.step(inputs, targets, {"mask": torch.ones(4)} if where == "side" else None)


@pytest.mark.parametrize("always", [False, True])
def test_values_that_w_reads_are_compared_in_two_steps_or_in_all(always: bool) -> None:
    module, data, compared = zbkern.convert(nn.Linear(4, 4)), torch.ones(4, 4), []
    with one_rank(module, schedule_of(PLAIN, microbatches=2), options=StepOptions(check_values=always)) as pipe:
        pipe.queue.listeners.append(lambda tasks: compared.extend(task._sums is not None for task in tasks))
        for _ in range(4):
            pipe.step(data, data)
    assert compared == [True] * 4 + [always] * 4


def test_values_are_compared_in_the_first_two_steps_in_which_w_waits() -> None:
    """Steps before have a schedule in which none does."""
    module, data, compared = zbkern.convert(nn.Linear(4, 4)), torch.ones(4, 4), []
    with one_rank(module, schedules.gpipe(1, 2)) as pipe:
        pipe.queue.listeners.append(lambda tasks: compared.extend(task._sums is not None for task in tasks))
        for _ in range(3):
            pipe.step(data, data)
        compared.clear()
        for _ in range(3):
            pipe.step(data, data, schedule=schedule_of(PLAIN, microbatches=2))
    assert compared == [True] * 4 + [False] * 2


def test_side_inputs_that_a_slice_changes_are_told() -> None:
    """A tensor that is not cut is every slice's, and every chunk reads it. Here from the second step on: in the first,
    a comparison with whole sequences would tell that they differ."""

    class Scaled(nn.Linear):
        change = 0

        def forward(self, x: Tensor, scale: Tensor, carry: Any = None) -> Tensor:
            return super().forward(x) * (scale.add_(self.change).clone() if self.change else scale)

    module = Scaled(4, 4)
    schedule, data = schedules.one_f_one_b(1, 1, slices=2), torch.ones(1, 6, 4)
    message = r"action 0F1 \(slice 1 of microbatch 0\): .*side inputs of slice 1 of microbatch 0, .*'scale'.* were mod"
    pipe = one_rank(module, schedule)
    pipe.step(data, data, [{"scale": torch.ones(4)}])
    module.change = 1
    with pytest.raises(PipelineError, match=message), pipe:
        pipe.step(data, data, [{"scale": torch.ones(4)}])
