"""Three steps of training in a pipeline over the stand-in, against one process: loss, gradients, weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zbkern
from tests.nccl_standin.ranks import Run
from zbkern.pipeline import Optimizer, Pipeline
from zbkern.schedules.schedule import Schedule

WIDTH, ROWS, STEPS = 4, 2, 3


class Case(NamedTuple):
    """schedules: of the steps, in turn. dtypes: of tensors that chunks hand on beside their output. near: the norm is
    such that only the last rank sees that a step must be clipped, so others take theirs back."""

    schedules: Sequence[Schedule]
    dtypes: Sequence[torch.dtype] = ()
    tied: bool = False
    near: bool = False
    fill: str = "planned"
    undo: str = "snapshot"
    optimizer: bool = True
    length: int = 0  # of sequences


class Part(nn.Module):
    """A residual layer on [rows, length, width], which also hands on what it got, of these dtypes, changed."""

    def __init__(self, number: int, case: Case, last: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dtypes, self.last, self.number = case.dtypes, last, number
        if case.tied and (number == 0 or last):
            self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
            self.tied_parameters = {"shared": self.shared.weight}

    def forward(self, x: Tensor, *others: Tensor, carry: Any = None) -> Any:  # no token sees another
        y = x + self.down(torch.tanh(self.up(x)))
        if hasattr(self, "shared"):
            y = self.shared(y)
        for other in others:
            y = y * (1 + 0.1 * other.to(torch.complex64).real.float())
        if self.last or not self.dtypes:
            return y
        count = torch.arange(3 * WIDTH).view(3, WIDTH)[1:2, :] + self.number
        return y, *((count % 2).to(dtype) for dtype in self.dtypes)


def model_of(case: Case) -> list[nn.Module]:
    torch.manual_seed(1)
    count = len(case.schedules[0].placement)
    parts = [Part(number, case, number == count - 1) for number in range(count)]
    if case.tied:
        parts[-1].shared.weight.data.copy_(parts[0].shared.weight.data)
    return [*parts]


def batch_of(case: Case, step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + step)
    rows = ROWS * case.schedules[step % len(case.schedules)].microbatches
    shape = (rows, case.length, WIDTH) if case.length else (rows, WIDTH)
    return torch.randn(shape), torch.randn(shape) * (1 + 3 * (step == 1))


def whole_step(parts: list[nn.Module], case: Case, step: int) -> Tensor:
    x, y = batch_of(case, step)
    count = case.schedules[step % len(case.schedules)].microbatches
    total = torch.zeros(())
    for inputs, targets in zip(x.chunk(count), y.chunk(count), strict=True):
        out: Any = inputs
        for part in parts:
            out = part(*out) if isinstance(out, tuple) else part(out)
        loss = nn.functional.mse_loss(out, targets) / count
        loss.backward()
        total = total + loss.detach()
    if case.tied:
        weights = [parts[0].shared.weight, parts[-1].shared.weight]
        gradient = weights[0].grad + weights[1].grad
        for weight in weights:
            weight.grad = gradient.clone()
    return total


class Whole(NamedTuple):
    """What one process does: of each step the loss and the gradients by chunk, and the weights at the end."""

    norm: float | None
    losses: list[Tensor]
    gradients: list[list[list[Tensor]]]
    weights: list[list[Tensor]]


def in_one_process(case: Case) -> Whole:
    parts = model_of(case)
    norm = None
    if case.near:
        other = copy.deepcopy(parts)
        whole_step(other, case, 0)
        norm = 0.97 * float(torch.stack([p.grad.norm() for p in _once(other, case)]).norm())
    everything = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(everything, lr=0.01)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(whole_step(parts, case, step))
        gradients.append([[p.grad.clone() for p in part.parameters()] for part in parts])
        if norm is not None:
            total = torch.stack([p.grad.norm() for p in _once(parts, case)]).norm()
            for p in everything:
                p.grad.mul_(min(1.0, norm / (float(total) + 1e-6)))
        if case.optimizer:
            optimizer.step()
    return Whole(norm, losses, gradients, [[p.detach().clone() for p in part.parameters()] for part in parts])


def _once(parts: list[nn.Module], case: Case) -> list[Tensor]:
    doubled = parts[-1].shared.weight if case.tied else None
    return [p for part in parts for p in part.parameters() if p is not doubled]


class Outcome(NamedTuple):
    worst: float  # relative error
    undone: int


def train(case: Case, run: Run, whole: Whole, timeout: float = 20.0) -> list[Outcome]:
    """By rank."""

    def rank(transport: Any) -> Outcome:
        schedule = case.schedules[0]
        chunks = schedule.chunks_of(transport.rank)
        mine = {chunk: zbkern.convert(part) for chunk, part in enumerate(model_of(case)) if chunk in chunks}
        worst = 0.0
        with Pipeline(
            [mine[chunk] for chunk in chunks],
            schedule,
            nn.functional.mse_loss,
            transport,
            fill=case.fill,
            timeout=timeout,
        ) as pipe:
            parameters = [p for part in mine.values() for p in part.parameters()]
            inner = torch.optim.AdamW(parameters, lr=0.01)
            optimizer = Optimizer(inner, pipe, max_norm=whole.norm, undo=case.undo) if case.optimizer else inner
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = pipe.step(*batch_of(case, step), schedule=case.schedules[step % len(case.schedules)])
                if loss is not None:
                    worst = max(worst, float((loss - whole.losses[step]).abs() / whole.losses[step]))
                found = [p.grad for chunk in chunks for p in mine[chunk].parameters()]
                worst = max(worst, *map(_error, found, (g for chunk in chunks for g in whole.gradients[step][chunk])))
                if case.optimizer:
                    optimizer.step()
            if case.optimizer:
                optimizer.validate()
                weights = [weight for chunk in chunks for weight in whole.weights[chunk]]
                worst = max(worst, *map(_error, [p for chunk in chunks for p in mine[chunk].parameters()], weights))
        return Outcome(worst, getattr(optimizer, "undone", 0))

    results = run.run(rank)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _error(found: Tensor, expected: Tensor) -> float:
    error = float((found - expected).detach().norm() / (expected.norm() + 1e-6))
    return error if error == error else float("inf")
