"""Two stages of two tensor- or expert-parallel ranks: steps, norms, clipping and costs equal those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import zbkern
from tests.support import expert_parallel
from tests.support.expert_parallel import one_process_of, stages_of
from tests.support.meshes import named_mesh
from tests.support.tensor_parallel import (
    MAX_NORM,
    MICROBATCHES,
    STEEP,
    OneProcess,
    Stages,
    apart,
    batch,
    chunk,
    loss_fn,
    parallelize,
    values,
)
from zbkern.pipeline import ProfileOptions, profile

pytestmark = pytest.mark.dist


@functools.cache
def one_process(kind: str, steps: range) -> tuple[list[float], list[float], dict[str, Tensor]]:
    plain = one_process_of(kind)
    return *plain.train(steps), plain.named()


def trained(kind: str, schedule: str, fill: str, steps: range) -> tuple[Any, ...]:
    """Losses, norms, weights, how many steps were clipped, how many W waited, and whether all of the experts did."""
    ours, ran, waited = stages_of(kind, (2, 2, schedule), fill), [], set()
    ours.pipe.queue.listeners.append(lambda tasks: ran.append(len(tasks)))
    ours.pipe.queue.listeners.append(lambda tasks: waited.update(id(p) for task in tasks for p in task.parameters))
    with ours.pipe:
        losses, norms = ours.train(steps)
    experts = {id(p) for name, p in ours.named().items() if ".experts.experts." in name}
    return losses, norms, values(ours.named()), ours.optimizer.clipped, sum(ran), experts <= waited


@pytest.mark.parametrize(
    ("kind", "schedule", "fill", "count"),
    [
        ("tied", "zb_h1", "planned", 6),
        ("experts", "zb_h1", "planned", 8),
        pytest.param("sequence", "zb_v", "eager", 6, marks=pytest.mark.slow),
        pytest.param("tied", "zb_v", "planned", 6, marks=pytest.mark.slow),
        pytest.param("sequence", "zb_h1", "eager", 20, marks=pytest.mark.slow),
        pytest.param("experts", "zb_v", "eager", 8, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_one_process(four_ranks: Any, kind: str, schedule: str, fill: str, count: int) -> None:
    steps, experts = range(count), kind == "experts"
    losses, norms, weights = one_process(kind, steps)
    limit, steep = (expert_parallel.MAX_NORM, expert_parallel.STEEP) if experts else (MAX_NORM, STEEP)
    clipped = [step for step, norm in enumerate(norms) if norm > limit]
    assert clipped == [step for step in steep if step in steps]
    results = four_ranks.run(trained, kind, schedule, fill, steps)
    found = [of_rank for of_rank, *_ in results if of_rank[0] is not None]
    assert len(found) == 2
    for step_losses, loss in zip(zip(*found, strict=True), losses, strict=True):  # with experts, of each rank's tokens
        assert ([sum(step_losses)] * 2 if experts else [*step_losses]) == pytest.approx([loss] * 2, rel=1e-11)
    for _, found_norms, found_weights, times, waited, experts_waited in results:
        assert found_norms == pytest.approx(norms, rel=1e-11)
        assert max(apart(found_weights, weights).values()) < 1e-10, apart(found_weights, weights)
        assert times == len(clipped) >= 2
        assert waited > count * MICROBATCHES
        assert experts_waited


def measured(tensor: int) -> tuple[Any, ...]:
    """Costs of this rank's pipeline, and whether gradients and weights are as before."""
    mesh = named_mesh(stage=2, tensor=2)
    stage = mesh["stage"].get_local_rank()
    module = zbkern.convert(chunk(stage, 2))
    if tensor > 1:
        parallelize(module, mesh["tensor"], sequence=False)
    inputs, targets = batch(0)
    costs = profile(
        module,
        (0, 1),
        loss_fn,
        inputs if stage == 0 else None,
        targets if stage == 1 else None,
        MICROBATCHES,
        mesh.get_group("stage"),
        options=ProfileOptions(repeats=1),
    )
    assert all(parameter.grad is None for parameter in module.parameters())
    return costs.activation, costs.held, costs.weight


@pytest.mark.slow
def test_measured_memory_is_that_of_this_ranks_part(four_ranks: Any) -> None:
    plain = four_ranks.run(measured, 1)[0]
    for activation, held, weight in four_ranks.run(measured, 2):
        for mine, all_of_it in ((activation, plain[0]), (held, plain[1])):
            for chunk_mine, chunk_whole in zip(mine, all_of_it, strict=True):
                assert 0.4 * chunk_whole < chunk_mine < 0.95 * chunk_whole
        assert all(time > 0 for time in weight)


def gradients_with(wgrads_per_collective: int, regather_inputs: bool) -> tuple[dict[str, Any], int, int]:
    """A planned step's gradients, how many W ran while a collective was in flight, and the most bytes W held."""
    ours = Stages(2, 2, "zb_h1", tied=False, sequence=True, fill="planned")
    queue = ours.pipe.queue
    queue.merge = False  # one W at a time, as with wgrads_per_collective: sums in the same order
    queue.wgrads_per_collective, queue.regather_inputs = wgrads_per_collective, regather_inputs
    covered: list[int] = []
    run = queue.run_during_collective
    with ours.pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "run_during_collective", lambda: (covered.append(run()), covered[-1])[1])
        ours.gradients(0)
    return (
        values({name: parameter.grad for name, parameter in ours.named().items()}),
        sum(covered),
        queue.peak_bytes,
    )


def test_w_during_collectives_and_inputs_that_are_gathered_again(four_ranks: Any) -> None:
    plain = OneProcess(tied=False)
    plain.gradients(0)
    expected = {name: parameter.grad for name, parameter in plain.named().items()}
    kept = four_ranks.run(gradients_with, 0, False)
    assert all(covered == 0 for _, covered, _ in kept)
    for options in ((2, False), (0, True), (2, True)):
        found = four_ranks.run(gradients_with, *options)
        for (gradients, covered, held), (before, _, held_before) in zip(found, kept, strict=True):
            without = {name: torch.from_numpy(gradient) for name, gradient in before.items()}
            for others in (expected, without):
                far = apart(gradients, others)
                assert max(far.values()) < 1e-10, far
            assert (covered > 0) == (options[0] > 0)
            assert held < held_before or options == (2, False)
