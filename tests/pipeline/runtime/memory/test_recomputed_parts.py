"""Recomputation of named parts of a chunk, as an action of its own: norms, activation functions, whole layers."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbkern
from tests.support.chunks import assert_same, one_rank, results_on_threads, run_pipelines
from tests.support.schedules import schedule_of
from zbkern.pipeline import (
    ModelCosts,
    Pipeline,
    PipelineError,
    PlanOptions,
    ProfileOptions,
    StepOptions,
    cut,
    plan,
    profile_layers,
    schedules,
    simulate,
)
from zbkern.pipeline.transport.local import LocalTransport

WIDTH = 8


class Layer(nn.Module):
    """A norm whose output two linears save, and an activation whose output one saves; 4 * WIDTH is its inner width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.left, self.right = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.activation, self.dropout = nn.GELU(), nn.Dropout(0.25)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        inner = self.activation(self.left(normed)) + self.right(normed).sin()
        return x + self.down(self.activation(self.dropout(inner).view(-1, 4 * WIDTH)))


class Chunk(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(row: str, recompute: Any = (), module: nn.Module | None = None, autocast: bool = False) -> tuple[Any, ...]:
    """Gradients and the random number that comes next, and the peak of what was held."""
    torch.manual_seed(3)
    random.seed(3)
    module = module or zbkern.convert(Chunk())
    data, options = torch.randn(6, WIDTH), StepOptions(recompute=recompute)
    with (
        one_rank(module, schedule_of(row, microbatches=3), options=options) as pipe,
        torch.autocast("cpu", torch.bfloat16, autocast),
    ):
        for _ in range(2):
            module.zero_grad()
            pipe.step(data, data)
        peak = pipe.last.gather_timeline().peak_memory
    return [*(p.grad for p in module.parameters()), torch.rand(3)], peak


PLAIN = "0F0 0F1 0F2 0B0 0B1 0B2 0W0 0W1 0W2"
SAVING = "0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2 0W0 0W1 0W2"


@pytest.mark.parametrize("row", [SAVING, "0F0 0F1 0O1 0F2 0R0 0B0 0L1 0B1 0B2 0W0 0W1 0W2"])
@pytest.mark.parametrize(
    "recompute", [[nn.GELU], ["*activation", "*norm", nn.Dropout], ["layers.*"], ["layers.0", "*.down"]]
)
def test_gradients_and_random_numbers_are_the_same_under_autocast(recompute: list[Any], row: str) -> None:
    """Without: test_differential.py."""
    expected, _ = train(PLAIN, autocast=True)
    found, _ = train(row, recompute, autocast=True)
    assert_same(expected, found)


def test_less_is_held_until_the_recomputation() -> None:
    """Outputs of parts that later layers save are given up, too, which is most of what norms are good for."""
    everything = train("0F0 0F1 0F2 0O0 0L0 0B0 0B1 0B2 0W0 0W1 0W2")[1][0]
    norms = train(SAVING, ["*norm"])[1][0]
    both = train(SAVING, ["*norm", nn.GELU])[1][0]
    layers = train(SAVING, ["layers.*"])[1][0]
    one = 2 * WIDTH * 4  # bytes of x of a microbatch of two rows
    # two microbatches have three norms less each: their output and a number per row
    assert everything - norms >= 2 * 3 * one
    assert norms - both >= 2 * 3 * 4 * one  # and the output of the second activation, four times as wide
    assert layers < both < norms < everything


@pytest.mark.parametrize("reentrant", [False, True])
def test_parts_within_a_checkpoint_are_left_to_it(reentrant: bool) -> None:
    class Checkpointed(Chunk):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.layers[1], self.layers[0](x), use_reentrant=reentrant)
            return self.layers[2](x)

    found = []
    for row, parts in ((PLAIN, []), (SAVING, ["*norm"]), (SAVING, ["layers.2"])):
        torch.manual_seed(3)
        found.append(train(row, parts, zbkern.convert(Checkpointed())))
    assert_same(*(gradients for gradients, _ in found))


@pytest.mark.parametrize(
    "parts", [["*norm", nn.GELU], *(pytest.param([each], marks=pytest.mark.slow) for each in (nn.RMSNorm, Layer))]
)
def test_from_measured_layers_to_a_step_as_planned(parts: list[Any]) -> None:
    """On two ranks, which can hold 0.9 of what an R could give up less than without."""
    torch.manual_seed(3)
    data, loss_fn, half = torch.randn(256, WIDTH), nn.functional.mse_loss, 3
    named = {f"layers.{number}": zbkern.convert(Layer()).eval() for number in range(2 * half)}

    def measure(transport: LocalTransport) -> ModelCosts:
        mine = dict([*named.items()][:half] if transport.rank == 0 else [*named.items()][half:])
        options = ProfileOptions(repeats=1, bytes_per_parameter=0, recompute=parts)
        return profile_layers(mine, loss_fn, data, data, 4, transport, options=options)

    first, second = results_on_threads(2, measure)
    assert first == second
    assert all(layer.recompute > 0 for layer in first.layers)
    times = {"forward": 1.0, "backward": 1.0, "weight": 1.0, "split_overhead": 0.0, "merge_saving": 0.0}
    # on a busy machine times are anything; messages that wait are not held by microbatches
    alike = [replace(layer, **times, recompute=0.2, output=0.0) for layer in first.layers]
    first = replace(first, layers=tuple(alike), latency=0.0, bandwidth=math.inf, forward_overhead=0.0)
    flat = first.chunk_costs((0, half)).per_chunk(2)
    most = max(simulate(schedules.one_f_one_b(2, 4), first.chunk_costs((0, half))).peak_memory)
    limit = most - 0.9 * (flat.activation[0] - flat.checkpoint[0])
    options = PlanOptions(partition=(0, half))
    found = plan(first, 2, 4, memory_limit=limit, recompute=True, effort=0, options=options)
    assert max(found.timeline.peak_memory) <= limit * (1 + 1e-6)

    def step(pipe: Pipeline) -> tuple[float, ...]:
        pipe.step(data, data)
        return pipe.last.gather_timeline().peak_memory

    layers = [*named.values()]
    chunks = [nn.Sequential(*layers[:half]), nn.Sequential(*layers[half:])]
    peaks, same = run_pipelines(found.schedule, chunks, step, options=StepOptions(recompute=parts))
    assert peaks == same
    again = {action.chunk for row in found.schedule.actions for action in row if action.kind == "R"}
    assert 0 in again
    assert all(peaks[rank] == pytest.approx(found.timeline.peak_memory[rank], rel=0.1) for rank in again)


def test_layers_without_such_a_part_have_nothing_to_recompute() -> None:
    torch.manual_seed(3)
    layers = {"in": nn.Linear(WIDTH, WIDTH), "blocks.0": Layer(), "blocks.1": Layer()}
    data = torch.randn(64, WIDTH)

    def measure(recompute: list[Any]) -> ModelCosts:
        return profile_layers(
            layers, nn.functional.mse_loss, data, data, options=ProfileOptions(1, 0, recompute=recompute)
        )

    plain, norms, whole = measure([]), measure(["*norm"]), measure(["blocks.*"])
    assert all(layer.checkpoint is None and layer.recompute is None for layer in plain.layers)
    for costs in (norms, whole):
        assert (costs.layers[0].checkpoint, costs.layers[0].recompute) == (costs.layers[0].activation, 0)
        assert all(layer.checkpoint < layer.activation and layer.recompute > 0 for layer in costs.layers[1:])
    one = 16 * WIDTH * 4  # of a microbatch
    # an inner layer keeps no input where the layer before it runs again
    assert [layer.output_again for layer in norms.layers] == [0, 0, 0]
    assert [layer.output_again for layer in whole.layers[:2]] == [0, one]
    assert whole.chunk_costs([0, 1]).checkpoint[1] == sum(layer.checkpoint for layer in whole.layers[1:]) - one
    with pytest.raises(ValueError, match=r"profile_layers: recompute must name parts .*; got \('none',\)"):
        measure(["none"])


@pytest.mark.parametrize("named", [["*norm*"], ["layers.*"]])
def test_layers_of_other_ranks_are_no_parts_of_a_chunk(named: list[str]) -> None:
    """What `cut` leaves in their place has their names."""
    torch.manual_seed(3)
    model, data = Chunk(4).eval(), torch.randn(6, WIDTH)
    rows = "0F0 0F1 0R0 0B0 0R1 0B1 0F2 0R2 0B2 0W0 0W1 0W2", "1F0 1R0 1B0 1F1 1R1 1B1 1F2 1R2 1B2 1W0 1W1 1W2"
    schedule = schedule_of(*rows, microbatches=3)

    chunks = [zbkern.convert(*cut(copy.deepcopy(model), schedule, layers=["layers.*"], rank=rank)) for rank in (0, 1)]
    run_pipelines(schedule, chunks, lambda pipe: pipe.step(data, data), options=StepOptions(recompute=named))
    (sum(nn.functional.mse_loss(model(x), x) for x in data.split(2)) / 3).backward()
    torch.testing.assert_close(
        [p.grad for chunk in chunks for p in chunk.parameters()], [p.grad for p in model.parameters()]
    )


class Changing(nn.Module):
    """What its activation is given, or returns, is modified in place."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=inplace)
        self.norm, self.second = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.activation(self.linear(x) * 1.0))
        return self.second(y.mul_(2.0))


def test_an_output_that_is_modified_is_kept() -> None:
    torch.manual_seed(3)
    state = Changing(inplace=False).state_dict()
    found = []
    for row in (PLAIN, SAVING):
        module = Changing(inplace=False)
        module.load_state_dict(state)
        found.append(train(row, ["norm"], zbkern.convert(module))[0])
    assert_same(*found)


def test_a_part_that_modifies_its_input_is_refused() -> None:
    with pytest.raises(PipelineError, match="ReLU modifies what it is given in place"):
        train(SAVING, [nn.ReLU], Changing(inplace=True))


def test_what_is_not_there_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"recompute must name a part of every chunk .* chunk 0 has none for \('none',"
    ):
        train(SAVING, ["none"])
    plain, saving = schedule_of(PLAIN, microbatches=3), schedule_of(SAVING, microbatches=3)
    with one_rank(nn.Linear(2, 2), plain, options=StepOptions(recompute=["none"])) as pipe:
        data = torch.ones(3, 2)
        for _ in range(2):  # the second time, too
            with pytest.raises(ValueError, match="recompute must name a part"):
                pipe.step(data, data, schedule=saving)
        assert pipe.step(data, data) is not None


class Unrepeatable(nn.Module):
    """Its factor comes from where an R cannot put it back."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear, self.source, self.calls = nn.Linear(WIDTH, WIDTH), source, [0]  # a number alone would be put back
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        if self.source == "numpy":
            factor: Any = np.random.rand()
        elif self.source == "generator":
            factor = torch.rand(WIDTH, generator=self.generator)
        elif self.source == "structure":
            return self.linear(x).sin() if self.calls[0] == 1 else self.linear(x).sin().tanh()
        elif self.source == "order":
            return self.linear(x).sin()[torch.randperm(len(x), generator=self.generator)]
        else:
            factor = 1 + 1e-3 * (self.calls[0] if self.source == "counter" else max(0, self.calls[0] - 14))
        return self.linear(x).sin() * factor


@pytest.mark.parametrize("recompute", [(), (nn.Sequential,)])
@pytest.mark.parametrize(
    ("source", "always"),
    [("numpy", 0), ("generator", 0), ("order", 0), ("structure", 0), ("counter", 0), ("later", 1)],
)
def test_a_forward_that_computes_something_else_is_told(source: str, always: bool, recompute: Any) -> None:
    module = nn.Sequential(nn.Sequential(Unrepeatable(source)), nn.Linear(WIDTH, WIDTH))
    options = StepOptions(recompute=recompute, check_values=bool(always))
    data = torch.randn(6, WIDTH)

    def steps() -> None:
        with one_rank(module, schedule_of(SAVING, microbatches=3), options=options) as pipe:
            for _ in range(4):
                pipe.step(data, data)

    told = (
        "gave one result, and another when" if source != "structure" else r"(saved \d tensors .*be recomputed|gave one)"
    )
    with pytest.raises(PipelineError, match=rf"action 0R\d: RuntimeError: Sequential {told}"):
        steps()
