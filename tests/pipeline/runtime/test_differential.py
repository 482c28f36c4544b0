"""Gradients: random models, schedules and options in a pipeline against one process with plain torch, in float64.

To be read first: it draws every option of a Pipeline and of its Optimizer. Other files hold what it cannot see: errors,
when something runs, and what is in memory. Slow runs have other seeds than the quick ones: see
`tests/support/seeds.py`.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils import _pytree as pytree

import zbkern
from tests.support.chunks import results_on_threads
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
    Penalised,
    Sums,
    randn,
)
from tests.support.schedules import published, random_schedule, sliced_schedule, with_neighbours_beside
from tests.support.seeds import seed
from zbkern.pipeline import Optimizer, Pipeline, PipelineError, Schedule, StepOptions, checkpoint
from zbkern.pipeline.runtime.memory import host_copies
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.schedules.dependencies import order_of_running
from zbkern.schedules.program import offloads_or_recomputes

Batch = list[tuple[Tensor, Any, dict[str, Tensor]]]  # input, target and side inputs of every sequence

AFTER = ("nothing", "evaluate", "forward")  # what follows a step, and the optimizer's step
AFTER_OPTIMIZER = (*AFTER, "validate", "weights", "state", "load state", "offload", "another pipeline", *READS)
GIVEN = ("lists", "tensors", "where needed")  # lists of microbatches, or tensors; where needed: None on other ranks


# ---- what is drawn


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


def flat_gradients(chunks: list[Chunk]) -> Tensor:
    """A buffer for them, in which each has a view."""
    parameters = [p for p in nn.ModuleList(chunks).parameters() if p.requires_grad]
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.main_grad = part.view(parameter.shape)
    return buffer


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


# ---- one process


def pieces(chunks: list[Chunk], kind: type) -> list[Any]:
    return [piece for chunk in chunks for piece in chunk.pieces if isinstance(piece, kind)]


def one_process(case: Case, chunks: list[Chunk]) -> list[Any]:
    """What every step leaves with plain torch: its losses, gradients, weights after the optimizer, and buffers."""
    for piece in pieces(chunks, Penalised):
        piece.added = []
    model, found = nn.ModuleList(chunks), []
    optimizers = case.optimizers([*model.parameters()])
    for step in [step for part in case.parts for step in part]:
        case.change(chunks, step)
        if step.zeroes:
            model.zero_grad()
        inputs = [x.clone().requires_grad_(case.asks) for x, _, _ in step.batch]
        losses, _ = losses_of(case, chunks, step, inputs)
        for loss, added in losses:
            if loss.requires_grad:
                (loss + added).backward()
        of_inputs = gradient_of(inputs) if case.asks else None
        case.poison(chunks, step, {*range(len(chunks))})
        states = copy.deepcopy([each.state_dict() for each in optimizers])
        if optimizers:
            step_plainly(case, optimizers)
        for optimizer, state in zip(optimizers, states, strict=True) if step.after == "load state" else ():
            optimizer.load_state_dict(state)
        found.append([*totals(losses), of_inputs, *after_plainly(case, chunks, step), *state_of(case, chunks)])
    return found


def totals(losses: list[tuple[Tensor, Any]]) -> list[Tensor]:
    """Of the loss, and of what pieces add to it."""
    return [torch.tensor(sum(torch.as_tensor(each[which]).item() for each in losses)) for which in (0, 1)]


def gradient_of(inputs: list[Tensor]) -> Tensor:
    return torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in inputs])


def step_plainly(case: Case, optimizers: list[torch.optim.Optimizer]) -> None:
    """Clips and steps, unless a gradient is not finite."""
    own = [[p for group in each.param_groups for p in group["params"] if p.grad is not None] for each in optimizers]
    groups = own if case.optimizer == "two with norms of their own" else [[p for part in own for p in part]]
    if not all(math.isfinite(get_total_norm([p.grad for p in group])) for group in groups):
        return
    for group, limit in zip(groups, case.limits, strict=False):
        if limit is not None:
            clip_grad_norm_(group, limit)
    for optimizer in optimizers:
        optimizer.step()


def after_plainly(case: Case, chunks: list[Chunk], step: Step) -> list[Tensor]:
    """What `after` reads in the pipeline."""
    if step.after not in ("evaluate", "forward"):
        return []
    modes = [(module, module.training) for module in nn.ModuleList(chunks).modules()]
    with torch.no_grad():
        nn.ModuleList(chunks).eval()
        losses, outputs = losses_of(case, chunks, step, [x for x, _, _ in step.batch])
    for module, mode in modes:
        module.training = mode
    return totals(losses) if step.after == "evaluate" else [torch.cat([each.flatten() for each in outputs])]


def losses_of(
    case: Case, chunks: list[Chunk], step: Step, inputs: list[Tensor]
) -> tuple[list[tuple[Tensor, Any]], list[Tensor]]:
    """Each sequence's share of the loss, and of what pieces add to it; and outputs.

    Forwards are in the schedule's order, in which random numbers are drawn."""
    count, values, added = len(step.batch), {}, [0.0] * len(step.batch)
    shares = [1 / count] * count
    if step.schedule.own_slices:
        shares = [x.shape[1] / sum(each.shape[1] for each in inputs) for x in inputs]
    order = [(chunk, sequence) for sequence in range(count) for chunk in range(len(chunks))]
    if not case.sliced:
        ran = [action for _, action in order_of_running(step.schedule.actions, len(chunks))]
        order = [(action.chunk, action.unit) for action in ran if action.kind == "F"]
    for chunk, sequence in order:
        given = values[chunk - 1, sequence] if chunk else inputs[sequence]
        keywords = step.batch[sequence][2]
        arguments = given if isinstance(given, tuple) else (given,)
        if isinstance(given, dict):
            keywords, arguments = {**keywords, **given}, ()
        values[chunk, sequence] = chunks[chunk](*arguments, **keywords)
        for piece in pieces([chunks[chunk]], Penalised):
            added[sequence] += sum(piece.added) * shares[sequence]
            piece.added.clear()
    last = [values[len(chunks) - 1, sequence] for sequence in range(count)]
    losses = [LOSSES[case.loss](y, target) / count for y, (_, target, _) in zip(last, step.batch, strict=True)]
    return [*zip(losses, added, strict=True)], last


def state_of(case: Case, chunks: list[Chunk]) -> list[Tensor | None]:
    """Gradients of all parameters, or their values where an optimizer has stepped; and buffers."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    # a gradient of zeros may be None: a chunk that nothing depends on
    gradients = [None if (g := grad_of(p)) is None or not g.any() else g.clone() for p in parameters]
    values = [p.detach().clone() for p in parameters]
    return [*(values if case.optimizer else gradients), *(b.clone() for chunk in chunks for b in chunk.buffers())]


# ---- a pipeline


def pipelined(case: Case, chunks: list[Chunk]) -> list[Any]:
    """The same on ranks that are threads, and after a checkpoint on others."""
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in range(len(case.parts)):
            if part:
                chunks = scrambled(chunks)
            found += of_part(case, chunks, part, folder)
    return found


def scrambled(chunks: list[Chunk]) -> list[Chunk]:
    """Copies with other values, for a checkpoint to bring them back."""
    again = copy.deepcopy(nn.ModuleList(chunks))
    for tensor in [*again.parameters(), *again.buffers()]:
        tensor.data += 1
    for piece in pieces([*again], Hooked):
        piece.add_hooks()
    torch.manual_seed(0)
    random.seed(0)
    return [*again]


def rename(chunk: int, key: str) -> str:
    return f"{chunk}.{key}"


def of_part(case: Case, chunks: list[Chunk], part: int, folder: str) -> list[Any]:
    steps, own = case.parts[part], case.rules[part]
    first = steps[0].schedule
    rule = own if own is None or part else own(4)  # a published schedule is its own rule
    copies = {first.placement[chunk]: copy.deepcopy(chunks[chunk].tied) for chunk in case.tied}  # one on each rank
    for chunk in case.tied:
        chunks[chunk].tied = copies[first.placement[chunk]]
    for chunk in chunks:
        zbkern.convert(chunk)

    def run(transport: LocalTransport) -> list[Any]:
        numbers = first.chunks_of(transport.rank)
        mine = [chunks[chunk] for chunk in numbers]
        found: list[Any] = []
        buffer = flat_gradients(mine) if case.flat else torch.zeros(0)
        make = functools.partial(
            Pipeline, mine, rule or first, LOSSES[case.loss], fill=case.fill, timeout=30, options=case.options
        )
        with ExitStack() as opened:
            pipe = opened.enter_context(make(transport))
            other = others[1][transport.rank]
            pipes = [pipe, opened.enter_context(make(other))] if case.other == "before" else [pipe]
            pipe.queue.merge = case.merge
            optimizer = optimizer_of(case, pipe, mine)
            pipes += [opened.enter_context(make(other))] if case.other == "after" else []
            if part:
                assert checkpoint.load(folder, pipe, optimizer, rename=rename) == (part, {"part": part})
            for step in steps:
                if transport.rank == 0:
                    case.change(chunks, step)
                meeting.wait(30)
                schedule = step.schedule if rule is None else None
                if step.fails:
                    fail(pipes[step.pipes[1]], step.fails, *batch_for(case, step, first, transport.rank), schedule)
                if step.zeroes:
                    nn.ModuleList(mine).zero_grad()
                    buffer.zero_()
                batch = batch_for(case, step, first, transport.rank)
                running = pipes[step.pipes[0]]
                loss = running.step(*batch, schedule=schedule)
                check_ran(case, running, step.schedule)
                losses = [known(running.gather(None if loss is None else loss.item()))]
                losses += [running.last.auxiliary_losses().get("penalty", 0.0)]
                inputs = batch[0] if isinstance(batch[0], list) else [batch[0]]
                of_inputs = gradient_of(inputs) if case.asks and transport.rank == 0 else None
                case.poison(chunks, step, {*numbers})
                before = copy.deepcopy(optimizer.state_dict()) if step.after == "load state" else {}
                if optimizer is not None:
                    optimizer.step()
                seen = of_reader(step, mine, transport.rank, meeting)
                read = after(step, schedule, pipes[step.pipes[1]], optimizer, before, batch, others[0][transport.rank])
                is_final = optimizer is None or step.after != "nothing"
                meeting.wait(30)
                assert seen is None or torch.equal(seen, flat(nn.ModuleList(mine).parameters()))
                if transport.rank == 0:
                    state = state_of(case, chunks) if is_final else []
                    found.append([*map(torch.tensor, losses), of_inputs, *read, *state])
                meeting.wait(30)
            views = [p for p in nn.ModuleList(mine).parameters() if hasattr(p, "main_grad")]
            assert all(p.grad is None and p.main_grad._base is buffer for p in views)
            if part + 1 < len(case.parts):
                checkpoint.save(folder, part + 1, pipe, optimizer, {"part": part + 1}, rename=rename)
        return found

    others, meeting = [LocalTransport.ring(first.ranks) for _ in range(2)], threading.Barrier(first.ranks)
    wait = random.Random(part)
    return results_on_threads(first.ranks, run, (lambda *_: wait.choice([0, 0.001, 0.01])) if case.late else None)[0]


def fail(pipe: Pipeline, fails: tuple[int, int], *batch: Any) -> None:
    """A step in which a forward raises: all ranks hear of it, and go on."""
    left = [fails[1]]

    def count(*_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise ArithmeticError("the cause")

    modules = [pipe.modules[fails[0]]] if fails[0] in pipe.modules else []
    hooks = [module.register_forward_pre_hook(count) for module in modules]
    with pytest.raises(PipelineError, match=r"action \d+F\d+: ArithmeticError: the cause"):
        pipe.step(*batch[:3], schedule=batch[3])
    for hook in hooks:
        hook.remove()


def of_reader(step: Step, chunks: list[Chunk], rank: int, meeting: threading.Barrier) -> Tensor | None:
    """What somebody reads who knows nothing of an Optimizer, while ranks that do not read only wait."""
    seen = None
    if step.after in READS and step.reader in (None, rank):
        seen = flat(READS[step.after](nn.ModuleList(chunks)))
    if step.after in READS:
        meeting.wait(30)
    return seen


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(tensor.detach().flatten() for tensor in tensors)])


def optimizer_of(case: Case, pipe: Pipeline, chunks: list[Chunk]) -> Optimizer | None:
    given: list[Any] = case.optimizers([*nn.ModuleList(chunks).parameters()])
    if not given:
        return None
    if pipe.rank == case.hooked:
        given[0].register_step_post_hook(lambda *_: None)
    limit = {"max_norm": case.limits[0]}
    if case.optimizer == "two with norms of their own":
        given, limit = [*zip(given, case.limits, strict=True)], {}
    return Optimizer(given if len(given) > 1 else given[0], pipe, undo=case.undo, adaptive=case.adaptive, **limit)


def batch_for(case: Case, step: Step, first: Schedule, rank: int) -> tuple[Any, Any, Any]:
    inputs, targets, side = (list(each) for each in zip(*step.batch, strict=True))
    inputs = [x.clone().requires_grad_(case.asks) for x in inputs]
    if step.given == "tensors":
        whole = {name: torch.cat([each[name] for each in side]) for name in side[0]}
        target = pytree.tree_map(lambda *each: torch.cat(each), *targets)
        return torch.cat(inputs).detach().requires_grad_(case.asks), target, whole or None
    given = (inputs, targets, side if any(side) else None)
    if step.given == "lists":
        return given
    return (inputs if rank == first.placement[0] else None, targets if rank == first.placement[-1] else None, given[2])


def check_ran(case: Case, pipe: Pipeline, schedule: Schedule) -> None:
    """Everything has run, in the schedule's order, but W where it fills waits; and nothing is left."""
    assert pipe.queue.pending() == pipe.queue.bytes == 0
    timeline, row = pipe.last.timeline, schedule.actions[pipe.rank]
    ran = [event.action for event in timeline.events[pipe.rank]]
    moves = ("W",) if case.fill == "eager" or case.options.max_wgrad_bytes is not None else ()
    assert [a for a in ran if a.kind not in moves] == [a for a in row if a.kind not in ("O", "L", *moves)]
    copied = {event.action for events in timeline.copies or () for event in events}
    assert copied <= {action for action in row if action.kind in ("O", "L")}  # what is empty is not copied


def known(values: list[Any]) -> Any:
    (found,) = (value for value in values if value is not None)
    return found


def after(
    step: Step,
    schedule: Schedule | None,
    pipe: Pipeline,
    optimizer: Optimizer | None,
    state: dict[str, Any],
    batch: tuple[Any, Any, Any],
    transport: LocalTransport,
) -> list[Tensor]:
    """What follows a step. All but nothing makes weights final, and on other ranks, too, after a gather."""
    if step.after == "evaluate":
        loss = pipe.evaluate(*batch, schedule=schedule)
        total = known(pipe.gather(None if loss is None else loss.item()))
        return [torch.tensor(total), torch.tensor(pipe.last.auxiliary_losses().get("penalty", 0.0))]
    if step.after == "forward":
        outputs = pipe.forward(batch[0], None, batch[2], schedule=schedule)
        values = known(pipe.gather(outputs and torch.cat([each.flatten() for each in outputs]).tolist()))
        return [torch.tensor(values, dtype=torch.float64)]
    if optimizer is None:
        return []
    if step.after in ("validate", "offload", *READS):
        optimizer.validate()
    if step.after == "weights":
        optimizer.weights()
    elif step.after == "state":
        optimizer.state_dict()
    elif step.after == "load state":
        optimizer.load_state_dict(state)
    elif step.after == "offload":
        optimizer.offload_states()
    elif step.after == "another pipeline":  # its constructor compares weights
        Pipeline(pipe.modules.values(), pipe.schedule, F.mse_loss, transport, timeout=30).close()
    return []


# ---- both


@contextmanager
def late_copies(case: Case) -> Iterator[None]:
    """Meanwhile their destinations hold garbage."""
    now, wait = host_copies.copy, random.Random(0)

    def copy_late(pairs: host_copies.Pairs) -> None:
        for destination, _ in pairs:
            destination.fill_(0xAB)
        time.sleep(wait.choice([0, 0.001, 0.005]))
        now(pairs)
        time.sleep(wait.choice([0, 0.001]))

    with pytest.MonkeyPatch.context() as patch:
        if case.late:
            patch.setattr(host_copies, "copy", copy_late)
        yield


@pytest.mark.parametrize("part", range(3))
def test_random_pipelines_train_as_plain_torch(part: int) -> None:
    check_all(seed(part), 10)


@pytest.mark.slow
def test_more_random_pipelines() -> None:
    check_all(seed(3), 20)


def check_all(chosen: int, count: int) -> None:
    for number in range(count):
        case = Case(random.Random(f"{chosen} {number}"))
        try:
            check(case)
        except BaseException as error:
            raise AssertionError(f"ZBKERN_SEED={chosen}, number {number}:\n{case.describe()}") from error


def end_before_divergence(case: Case, steps: list[Any]) -> None:
    """Of plain torch, which then multiplies what rounding has left."""
    while any(not a.abs().max() < 1e6 for step in steps for a in step if a is not None and a.numel()):
        steps.pop()
    left = len(steps)
    for part in case.parts:
        del part[left:]
        left -= len(part)
    case.parts = [part for part in case.parts if part]


def check(case: Case) -> None:
    both = copy.deepcopy(nn.ModuleList(case.chunks)), copy.deepcopy(nn.ModuleList(case.chunks))
    seed = case.rng.getrandbits(32)
    found: list[list[Any]] = []
    for run, chunks in zip((one_process, pipelined), both, strict=True):
        for piece in pieces([*chunks], Hooked):
            piece.add_hooks()
        torch.manual_seed(seed)
        random.seed(seed)
        with late_copies(case):
            found.append(run(case, [*chunks]))
        end_before_divergence(case, found[0])
    clipped = case.optimizer is not None and case.limits != (None, None)
    allowed = 1e-5 if clipped else 1e-9  # the clipping coefficient is float32
    for step, (expected, got) in enumerate(zip(*found, strict=True)):
        for index, (a, b) in enumerate(zip(expected[: len(got)], got, strict=True)):
            assert (a is None) == (b is None), f"step {step}, {index}: {a} {b}"
            if a is not None and a.numel():
                error = (a - b).abs().max().item() / max(1e-3, a.abs().max().item())
                assert error < allowed, f"step {step}, {index}: {error}"
