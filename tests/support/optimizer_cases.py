"""Ranks with random gradients under an Optimizer, and the same weights in one process with torch's optimizer alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tests.support.chunks import results_on_threads
from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.transport.local import LocalTransport

SHAPES = ((5, 3), (7,), (2, 4, 3))  # of the parameters of every rank
MATRICES = ((5, 3), (7, 2), (4, 6))  # the same for optimizers of nothing else
MAX_NORM = 1.0

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Late(torch.optim.Optimizer):
    """State that is no tensor, a tensor that comes with the second step, and a count in the group."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.param_groups[0]["steps"] += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            norms = state.setdefault("norms", [])
            norms.append(float(parameter.grad.norm()))
            direction = parameter.grad / (1 + sum(norms)) / self.param_groups[0]["steps"]
            if len(norms) > 1:
                direction += state.setdefault("second", parameter.grad.clone())
            parameter -= self.param_groups[0]["lr"] * direction


class Attributes(torch.optim.Optimizer):
    """Counts on itself, keeps tensors in attributes, in nested ones too, some of which come with the first step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "history": [], "scale": torch.ones(())})
        self.steps = 0
        self.velocity = [torch.zeros_like(parameter) for parameter in parameters]
        self.nested = {"moments": {"largest": torch.zeros(())}, "seen": [0, (1, 2)]}
        self.alias = self.nested["moments"]["largest"]
        self.same_list = self.velocity
        self.params = parameters

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        self.steps += 1
        group["history"].append(self.steps)
        group["scale"].mul_(0.9)
        self.late = getattr(self, "late", 0) + len(group["history"])
        for index, parameter in enumerate(self.params):
            assert parameter is group["params"][index], "the parameters were copied, too"
            assert self.same_list is self.velocity, "two names of one list became two lists"
            self.velocity[index].mul_(0.5).add_(parameter.grad)
            self.nested["moments"]["largest"].copy_(torch.maximum(self.alias, parameter.grad.abs().max()))
            self.nested["seen"][0] += 1
            rate = group["lr"] * group["scale"] / (self.steps + self.late + self.nested["seen"][0] / 10)
            parameter -= rate * self.velocity[index] / (1 + self.alias)


class Counting(torch.optim.Optimizer):
    """Adds a count to its groups in the first step, as fused optimizers of GPUs do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                moment.lerp_(parameter.grad, 0.1)
                parameter.sub_(moment / (1 - 0.9 ** group["step"]), alpha=group["lr"])


class Writing(torch.optim.Optimizer):
    """Uses gradients as memory of its own, as some of the fastest do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            parameter.grad.mul_(0.5).add_(parameter, alpha=0.01)
            moment.lerp_(parameter.grad, 0.3)
            parameter.sub_(moment, alpha=self.param_groups[0]["lr"])


class ScheduleFree(torch.optim.Optimizer):
    """Trains y and evaluates x, both in the parameter in turn, with z in the state; it replaces that in every step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def swap(self, weight: float) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if "z" in state:
                parameter.lerp_(state["z"], weight / min(state["k"], 2))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                before = state.get("z", parameter)
                state["k"] = state.get("k", 0) + 1
                share = 1 / state["k"]
                parameter.lerp_(before, share).add_(parameter.grad, alpha=group["lr"] * (0.9 * (1 - share) - 1))
                state["z"] = before - group["lr"] * parameter.grad


class Wrapper(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: an optimizer by its type, whose state and step are those of another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw maximize": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, maximize=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, decoupled_weight_decay=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "muon": lambda p: torch.optim.Muon(p, lr=0.01, weight_decay=0.1),
    "late": Late,
    "attributes": Attributes,
    "counting": Counting,
    "schedule-free": ScheduleFree,
    "writing": Writing,
}


def warmed_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),  # moves the betas, too
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": warmed_up,
}


class FlatBuffer:
    """As a distributed optimizer keeps gradients: one fp32 tensor with those of all weights, and views of it."""

    def __init__(self, weights: list[nn.Parameter], detached: bool) -> None:
        self.flat = torch.zeros(sum(weight.numel() for weight in weights))
        self.weights = weights
        parts = self.flat.split([weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            view = part.view(weight.shape)
            weight.main_grad = view.data if detached else view  # .data has a version counter of its own
        self.places = [weight.main_grad.data_ptr() for weight in weights]

    def check(self) -> None:
        assert [weight.main_grad.data_ptr() for weight in self.weights] == self.places, "a view was replaced"
        assert all(weight.grad is None for weight in self.weights), "a backward would add to the buffer by .grad, too"


class Case:
    """Ranks with random gradients; on some ranks and steps they are large, or not finite.

    by_turns: the first and the last parameter have a gradient every other step only, as experts without tokens.
    flat: backwards add to a buffer, which is zeroed "by hand" or "by the optimizer".
    """

    def __init__(
        self,
        ranks: int,
        steps: int,
        forced: dict[tuple[int, int], float],
        make: Make = OPTIMIZERS["adamw foreach"],
        dtype: torch.dtype = torch.float32,
        schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        shapes: tuple[tuple[int, ...], ...] = SHAPES,
        by_turns: bool = False,
        flat: str | None = None,
    ) -> None:
        self.ranks, self.steps, self.forced = ranks, steps, forced
        self.make, self.dtype = make, dtype
        self.schedule, self.shapes, self.by_turns, self.flat = schedule, shapes, by_turns, flat
        self.buffers: dict[int, FlatBuffer] = {}

    def weights(self, rank: int) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(rank)
        return [nn.Parameter(torch.randn(shape, generator=generator).to(self.dtype)) for shape in self.shapes]

    def gradients(self, rank: int, step: int) -> list[Tensor | None]:
        """Of norm 0.4 over all ranks, unless forced: (rank, step) -> what one element becomes."""
        generator = torch.Generator().manual_seed(1000 * step + rank + 1)
        made = [torch.randn(shape, generator=generator) for shape in self.shapes]
        size = 0.4 / math.sqrt(self.ranks * sum(g.numel() for g in made))
        made = [gradient * size for gradient in made]
        if (rank, step) in self.forced:
            made[1].view(-1)[2] = self.forced[rank, step]
        absent = (0, 2)[step % 2] if self.by_turns else None
        return [None if index == absent else part.to(self.dtype) for index, part in enumerate(made)]

    def backward(self, weights: list[nn.Parameter], rank: int, step: int) -> None:
        """Gives the weights of a rank their gradients."""
        if self.flat:
            self.buffers[rank].check()
        for parameter, gradient in zip(weights, self.gradients(rank, step), strict=True):
            if not self.flat:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.main_grad += gradient

    def clear(self, optimizer: Optimizer, rank: int) -> None:
        """Clears the gradients of a rank."""
        if self.flat:
            self.buffers[rank].check()
        self.buffers[rank].flat.zero_() if self.flat == "by hand" else optimizer.zero_grad()

    def learning_rate(self, step: int, base: float) -> float:
        return base * (1 - 0.05 * step)


def plain_loop(case: Case, clip: Callable[..., Any]) -> tuple[list[list[Tensor]], list[float]]:
    """One process and one torch optimizer, nothing of zbkern's: all ranks' weights after every step, and the norms."""
    model = [case.weights(rank) for rank in range(case.ranks)]
    low = [parameter for row in model for parameter in row]
    masters = [nn.Parameter(parameter.detach().float()) for parameter in low]
    optimizer = case.make(masters)
    base = optimizer.param_groups[0]["lr"]
    schedule = case.schedule(optimizer) if case.schedule else None
    history, found = [], []
    for step in range(case.steps):
        if schedule is None:
            optimizer.param_groups[0]["lr"] = case.learning_rate(step, base)
        gradients = [g for rank in range(case.ranks) for g in case.gradients(rank, step)]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.float()
        found.append(float(clip(masters, MAX_NORM)))
        if math.isfinite(found[-1]):
            optimizer.step()
        if schedule is not None:
            schedule.step()
        with torch.no_grad():
            for parameter, master in zip(low, masters, strict=True):
                parameter.copy_(master)
        history.append([parameter.detach().clone() for parameter in low])
    return history, found


def clip_in_float64(parameters: list[Tensor], max_norm: float) -> Tensor:
    """torch's clip_grad_norm_ but for the norms of single gradients being added up in fp64."""
    norms = [p.grad.norm().double() for p in parameters if p.grad is not None]
    total = torch.stack(norms or [torch.zeros((), dtype=torch.float64)]).norm().float()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def train_rank(
    case: Case, transport: LocalTransport | None, stop: int | None = None, attach: Any = None, **options: Any
) -> tuple[list[list[Tensor]], list[float], Optimizer]:
    """The same through Optimizer on one rank: its weights after every step, norms, and the optimizer.

    stop: the step before which everything is made anew from state dicts. attach: called with optimizer, weights and
    rank as they are made. Without a transport, the ranks are those of torch.distributed.
    """
    rank = torch.distributed.get_rank() if transport is None else transport.rank
    options = {"master_weights": case.dtype != torch.float32, "max_norm": MAX_NORM, "timeout": 60, **options}

    def make() -> tuple[list[nn.Parameter], Optimizer, LRScheduler | None]:
        weights = case.weights(rank)
        if case.flat:
            case.buffers[rank] = FlatBuffer(weights, detached=case.flat != "by hand")
        optimizer = Optimizer(case.make(weights), transport, **options)
        if attach is not None:
            attach(optimizer, weights, rank)
        return weights, optimizer, case.schedule(optimizer) if case.schedule else None

    weights, optimizer, schedule = make()
    base, undone = optimizer.param_groups[0]["lr"], 0
    history, found = [], []
    for step in range(case.steps):
        if step == stop:
            undone, before = optimizer.undone, [weight.detach().clone() for weight in weights]
            states = copy.deepcopy((optimizer.state_dict(), schedule.state_dict() if schedule else None))
            weights, optimizer, schedule = make()
            for weight, saved in zip(weights, before, strict=True) if not optimizer.masters else ():
                weight.data.copy_(saved)
            optimizer.load_state_dict(states[0])
            if schedule is not None:
                schedule.load_state_dict(states[1])
            assert all(map(torch.equal, weights, before)), "not what the masters say"
        if schedule is None:
            optimizer.param_groups[0]["lr"] = case.learning_rate(step, base)
        case.backward(weights, rank, step)
        optimizer.step()
        if schedule is not None:
            schedule.step()  # before the global check, which may have the step done again
        else:
            optimizer.param_groups[0]["lr"] = 1e9  # the next step's learning rate may not reach this one
        case.clear(optimizer, rank)  # before the step is validated, which may need the gradients
        optimizer.validate()
        history.append([parameter.detach().clone() for parameter in weights])
        found.append(optimizer.last_norm)
    optimizer.undone += undone
    return history, found, optimizer


def ours(case: Case, **options: Any) -> tuple[list[list[Tensor]], list[list[float]], list[Optimizer]]:
    """All ranks' weights after every step, every rank's norms, and the optimizers."""
    rows = results_on_threads(case.ranks, lambda transport: train_rank(case, transport, **options))
    history = [[weight for row, _, _ in rows for weight in row[step]] for step in range(case.steps)]
    return history, [found for _, found, _ in rows], [optimizer for _, _, optimizer in rows]
