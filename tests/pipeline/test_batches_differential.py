"""Random batches of unequal sequences, planned and run in a pipeline, against one process that has one after the other.

Small models of families with causal, windowed and latent attention, with sinks, experts and tied weights, in float64
throughout. The slow run has another seed than the quick one: see `tests/support/seeds.py`.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.schedules import saved_in_turn, with_actions
from tests.support.seeds import seed
from tests.support.small_models import DECODERS, InFloat64, config_of, one_process, transformers
from zbkern.pipeline import (
    Costs,
    Optimizer,
    Pipeline,
    PlannedBatch,
    PlannedBatches,
    Schedule,
    ScheduleError,
    cut,
    schedules,
    token_loss,
)
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.planner import native

pytestmark = pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")

FAMILIES = ("llama", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3", "gpt2")
LONGEST = 400
WINDOWED = ("gemma3", "gpt_oss")


@functools.cache
def model_of(family: str, tied: bool, layers: int) -> nn.Module:
    torch.manual_seed(0)
    name, sizes = DECODERS[family]
    own: dict[str, Any] = {"max_position_embeddings": LONGEST, "num_hidden_layers": layers}
    if family in WINDOWED:
        own |= {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    if family == "gpt2":
        own = {"n_positions": LONGEST, "n_layer": layers}
    own["tie_word_embeddings"] = tied
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, {**sizes, **own})).double()
    if "experts" in str(sizes):
        model.set_experts_implementation("eager")
    return model.train()


class Case:
    """What a seed stands for: a model, a pipeline, a dataset, and how its steps are planned."""

    def __init__(self, rng: random.Random, largest: int) -> None:
        self.family, self.tied = rng.choice(FAMILIES), rng.random() < 0.5
        self.stages, self.is_v = rng.choice([1, 2, 4]), rng.random() < 0.6
        self.sequences = round(math.exp(rng.uniform(0, math.log(40))))
        self.steps = rng.choice([1, 1, 1, 2, 3])
        # an optimizer is one of all replicas, which here run one after the other
        self.replicas = 1 if self.steps > 1 or self.sequences < 2 else rng.choice([1, 2])
        self.max_norm = rng.choice([None, 1e-3, 1e3]) if self.steps > 1 else None  # the first one clips every step
        self.saved = rng.choice([(None,), (None,), ("recomputed", None), ("copied", None, "recomputed")])
        high = math.log(rng.uniform(2, largest))
        self.dataset = []
        for _ in range(self.sequences * self.steps):
            tokens = [rng.randrange(61) for _ in range(max(1, round(math.exp(rng.uniform(0, high)))))]
            self.dataset.append({"input_ids": tokens, "labels": [t if rng.random() < 0.9 else -100 for t in tokens]})
        attention, overhead = rng.uniform(0, 1.5), rng.uniform(0, 0.3)
        self.costs = Costs(
            1 + attention + overhead,
            1 + 2.5 * attention + overhead,
            1 + overhead,
            attention_forward=attention,
            attention_backward=2.5 * attention,
            overhead=overhead,
            communication=rng.choice([0.0, 0.2]),
            carried=0.1,
            tokens=rng.randint(20, LONGEST),
        )
        self.how = {"chunks": None if self.is_v else 1, "multiple": rng.choice([1, 8, 32])}
        self.limit = rng.choice([None, None, rng.uniform(0.5, 0.9)])
        self.beside = self.saved == (None,) and rng.random() < 0.7  # R, O and L run by themselves
        if self.beside:
            shares = rng.uniform(0.2, 0.9), rng.uniform(0.2, 0.9)
            hidden = self.costs.forward * shares[0], self.costs.backward * shares[1]
            self.costs = replace(self.costs, network_forward=hidden[0], network_backward=hidden[1], collectives=2)

    @property
    def placement(self) -> Schedule:
        make = schedules.zb_v if self.is_v else schedules.zb_h1
        return make(self.stages, self.stages)

    def batches(self, replica: int) -> list[PlannedBatch]:
        batches = functools.partial(PlannedBatches, self.dataset, self.costs, self.stages, **self.how)
        given = {"sequences": self.sequences, "replica": replica, "replicas": self.replicas}
        free = list(batches(**given))
        if self.limit is None:
            return free
        peak = max(max(batch.plan.peak_memory) for batch in free)
        try:
            return list(batches(**given, memory_limit=self.limit * peak))
        except ScheduleError:  # no order needs so little
            return free

    def schedule(self, batch: PlannedBatch) -> Schedule:
        return with_actions(batch.plan.schedule, saved_in_turn(*self.saved))

    def describe(self) -> str:
        told = {name: value for name, value in vars(self).items() if name != "dataset"}
        return f"{told}\nlengths {[len(each['input_ids']) for each in self.dataset]}"


def trained_plainly(case: Case, model: nn.Module, steps: list[list[dict[str, list[int]]]]) -> list[float]:
    """Losses of the steps in one process; leaves the last gradients, and the weights."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), []
    for step in steps:
        optimizer.zero_grad()
        losses.append(one_process(model, step))
        if case.steps > 1:
            if case.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            optimizer.step()
    return losses


def trained(case: Case, model: nn.Module, batches: list[PlannedBatch]) -> tuple[list[float], list[nn.Module]]:
    """The same in a pipeline."""

    def run(transport: LocalTransport) -> tuple[list[float], list[nn.Module]]:
        chunks = [*map(zbkern.convert, cut(copy.deepcopy(model), case.placement, rank=transport.rank))]
        losses = []
        with InFloat64(), Pipeline(chunks, case.placement, token_loss, transport, timeout=60) as pipe:
            optimizer: Any = None
            if case.steps > 1:
                inner = torch.optim.SGD(nn.ModuleList(chunks).parameters(), lr=0.01, momentum=0.9)
                optimizer = Optimizer(inner, pipe, max_norm=case.max_norm)
            for batch in batches:
                nn.ModuleList(chunks).zero_grad()
                schedule = case.schedule(batch)
                loss = pipe.step(batch.inputs, batch.targets, batch.side, schedule=schedule)
                assert pipe.queue.pending() == pipe.queue.bytes == 0
                ran = sorted(event.action for event in pipe.last.timeline.events[transport.rank])
                assert ran == sorted(a for a in schedule.actions[transport.rank] if a.kind not in "OL")
                losses += [] if loss is None else [loss.item()]
                if optimizer is not None:
                    optimizer.step()
            if optimizer is not None:
                optimizer.validate()
        return losses, chunks

    found = results_on_threads(case.stages, run)
    return next(losses for losses, _ in found if losses), [chunk for _, chunks in found for chunk in chunks]


def check(case: Case) -> int:
    """How many groups of passes ran beside each other."""
    model = model_of(case.family, case.tied, max(4, len(case.placement.placement)))
    planned = [case.batches(replica) for replica in range(case.replicas)]
    plain = copy.deepcopy(model)
    numbers = [[number for batch in step for number in batch.sequences] for step in zip(*planned, strict=True)]
    assert sorted(each for step in numbers for each in step) == list(range(len(case.dataset)))
    with InFloat64():
        expected = trained_plainly(case, plain, [[case.dataset[each] for each in step] for step in numbers])
    found = [trained(case, model, batches) for batches in planned]
    exact = 1e-10 if case.max_norm is None else 1e-5  # the clipping coefficient is float32
    losses = [sum(each) / case.replicas for each in zip(*(losses for losses, _ in found), strict=True)]
    assert losses == pytest.approx(expected, rel=exact)
    by_name: dict[str, list[nn.Parameter]] = {}
    for _, chunks in found:
        mine = {name: p for chunk in chunks for name, p in chunk.named_parameters(remove_duplicate=False)}
        for name, parameter in mine.items():
            by_name.setdefault(name, []).append(parameter)
    scale = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    for name, parameter in plain.named_parameters():
        own = by_name[name]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if case.steps == 1:
            error = (torch.stack(gradients).mean(0) - gradient).abs().max().item()
            assert error <= 1e-12 * scale, f"gradient of {name}: {error / scale:.1e} of the largest"
        assert (own[0] - parameter).abs().max().item() <= exact, name
    return sum(len(row) for batches in planned for batch in batches for row in batch.plan.schedule.beside)


@pytest.mark.parametrize(
    ("default", "count", "largest"),
    [(0, 3, 40), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 5, 60), (2, 2, LONGEST)))],
)
def test_random_batches_train_as_one_process(default: int, count: int, largest: int) -> None:
    chosen, groups = seed(default), 0
    for number in range(count):
        case = Case(random.Random(f"{chosen} {number}"), largest)
        try:
            groups += check(case)
        except BaseException as error:
            raise AssertionError(f"ZBKERN_SEED={chosen}, number {number}:\n{case.describe()}") from error
    assert groups
