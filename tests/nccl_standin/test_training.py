"""All that a Pipeline runs, over the stand-in for NCCL: the values of one process, and nothing stuck or unsafe."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from tests.nccl_standin.ranks import Run
from tests.nccl_standin.training import Case, Whole, in_one_process, train
from tests.support.schedules import saved_in_turn, with_actions
from tests.support.seeds import seed as seed_of
from zbkern.pipeline import Costs, plan, schedules
from zbkern.planning.planner import native
from zbkern.schedules.schedule import Schedule

QUEUES = (8, 16, 32)  # CUDA's default, and its most
ODD = (torch.bool, torch.int16, torch.complex64, torch.float64, torch.bfloat16, torch.uint8, torch.int64)


@functools.cache
def planned(size: int, saves: bool, placement: str) -> Schedule:
    bandwidth = {"offload_bandwidth": 10.0, "reload_bandwidth": 10.0} if saves else {}
    costs, limit = Costs(communication=0.1, checkpoint=0.1, **bandwidth), 0.6 * size if saves else size
    how = {"offload": saves, "recompute": saves, "placement": placement, "chunks": 2 if placement == "v" else 1}
    return plan(costs, size, 2 * size, memory_limit=limit, effort=1, **how).schedule


@functools.cache
def known(case: Case) -> Whole:
    return in_one_process(case)


def check(case: Case, seed: int, queues: int) -> Run:
    size = case.schedules[0].ranks
    run = Run(size, queues, seed, strict=seed % 2 == 1)
    outcomes = train(case, run, known(case))
    assert max(outcome.worst for outcome in outcomes) < 2e-4
    assert not run.errors()
    assert all(nccl.calls for nccl in run.communicators) or size == 1
    return run


def cases(size: int) -> Iterator[tuple[str, Case]]:
    """By what they are called: all that a step can be."""
    m = 2 * size
    made = {name: getattr(schedules, name) for name in schedules.NAMES}
    for name, make in made.items():
        yield name, Case((make(size, m),))
        yield f"{name}, slices", Case((make(size, size, slices=3),), length=6)
    for name in ("zb_h1", "zb_v", "interleaved"):
        one = made[name](size, m)
        yield f"{name}, eager", Case((one,), fill="eager")
        yield f"{name}, many tensors", Case((one,), dtypes=ODD)
        yield f"{name}, tied", Case((one,), tied=True)
        yield f"{name}, taken back", Case((one,), near=True)
        yield f"{name}, inverse", Case((one,), near=True, undo="inverse", dtypes=(torch.bool,))
        yield f"{name}, tied and taken back", Case((one,), near=True, tied=True, dtypes=(torch.int32,))
        yield f"{name}, no Optimizer", Case((one,), optimizer=False)
        others = (made[name](size, size), one, made[name](size, size * 3))
        yield f"{name}, another schedule each step", Case(others)
        for kind in ("recomputed", "copied"):
            yield f"{name}, {kind}", Case((with_actions(one, saved_in_turn(None, kind)),))
    for saves, placement in itertools.product((False, True), ("linear", "v")):
        if native.core is not None:
            yield f"plan, {placement}, saves {saves}", Case((planned(size, saves, placement),), near=saves)


QUICK = [("zb_h1, many tensors", 3), ("zb_v, taken back", 4), ("interleaved, tied", 2), ("dualpipe_v, slices", 2)]


@pytest.mark.parametrize(("name", "size"), QUICK)
def test_a_pipeline_trains_as_one_process_does(name: str, size: int) -> None:
    case = dict(cases(size))[name]
    for seed in range(2):
        check(case, seed, queues=8)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_everything_trains_as_one_process_does(part: int) -> None:
    """With two, three or four ranks; another seed has others."""
    first = seed_of(part)
    rng = random.Random(first)
    everything = [[*cases(size)] for size in (2, 3, 4)]
    for number in range(part, len(everything[0]), 3):
        name, case = everything[(number // 3 + first) % 3][number]
        seed, queues = rng.randrange(10**6), rng.choice(QUEUES)
        print(name, case.schedules[0].ranks, seed, queues)
        check(case, seed, queues)


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 8])
def test_many_ranks_train_as_one_process_does(size: int) -> None:
    rng = random.Random(seed_of(size))
    for name, case in rng.sample([*cases(size)], 4):
        seed, queues = rng.randrange(10**6), rng.choice(QUEUES)
        print(name, size, seed, queues)
        check(case, seed, queues)
