"""What training may meet, drawn at random: a model in chunks, options, losses, optimizers, what happens at a step."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.needs import OLD_TORCH
from tests.support.random_chunks import (
    ALONE,
    BY_TOKEN,
    IN_SLICES,
    OF_W,
    OTHERS,
    READS,
    TOKENS,
    WIDTH,
    Attending,
    Chunk,
    Counts,
    Hooked,
    InFlight,
    Noise,
    Normed,
    Sums,
    randn,
)
from tests.support.schedules import published, random_schedule, sliced_schedule, with_neighbours_beside
from zbkern.pipeline import Schedule, StepOptions
from zbkern.schedules.program import offloads_or_recomputes

Batch = list[tuple[Tensor, Any, dict[str, Tensor]]]  # input, target and side inputs of every sequence
AFTER = ("nothing", "evaluate", "forward")  # what follows a step, and the optimizer's step
AFTER_OPTIMIZER = (*AFTER, "validate", "weights", "state", "load state", "offload", "another pipeline", *READS)
GIVEN = ("lists", "tensors", "where needed")  # lists of microbatches, or tensors; where needed: None on other ranks


def random_rule(rng: random.Random, placement: tuple[int, ...], sliced: bool) -> Callable[[int], Schedule]:
    """A function of the number of microbatches."""
    make = rng.choice(published()[placement])
    return functools.partial(make, slices=rng.choice([2, 3, (4, 2)])) if sliced else make


@dataclass
class Step:
    """batch, change: see `Case`; zeroes: gradients before it; poison: a number that a gradient gets, whose place is
    the first one; after: one of AFTER; given: one of GIVEN; pipes: which of the case's runs the step, and what follows
    it; fails: chunk and number of a forward that raises before the step is made; reader: None where all ranks read."""

    schedule: Schedule
    batch: Batch
    change: float
    zeroes: bool
    poison: tuple[float, float] | None
    after: str
    given: str
    pipes: tuple[int, int]
    fails: tuple[int, int] | None
    reader: int | None


class Case:
    """What a seed stands for: a model in chunks, options, and steps, which may go on from a checkpoint elsewhere."""

    def __init__(self, rng: random.Random) -> None:
        torch.manual_seed(rng.getrandbits(32))
        self.rng = rng
        self.sliced = rng.random() < 0.3
        placements = [rng.choice([*published()])]
        count = len(placements[0])
        if rng.random() < 0.3:  # goes on with the same chunks on these ranks
            placements.append(rng.choice([each for each in published() if len(each) == count]))
        # what a Pipeline of each part is given: a function, a published schedule, or None for schedules of every step
        self.rules = [random_rule(rng, each, self.sliced) if rng.random() < 0.2 else None for each in placements]
        draw = sliced_schedule if self.sliced else random_schedule
        drawn = [
            [rule(rng.randint(1, 4)) if rule else draw(rng, placement) for _ in range(rng.randint(1, 3))]
            for placement, rule in zip(placements, self.rules, strict=True)
        ]
        self.beside = rng.random() < 0.4
        if self.beside:  # numbers of a second forward would not be those of one process
            drawn = [[with_neighbours_beside(rng, each, forwards=1) for each in part] for part in drawn]
        self.saves = any(offloads_or_recomputes(row) for part in drawn for each in part for row in each.actions)
        holders = rng.choice([(), (), (0, count - 1), range(count)])
        self.tied = holders if count > 1 else ()
        self.flat = rng.random() < 0.2  # gradients of a rank are in one buffer of a framework's
        kinds = OF_W if self.flat else IN_SLICES if self.sliced else BY_TOKEN + OTHERS
        if not self.flat and not self.sliced and all(max(placement) == 0 for placement in placements):
            kinds = kinds + ALONE
        if self.beside:
            kinds = kinds + [InFlight] * len(kinds)
        if OLD_TORCH and self.saves:  # it loses hooks of weights that are saved for an R, or offloaded
            kinds = [kind for kind in kinds if kind is not Hooked]
        self.chunks = [
            Chunk(
                [rng.choice(kinds)() for _ in range(rng.randint(1, 3))],
                "tensor" if chunk == count - 1 else rng.choice(["tensor", "tuple", "dict"]),
                chunk in self.tied,
            ).double()
            for chunk in range(count)
        ]
        for chunk in self.tied:
            self.chunks[chunk].tied = self.chunks[0].tied
        if rng.random() < 0.1:
            self.chunks[0].pieces.requires_grad_(False)
        self.fill = "planned" if self.saves else rng.choice(["planned", "eager"])
        self.options = StepOptions(
            max_wgrad_bytes=None if self.saves else rng.choice([None, None, 0, 1000]),
            copy_size=rng.choice([1, 300, 2**26]),
            recompute=rng.choice([(), (), ("pieces.0",), ("pieces.*",)]),
            check_values=rng.random() < 0.5,
        )
        self.merge = rng.choice([True, False])
        self.other = rng.choice([None, None, "before", "after"])  # a second Pipeline is made, than the optimizer
        self.optimizer = rng.choice([None, *OPTIMIZERS])
        self.limits = rng.choice([None, 0.1, 10.0]), rng.choice([None, 0.1, 10.0])
        self.undo, self.adaptive = rng.choice(["snapshot", "snapshot", None]), rng.random() < 0.5
        self.hooked = rng.choice([None, None, 0, 1])  # a rank that waits for the norm
        self.loss = rng.choice([*LOSSES])
        self.asks = rng.random() < 0.2  # for gradients of inputs
        self.side = rng.random() < 0.5
        self.rows = rng.choice(["plain", "padded on the left", "padded on the right", "packed"])
        if self.rows == "packed" and (pieces(self.chunks, Attending) or pieces(self.chunks, Sums)):
            self.rows = "plain"  # sequences of a row would see each other there
        self.late = rng.random() < 0.2  # messages, and copies
        self.parts = [
            [self.step(schedule, rule) for schedule in part] for part, rule in zip(drawn, self.rules, strict=True)
        ]
        for part in self.parts[1:]:
            part[0].zeroes = True  # gradients are in no checkpoint
        if self.optimizer and self.parts[-1][-1].after == "nothing":
            self.parts[-1][-1].after = "validate"

    def step(self, schedule: Schedule, rule: Any) -> Step:
        rng = self.rng
        fails = self.failure(schedule) if rng.random() < 0.3 else None
        given = ("lists",) if rule else GIVEN if not schedule.own_slices else ("lists", "where needed")
        return Step(
            schedule,
            self.batch(schedule),
            rng.random(),
            rng.random() < 0.7 or self.optimizer is not None or fails is not None,
            (rng.random(), rng.choice([math.nan, math.inf, 1e3])) if self.optimizer and rng.random() < 0.4 else None,
            rng.choice(AFTER_OPTIMIZER if self.optimizer else AFTER) if rng.random() < 0.5 else "nothing",
            rng.choice(given),
            (rng.randrange(2), rng.randrange(2)) if self.other else (0, 0),
            fails,
            rng.choice([None, rng.randrange(schedule.ranks)]),
        )

    def failure(self, schedule: Schedule) -> tuple[int, int] | None:
        """None where a forward leaves something that the next one reads, and where it is compared first."""
        if self.sliced or any(pieces(self.chunks, kind) for kind in (Counts, Normed, Noise)):
            return None
        first = 1 if self.saves else schedule.microbatches  # or an R is counted
        return self.rng.randrange(len(self.chunks)), self.rng.randint(1, first)

    def batch(self, schedule: Schedule) -> Batch:
        """Targets of padding are 0."""
        rows, found = self.rng.randint(1, 3), []
        for number in range(schedule.microbatches):
            count = sum(schedule.own_slices[number]) if schedule.own_slices else TOKENS
            target, places = randn(rows, count, WIDTH), torch.arange(count)
            side = {"scale": randn(rows, count, 1)} if self.side else {}
            ends = torch.tensor([self.rng.randint(1, count) for _ in range(rows)])[:, None]
            if self.sliced and self.rows == "packed":
                side["position_ids"] = places - ends * (places >= ends)
            elif self.sliced and self.rows != "plain":
                mask = (places < ends).long()
                side["attention_mask"] = mask.flip(1) if self.rows == "padded on the left" else mask
                target = target * side["attention_mask"][..., None]
            found.append((randn(rows, count, WIDTH), TARGETS.get(self.loss, lambda each: each)(target), side))
        return found

    def change(self, chunks: list[Chunk], step: Step) -> None:
        """What users do between steps."""
        parameters = [p for chunk in chunks for p in chunk.pieces.parameters()]
        chosen = parameters[int(step.change * len(parameters))] if parameters else None
        if step.change < 0.3 and chosen is not None and self.optimizer is None:
            chosen.requires_grad_(not chosen.requires_grad)
        if step.change > 0.7:
            chunks[int(step.change * 7) % len(chunks)].train(int(step.change * 1000) % 2 == 1)

    def poison(self, chunks: list[Chunk], step: Step, mine: set[int]) -> None:
        """In the gradient of one parameter, where it has one."""
        if step.poison is None:
            return
        place, value = step.poison
        number = int(place * len(chunks))
        parameters = [*chunks[number].pieces.parameters()]
        chosen = parameters[int(place * 1000) % len(parameters)] if parameters and number in mine else None
        gradient = None if chosen is None else grad_of(chosen)
        if gradient is not None and gradient.any():
            gradient[(0,) * gradient.dim()] = value

    def optimizers(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [] if self.optimizer is None else OPTIMIZERS[self.optimizer](parameters)

    def describe(self) -> str:
        pieces = [[type(piece).__name__ for piece in chunk.pieces] for chunk in self.chunks]
        told = {name: value for name, value in vars(self).items() if name not in ("chunks", "parts", "rng", "rules")}
        steps = [{**vars(step), "batch": len(step.batch), "schedule": ""} for part in self.parts for step in part]
        texts = [step.schedule.to_csv() for part in self.parts for step in part]
        return "\n".join([str(pieces), str(told), *map(str, steps), *texts])


def grad_of(parameter: nn.Parameter) -> Tensor | None:
    """Wherever it is."""
    return getattr(parameter, "main_grad", parameter.grad)


def counted(target: Tensor) -> Tensor:
    """[rows, tokens], 0 for padding."""
    return (target != 0).any(-1).double()


def sum_of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).square().sum(-1) * counted(target)).sum() / 10


def told_sum(output: Tensor, target: Tensor) -> Tensor:
    return sum_of_tokens(output, target)


told_sum.reduction = "sum"  # type: ignore[attr-defined]


def weighed(output: Tensor, target: Tensor) -> Tensor:
    """A mean by weights of the targets' own."""
    weights = target.square().sum(-1)
    return ((output - target).square().sum(-1) * weights).sum() / weights.sum()


def mean_of_rows(output: Tensor, target: Tensor) -> Tensor:
    each, which = (output - target).square().sum(-1), counted(target)
    return ((each * which).sum(1) / which.sum(1)).mean()


def ratio(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """One per sequence, clipped, and an advantage."""
    ratios = torch.exp((output * target[0]).sum(-1).mean(1) / 10)
    return torch.minimum(ratios * target[1], ratios.clamp(0.8, 1.2) * target[1]).sum() + output.square().mean()


def of_sequences(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.mean(1), target)


def shifted(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, :-1], target[:, 1:])


TARGETS: dict[str, Callable[[Tensor], Any]] = {  # of losses, made of a target for each token
    "ratio": lambda target: (target, target[:, 0].sum(-1)),
    "of sequences": lambda target: target[:, 0],
}
LOSSES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mean": F.mse_loss,
    "sum": sum_of_tokens,
    "told sum": told_sum,
    "weighed": weighed,
    "mean of rows": mean_of_rows,
    "ratio": ratio,
    "of sequences": of_sequences,
    "shifted": shifted,
}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters or [{"params": []}], lr=0.001, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters or [{"params": []}], lr=0.001, eps=0.1)  # else rounding moves weights


def two(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [sgd([p for p in parameters if p.dim() > 1]), adamw([p for p in parameters if p.dim() < 2])]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]] = {
    "sgd": lambda parameters: [sgd(parameters)],
    "adamw": lambda parameters: [adamw(parameters)],
    "two with a norm": two,
    "two with norms of their own": two,
}


def pieces(chunks: list[Chunk], kind: type) -> list[Any]:
    return [piece for chunk in chunks for piece in chunk.pieces if isinstance(piece, kind)]
