"""What a case of `random_training` leaves in one process, with plain torch."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from tests.support.random_chunks import Chunk, Penalised
from tests.support.random_training import LOSSES, Case, Step, grad_of, pieces
from zbkern.schedules.dependencies import order_of_running


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
