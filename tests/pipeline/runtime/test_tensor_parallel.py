"""Two stages of two tensor-parallel ranks: steps, norms, clipping and measured costs equal those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import zbkern
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
def one_process(tied: bool, steps: range) -> tuple[list[float], list[float], dict[str, Tensor]]:
    plain = OneProcess(tied)
    return *plain.train(steps), plain.named()


def trained(schedule: str, tied: bool, sequence: bool, fill: str, steps: range) -> tuple[Any, ...]:
    """Losses, norms, weights, how many steps were clipped, how many W waited."""
    ours = Stages(2, 2, schedule, tied, sequence, fill)
    ran: list[int] = []
    ours.pipe.queue.listeners.append(lambda tasks: ran.append(len(tasks)))
    with ours.pipe:
        losses, norms = ours.train(steps)
    return losses, norms, values(ours.named()), ours.optimizer.clipped, sum(ran)


@pytest.mark.parametrize(
    ("schedule", "tied", "sequence", "fill", "count"),
    [
        ("zb_h1", True, False, "planned", 6),
        pytest.param("zb_v", False, True, "eager", 6, marks=pytest.mark.slow),
        pytest.param("zb_v", True, False, "planned", 6, marks=pytest.mark.slow),
        pytest.param("zb_h1", False, True, "eager", 20, marks=pytest.mark.slow),
    ],
)
def test_steps_equal_one_process(
    four_ranks: Any, schedule: str, tied: bool, sequence: bool, fill: str, count: int
) -> None:
    steps = range(count)
    losses, norms, weights = one_process(tied, steps)
    steep = [step for step in STEEP if step in steps]
    assert sum(norm > MAX_NORM for norm in norms) == len(steep) >= 2
    results = four_ranks.run(trained, schedule, tied, sequence, fill, steps)
    assert any(result[0][0] is not None for result in results)
    for found, found_norms, found_weights, clipped, waited in results:
        assert found in ([None] * count, pytest.approx(losses, rel=1e-11))
        assert found_norms == pytest.approx(norms, rel=1e-11)
        far = apart(found_weights, weights)
        assert max(far.values()) < 1e-10, far
        assert clipped == len(steep)
        assert waited > count * MICROBATCHES


def measured(tensor: int) -> tuple[Any, ...]:
    """Costs of this rank's pipeline, and whether gradients and weights are as before."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tensor"))
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
