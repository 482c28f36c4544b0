"""Two stages of two tensor-parallel ranks: W during collectives, inputs gathered again, and costs of a rank's part."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import zbkern
from tests.support.parallel_stages import (
    MICROBATCHES,
    OneProcess,
    Stages,
    apart,
    batch,
    chunk,
    loss_fn,
    parallelize,
    values,
)
from tests.support.ranks import named_mesh
from zbkern.pipeline import ProfileOptions, profile
from zbkern.pipeline.runtime.memory.host_copies import Lanes
from zbkern.pipeline.runtime.memory.storages import Storages

pytestmark = pytest.mark.dist


def measured(tensor: int) -> tuple[Any, ...]:
    """Costs of this rank's pipeline, and whether gradients and weights are as before."""
    mesh = named_mesh(stage=2, other=2)
    stage = mesh["stage"].get_local_rank()
    module = zbkern.convert(chunk(stage, 2))
    if tensor > 1:
        parallelize(module, mesh["other"], sequence=False)
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
    ours = Stages("sequence", (2, 2, "zb_h1"))
    queue = ours.pipe.queue
    queue.merge = False  # one W at a time, as with wgrads_per_collective: sums in the same order
    queue.wgrads_per_collective, queue.regather_inputs = wgrads_per_collective, regather_inputs
    covered: list[int] = []
    run = queue._run_during_collective
    with ours.pipe, pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "_run_during_collective", lambda *how: (covered.append(run(*how)), covered[-1])[1])
        ours.gradients(0)
    return (
        values({name: parameter.grad for name, parameter in ours.named().items()}),
        sum(covered),
        queue.peak_bytes,
    )


def test_w_during_collectives_and_inputs_that_are_gathered_again(four_ranks: Any) -> None:
    plain = OneProcess()
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


def offloaded_on_arrival() -> list[float]:
    """What comes back of a DTensor that was offloaded while its collective waited for another rank."""
    rank = torch.distributed.get_rank()
    part = DTensor.from_local(torch.full((8,), 1.0 + rank), named_mesh(stage=2, other=2)["other"], [Shard(0)])
    torch.distributed.barrier()
    time.sleep(0.3 * rank)
    gathered = part.redistribute(placements=[Replicate()], async_op=True)
    copies = Lanes(torch.device("cpu"), time.monotonic, copy_size=1)
    storages = Storages(copies, (), began=lambda copy: None)
    saved = storages.save(gathered)
    storages.begin_offload()
    gathered + gathered
    del gathered
    storages.end_offload()
    storages.begin_load(lambda copy: None)
    found: Any = saved.get()
    copies.close()
    return found.to_local().unique().tolist()  # type: ignore[no-any-return]


def test_what_is_offloaded_has_arrived(four_ranks: Any) -> None:
    assert four_ranks.run(offloaded_on_arrival) == [[1.0, 2.0]] * 2 + [[3.0, 4.0]] * 2
