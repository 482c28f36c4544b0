"""Random models, schedules and options in a pipeline against one process with plain torch, in float64.

Every slow run has another seed, which an error names: ZBKERN_SEED=... repeats it.
"""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.random_chunks import (
    BY_TOKEN,
    IN_SLICES,
    OTHERS,
    TOKENS,
    WIDTH,
    Chunk,
    Hooked,
    Penalised,
    randn,
)
from tests.support.random_schedules import is_valid, random_rows
from zbkern.pipeline import Optimizer, Pipeline, Schedule, StepOptions, schedules
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.schedules.dependencies import order_of_running

READS = ("validate", "weights", "state", "another pipeline", "after the next step")


class Case:
    """What a seed stands for: a model in chunks, a schedule, options, and batches of some steps."""

    def __init__(self, rng: random.Random) -> None:
        torch.manual_seed(rng.getrandbits(32))
        self.rng = rng
        self.sliced = rng.random() < 0.2
        self.schedule = sliced_schedule(rng) if self.sliced else random_schedule(rng)
        count = len(self.schedule.placement)
        self.saves = any(action.kind in "ROL" for row in self.schedule.actions for action in row)
        self.tied = count > 1 and rng.random() < 0.3
        kinds = IN_SLICES if self.sliced else BY_TOKEN + OTHERS
        if self.schedule.ranks == 1 and not self.sliced:
            kinds = [*kinds, lambda: nn.Dropout(0.3)]
        self.chunks = [
            Chunk(
                [rng.choice(kinds)() for _ in range(rng.randint(1, 3))],
                "tensor" if chunk == count - 1 else rng.choice(["tensor", "tuple", "dict"]),
                self.tied and chunk in (0, count - 1),
            ).double()
            for chunk in range(count)
        ]
        if self.tied and self.schedule.placement[0] == self.schedule.placement[-1]:
            self.chunks[-1].tied = self.chunks[0].tied
        elif self.tied:
            self.chunks[-1].tied.data.copy_(self.chunks[0].tied.data)
        self.fill = "planned" if self.saves else rng.choice(["planned", "eager"])
        self.options = StepOptions(
            max_wgrad_bytes=None if self.saves else rng.choice([None, None, 0, 1000]),
            copy_size=rng.choice([1, 300, 2**26]),
            check_values=rng.random() < 0.5,
        )
        self.merge = rng.choice([True, False])
        self.make_optimizer = rng.choice([None, *OPTIMIZERS])
        self.max_norm, self.undo = rng.choice([None, 0.1, 10.0]), rng.choice(["snapshot", None])
        self.loss = rng.choice([*LOSSES])
        self.side = rng.random() < 0.5
        self.rows = rng.choice(["plain", "padded on the left", "padded on the right", "packed"])
        self.steps = [self.batch() for _ in range(rng.randint(1, 3))]
        self.changes = [rng.random() for _ in self.steps]
        self.reads = [
            *rng.choices(READS, k=len(self.steps) - 1),
            rng.choice(READS[:-1]),
        ]

    def batch(self) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Inputs, targets and side inputs of every sequence; targets of padding are 0."""
        rows, found = self.rng.randint(1, 3), []
        for _ in range(self.schedule.microbatches):
            target = randn(rows, TOKENS, WIDTH)
            side = {"scale": randn(rows, TOKENS, 1)} if self.side else {}
            ends = torch.tensor([self.rng.randint(1, TOKENS) for _ in range(rows)])[:, None]
            if self.sliced and self.rows == "packed":
                side["position_ids"] = torch.arange(TOKENS) - ends * (torch.arange(TOKENS) >= ends)
            elif self.sliced and self.rows != "plain":
                mask = (torch.arange(TOKENS) < ends).long()
                side["attention_mask"] = mask.flip(1) if self.rows == "padded on the left" else mask
                target = target * side["attention_mask"][..., None]
            found.append((randn(rows, TOKENS, WIDTH), target, side))
        return found

    def change(self, chunks: list[Chunk], step: int) -> None:
        """What users do between steps."""
        parameters = [p for chunk in chunks for p in chunk.pieces.parameters()]
        chosen = parameters[int(self.changes[step] * len(parameters))] if parameters else None
        if self.changes[step] < 0.3 and chosen is not None and self.make_optimizer is None:
            chosen.requires_grad_(not chosen.requires_grad)
        if self.changes[step] > 0.7:
            chunks[int(self.changes[step] * 7) % len(chunks)].train(step % 2 == 1)

    def describe(self) -> str:
        pieces = [[type(piece).__name__ for piece in chunk.pieces] for chunk in self.chunks]
        names = ("loss", "rows", "fill", "options", "merge", "tied", "side", "max_norm", "undo", "reads")
        told = {name: vars(self)[name] for name in names}
        return f"{pieces}\n{told}\n{self.schedule.to_csv()}"


def counted(target: Tensor) -> Tensor:
    """[rows, tokens], 0 for padding."""
    return (target != 0).any(-1).double()


def sum_of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).square().sum(-1) * counted(target)).sum() / 10


sum_of_tokens.reduction = "sum"  # type: ignore[attr-defined]


def weighed(output: Tensor, target: Tensor) -> Tensor:
    """A mean by weights of the targets' own."""
    weights = target.square().sum(-1)
    return ((output - target).square().sum(-1) * weights).sum() / weights.sum()


def mean_of_rows(output: Tensor, target: Tensor) -> Tensor:
    each, which = (output - target).square().sum(-1), counted(target)
    return ((each * which).sum(1) / which.sum(1)).mean()


def ratio(output: Tensor, target: Tensor) -> Tensor:
    """One per sequence, clipped."""
    ratios = torch.exp((output * target).sum(-1).mean(1) / 10)
    return torch.minimum(ratios, ratios.clamp(0.8, 1.2)).sum() + output.square().mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.mse_loss,
    "sum": sum_of_tokens,
    "weighed": weighed,
    "mean of rows": mean_of_rows,
    "ratio": ratio,
}
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.001, eps=0.1),  # else gradients of rounding move weights
]


def sliced_schedule(rng: random.Random) -> Schedule:
    lengths = rng.choice([2, 3, [1, 2, 3], [4, 2]])
    make = getattr(schedules, rng.choice(schedules.NAMES))
    return make(rng.randint(1, 3), rng.randint(1, 3), slices=lengths)


def random_schedule(rng: random.Random) -> Schedule:
    while True:
        rows, placement, microbatches = random_rows(rng)
        if is_valid(rows, placement, microbatches):
            return Schedule.build(rows, placement, microbatches)


def one_process(case: Case, chunks: list[Chunk]) -> list[Any]:
    """What every step leaves with plain torch: its losses, gradients, weights after the optimizer, and buffers."""
    for piece in [piece for chunk in chunks for piece in chunk.pieces if isinstance(piece, Penalised)]:
        piece.added = []
    chunks[-1].tied = chunks[0].tied if case.tied else None
    model, found = nn.ModuleList(chunks), []
    optimizer = case.make_optimizer and case.make_optimizer([*model.parameters()] or [{"params": []}])
    for number, step in enumerate(case.steps):
        case.change(chunks, number)
        model.zero_grad()
        losses = losses_of(case, chunks, step)
        for loss, added in losses:
            if loss.requires_grad:
                (loss + added).backward()
        totals = [torch.tensor(sum(torch.as_tensor(each[which]).item() for each in losses)) for which in (0, 1)]
        if optimizer is not None:
            if case.max_norm is not None:
                clip_grad_norm_(model.parameters(), case.max_norm)
            optimizer.step()
        found.append((*totals, *state_of(case, chunks)))
    return found


def losses_of(
    case: Case, chunks: list[Chunk], step: list[tuple[Tensor, Tensor, dict[str, Tensor]]]
) -> list[tuple[Tensor, Any]]:
    """Each sequence's share of the loss, and of what pieces add to it.

    Forwards are in the schedule's order, in which random numbers are drawn."""
    count, values, added = len(step), {}, [0.0] * len(step)
    order = [(chunk, sequence) for sequence in range(count) for chunk in range(len(chunks))]
    if not case.sliced:
        ran = [action for _, action in order_of_running(case.schedule.actions, len(chunks))]
        order = [(action.chunk, action.microbatch) for action in ran if action.kind == "F"]
    for chunk, sequence in order:
        given = values[chunk - 1, sequence] if chunk else step[sequence][0]
        keywords = step[sequence][2]
        arguments = given if isinstance(given, tuple) else (given,)
        if isinstance(given, dict):
            keywords, arguments = {**keywords, **given}, ()
        values[chunk, sequence] = chunks[chunk](*arguments, **keywords)
        for piece in [piece for piece in chunks[chunk].pieces if isinstance(piece, Penalised)]:
            added[sequence] += sum(piece.added) / count
            piece.added.clear()
    last = [values[len(chunks) - 1, sequence] for sequence in range(count)]
    losses = [LOSSES[case.loss](output, target) / count for output, (_, target, _) in zip(last, step, strict=True)]
    return [*zip(losses, added, strict=True)]


def state_of(case: Case, chunks: list[Chunk]) -> list[Tensor | None]:
    """Gradients of all parameters, or their values where an optimizer has stepped; and buffers."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    # a gradient of zeros may be None: a chunk that nothing depends on
    gradients = [None if p.grad is None or not p.grad.any() else p.grad.clone() for p in parameters]
    values = [p.detach().clone() for p in parameters]
    return [*(values if case.make_optimizer else gradients), *(b.clone() for chunk in chunks for b in chunk.buffers())]


def pipelined(case: Case, chunks: list[Chunk]) -> list[Any]:
    """The same on ranks that are threads."""
    for chunk in chunks:
        zbkern.convert(chunk)

    def run(transport: LocalTransport) -> list[Any]:
        mine = [chunks[chunk] for chunk in case.schedule.chunks_of(transport.rank)]
        found: list[Any] = []
        with Pipeline(
            mine, case.schedule, LOSSES[case.loss], transport, fill=case.fill, timeout=30, options=case.options
        ) as pipe:
            pipe.queue.merge = case.merge
            optimizer: Any = None
            if case.make_optimizer is not None:
                parameters = [*nn.ModuleList(mine).parameters()] or [{"params": []}]
                inner = case.make_optimizer(parameters)
                optimizer = Optimizer(inner, pipe, max_norm=case.max_norm, undo=case.undo)
            for number, step in enumerate(case.steps):
                if transport.rank == 0:
                    case.change(chunks, number)
                pipe.gather(0)
                inputs, targets, side = (list(each) for each in zip(*step, strict=True))
                nn.ModuleList(mine).zero_grad()
                loss = pipe.step(inputs, targets, side if any(side) else None)
                if optimizer is not None:
                    optimizer.step()
                    read(case.reads[number], pipe, optimizer, others[transport.rank])
                assert pipe.queue.pending() == pipe.queue.bytes == 0
                losses = [each for each in pipe.gather(None if loss is None else loss.item()) if each is not None]
                losses += [pipe.auxiliary_losses().get("penalty", 0.0)]
                if transport.rank == 0:
                    is_final = optimizer is None or case.reads[number] != READS[-1]
                    found.append((*map(torch.tensor, losses), *(state_of(case, chunks) if is_final else ())))
                pipe.gather(0)
        return found

    others = LocalTransport.ring(case.schedule.ranks)
    return results_on_threads(case.schedule.ranks, run)[0]


def read(how: str, pipe: Pipeline, optimizer: Optimizer, transport: LocalTransport) -> None:
    """What makes weights final, and on other ranks, too, after a gather."""
    if how == "validate":
        optimizer.validate()
    elif how == "weights":
        optimizer.weights()
    elif how == "state":
        optimizer.state_dict()
    elif how == "another pipeline":  # its constructor compares weights
        Pipeline(pipe.modules.values(), pipe.schedule, F.mse_loss, transport, timeout=30)


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_random_pipelines_train_as_plain_torch(seconds: float) -> None:
    seed = int(os.environ.get("ZBKERN_SEED", time.time_ns() if seconds > 30 else 0))
    end, number = time.monotonic() + seconds, 0
    while number < 20 or time.monotonic() < end:
        case = Case(random.Random(f"{seed} {number}"))
        try:
            check(case)
        except BaseException as error:
            raise AssertionError(f"ZBKERN_SEED={seed}, number {number}:\n{case.describe()}") from error
        number += 1


def check(case: Case) -> None:
    both = copy.deepcopy(case.chunks), copy.deepcopy(case.chunks)
    seed = case.rng.getrandbits(32)
    found = []
    for run, chunks in zip((one_process, pipelined), both, strict=True):
        for piece in [piece for chunk in chunks for piece in chunk.pieces if isinstance(piece, Hooked)]:
            piece.add_hooks()
        torch.manual_seed(seed)
        found.append(run(case, chunks))
    clipped = case.make_optimizer is not None and case.max_norm is not None
    allowed = 1e-5 if clipped else 1e-9  # the clipping coefficient is float32
    for step, (expected, got) in enumerate(zip(*found, strict=True)):
        if any(not a.abs().max() < 1e6 for a in expected if a is not None and a.numel()):
            return  # plain torch has diverged, and then multiplies what rounding has left
        for index, (a, b) in enumerate(zip(expected[: len(got)], got, strict=True)):
            assert (a is None) == (b is None), f"step {step}, {index}: {a} {b}"
            if a is not None and a.numel():
                error = (a - b).abs().max().item() / max(1e-3, a.abs().max().item())
                assert error < allowed, f"step {step}, {index}: {error}"
