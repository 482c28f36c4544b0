"""Torch optimizers that do more than others: they write into gradients, have quantised states, or numbers for all
parameters together."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.support.chunks import results_on_threads
from tests.support.needs import installed
from tests.support.optimizer_cases import OPTIMIZERS, Case, clip_in_float64, ours, plain_loop
from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.transport.base import PipelineError
from zbkern.pipeline.transport.local import LocalTransport

CLIPPED = {(1, 0): 3.0, (1, 2): 5.0}  # steps that the first rank does too early


class WritingLater(OPTIMIZERS["writing"]):  # type: ignore[misc]
    """As a schedule-free RAdam, whose first steps, where it does not trust a variance, write into no gradient."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            if group["steps"] > 5:
                super().step()
            else:
                for parameter in (each for each in group["params"] if each.grad is not None):
                    parameter.sub_(parameter.grad, alpha=0.01)


@pytest.mark.parametrize("make", [OPTIMIZERS["writing"], WritingLater])
def test_gradients_that_a_step_has_written_into_are_there_for_the_next_try(make: Any) -> None:
    case = Case(2, 8, {(1, 2): 3.0, (0, 3): math.nan, (1, 6): 4.0}, make)  # the last in the sixth step that counts
    history, _, optimizers = ours(case, adaptive=False)
    assert [optimizer.undone for optimizer in optimizers] == [2, 0]
    for found, expected in zip(history, plain_loop(case, clip_in_float64)[0], strict=True):
        assert_close(found, expected, rtol=0, atol=0)


# ---- of packages


def schedule_free(parameters: Any) -> torch.optim.Optimizer:
    made = pytest.importorskip("schedulefree", reason="pip install schedulefree")
    optimizer = made.AdamWScheduleFree(parameters, lr=0.01)
    optimizer.train()
    return optimizer


def in_8_bits(parameters: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("torchao.optim", reason="pip install torchao").AdamW8bit(parameters, lr=0.01)


def in_4_bits(parameters: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("torchao.optim", reason="pip install torchao").AdamW4bit(parameters, lr=0.01)


@pytest.mark.slow  # imports them
@pytest.mark.parametrize("make", [schedule_free, in_8_bits, in_4_bits])
def test_steps_of_packages_are_taken_back(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao's would take a minute
    make([nn.Parameter(torch.ones(2))])  # or skip
    case = Case(2, 3, CLIPPED, make, shapes=((64, 64), (7,), (64, 64)))  # large enough to be quantised
    history, _, optimizers = ours(case, adaptive=False)
    waited, *_ = ours(case, undo=None)
    assert [optimizer.undone for optimizer in optimizers] == [2, 0]
    for found, other, expected in zip(history, waited, plain_loop(case, clip_in_float64)[0], strict=True):
        assert_close(found, other, rtol=0, atol=0)
        assert_close(other, expected, rtol=1e-3, atol=1e-4)


# ---- numbers that follow from all parameters


class Distance(torch.optim.Optimizer):
    """As Prodigy and D-Adaptation: its step size follows from all gradients together; none while the rate is 0."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0, "d": torch.tensor(1e-3), **settings})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        moving = [p for group in self.param_groups for p in group["params"] if p.grad is not None and group["lr"] > 0]
        for group in self.param_groups:
            group["d"] = group["d"] + sum(p.grad.abs().sum() for p in moving)
            group["k"] += bool(moving)
        for parameter in moving:
            parameter.sub_(parameter.grad * self.param_groups[0]["d"])


def errors_of(make: Any, ranks: int = 2, steps: int = 4, lost: tuple[int, ...] = (), **options: Any) -> list[str]:
    """What each rank raises; its gradients are not finite in the steps `lost`. make: of parameters, rank."""

    def train(transport: LocalTransport) -> str:
        weights = [nn.Parameter(torch.ones(4 + transport.rank, 3)), nn.Parameter(torch.ones(5))]
        optimizer = Optimizer(make(weights, transport.rank), transport, max_norm=1.0, timeout=60, **options)
        try:
            for step in range(steps):
                for weight in weights:
                    weight.grad = torch.full_like(weight, math.inf if step in lost else 0.1 + transport.rank + step)
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.2
            optimizer.validate()
        except PipelineError as error:
            return str(error)
        return ""

    return results_on_threads(ranks, train)


def with_groups(parameters: Any, rank: int) -> torch.optim.Optimizer:
    """One rank has the group alone that all have."""
    return Distance([{"params": [p], "decay": n} for n, p in enumerate(parameters)] if rank != 1 else parameters[:1])


@pytest.mark.parametrize(
    ("settings", "options"),
    [({}, {}), ({"lr": 0.0}, {"undo": None}), ({}, {"lost": (0, 1)}), ({"lr": 0.0}, {"steps": 3, "ranks": 4})],
)
def test_an_optimizer_that_is_another_one_on_each_rank_is_refused_on_all(settings: Any, options: Any) -> None:
    found = errors_of(lambda parameters, _: Distance(parameters, **settings), **options)
    assert all("optimizer must set the same numbers on all ranks" in error for error in found), found
    assert all("the step of Distance has set 'd' of its groups to " in error for error in found), found


def test_groups_of_the_same_settings_are_compared_wherever_they_are() -> None:
    found = errors_of(with_groups, ranks=3)
    assert all("has set 'd' of its groups" in error for error in found), found


def test_what_a_step_sets_from_settings_that_differ_may_differ() -> None:
    """Counts where one rank has no gradients, and the largest learning rate of each group, as schedule-free has it."""

    class Largest(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                group["largest"] = max(group.get("largest", 0.0), group["lr"])
                if any(p.grad is not None and len(p) == 5 for p in group["params"]):
                    group["count"] = group.get("count", 0) + 1

    def make(parameters: Any, rank: int) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 0.1 * (1 + rank + n), "name": f"{rank}"} for n, p in enumerate(parameters)]
        return Largest(groups if rank else groups[:1])

    assert errors_of(make) == ["", ""]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [installed(tmp_path_factory, name, name) for name in ("prodigyopt", "dadaptation")]


@pytest.mark.slow  # installs them
@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "DAdaptAdaGrad", "DAdaptSGD", "DAdaptLion", "DAdaptAdan"])
def test_prodigy_and_d_adaptation_are_refused_by_name(
    name: str, packages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, *packages])
    kind = getattr(importlib.import_module("prodigyopt" if name == "Prodigy" else "dadaptation"), name)
    found = errors_of(lambda parameters, _: kind(parameters, lr=1.0))
    assert all(f"the step of {name} has set " in error for error in found), found
    assert errors_of(lambda parameters, _: kind(parameters, lr=1.0), ranks=1) == [""]
