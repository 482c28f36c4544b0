"""Offload and recomputation of chunks under FSDP2 and tensor parallelism: the same gradients bit for bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.saving import saved_in_turn, with_actions
from tests.support.tensor_parallel import MICROBATCHES, Stages, batch, loss_fn
from tests.support.two_by_two import MICROBATCHES as OF_REPLICAS
from tests.support.two_by_two import Setup, mean_square, mesh
from zbkern.pipeline import ProfileOptions, Schedule, StepOptions, profile, simulate

pytestmark = pytest.mark.dist

Found = tuple[dict[str, Any], tuple[float, ...], tuple[float, ...], int]


def saving(schedule: Schedule, how: tuple[str | None, ...]) -> Schedule:
    return with_actions(schedule, saved_in_turn(*how)) if how else schedule


def local(gradient: Any) -> Any:
    """This rank's part, for another process."""
    return (gradient.to_local() if hasattr(gradient, "to_local") else gradient).numpy()


def planned(modules: Any, schedule: Schedule, *arguments: Any, **options: Any) -> tuple[float, ...]:
    """Peak bytes of every rank with costs that were measured."""
    loss, data, microbatches, group = arguments
    measured = profile(
        modules,
        *(schedule.placement, loss, *data, microbatches, group),
        options=ProfileOptions(1, 0, **options),
    )
    costs = replace(measured, static=0, offload_bandwidth=1e9, reload_bandwidth=1e9)
    return simulate(schedule, costs).peak_memory


def of_replicas(
    name: str, how: tuple[str | None, ...], reshard: bool, copy_size: int, recompute: tuple[str, ...] = ()
) -> Found:
    """Gradients of a step of FSDP2 stages, planned and measured peaks, and how many storages were offloaded. Where
    memory is saved, the step is a second one: what is saved once is saved again."""
    setup = Setup("fsdp", name, reshard_after_forward=reshard)
    setup.schedule = saving(setup.schedule, how)
    data = setup.data(0), setup.data(1)
    peaks: tuple[float, ...] = ()
    if how:
        arguments = (mean_square, data[0], OF_REPLICAS, mesh().get_group("stage"))
        peaks = planned(setup.modules, setup.schedule, *arguments, copy_size=copy_size, recompute=recompute)
    with setup.pipe(options=StepOptions(copy_size=copy_size, recompute=recompute)) as pipe:
        pipe.queue.merge = False
        for each in data if how else data[1:]:
            for parameter in setup.parameters():
                parameter.grad = None
            pipe.step(*each)
        timeline = pipe.gather_timeline()
    gradients = {
        f"{chunk}.{name}": local(p.grad)
        for chunk, module in zip(setup.chunks, setup.plain, strict=True)
        for name, p in module.named_parameters()
    }
    return gradients, peaks, timeline.peak_memory, sum(map(len, timeline.copies))


def of_tensor_parallel(
    name: str, how: tuple[str | None, ...], sequence: bool, copy_size: int, recompute: tuple[str, ...] = ()
) -> Found:
    """The same of tensor-parallel stages."""
    options = StepOptions(copy_size=copy_size, recompute=recompute)
    ours = Stages(2, 2, name, True, sequence, "planned", lambda each: saving(each, how), options=options)
    data = [part if wanted else None for part, wanted in zip(batch(0), (ours.first, ours.last), strict=True)]
    peaks: tuple[float, ...] = ()
    if how:
        arguments = (loss_fn, data, MICROBATCHES, ours.group)
        peaks = planned(ours.modules, ours.schedule, *arguments, copy_size=copy_size, recompute=recompute)
    with ours.pipe as pipe:
        pipe.queue.merge = False
        for step in (0, 1) if how else (1,):
            ours.gradients(step)
        timeline = pipe.gather_timeline()
    gradients = {name: local(p.grad) for name, p in ours.named().items()}
    return gradients, peaks, timeline.peak_memory, sum(map(len, timeline.copies))


@functools.cache
def without_saving(ranks: Any, function: Any, name: str, option: bool) -> list[Found]:
    return ranks.run(function, name, (), option, 1)


def check(
    ranks: Any, function: Any, name: str, how: tuple[str | None, ...], option: bool, recompute: tuple[str, ...] = ()
) -> None:
    expected = without_saving(ranks, function, name, option)
    found = ranks.run(function, name, how, option, 500, recompute)
    for (gradients, peaks, measured, copies), plain in zip(found, expected, strict=True):
        assert gradients.keys() == plain[0].keys()
        for key, value in gradients.items():
            assert torch.equal(torch.from_numpy(value), torch.from_numpy(plain[0][key])), key
        assert measured == pytest.approx(peaks, rel=0.1)
        assert (copies > 0) == ("copied" in how)


@pytest.mark.parametrize(
    ("name", "how", "reshard"),
    [
        ("zb_h1", ("recomputed", "copied", None), True),
        pytest.param("zb_v", ("recomputed", "copied"), False, marks=pytest.mark.slow),
        pytest.param("one_f_one_b", ("copied",), True, marks=pytest.mark.slow),
        pytest.param("zb_v", ("recomputed",), True, marks=pytest.mark.slow),
    ],
)
def test_stages_under_fsdp(four_ranks: Any, name: str, how: tuple[str | None, ...], reshard: bool) -> None:
    check(four_ranks, of_replicas, name, how, reshard)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how", "sequence"),
    [
        ("zb_h1", ("recomputed", "copied", None), True),
        ("zb_v", ("recomputed", "copied"), False),
        ("one_f_one_b", ("copied",), True),
        ("zb_v", ("recomputed",), True),
    ],
)
def test_tensor_parallel_stages(four_ranks: Any, name: str, how: tuple[str | None, ...], sequence: bool) -> None:
    check(four_ranks, of_tensor_parallel, name, how, sequence)


@pytest.mark.slow
@pytest.mark.parametrize("function", [of_replicas, of_tensor_parallel])
def test_parts_of_sharded_stages(four_ranks: Any, function: Any) -> None:
    """A norm, whose weights FSDP2 gathers with those of the block around it, and which tensor parallelism may cut."""
    check(four_ranks, function, "zb_h1", ("recomputed", "copied"), True, ("*norm",))
