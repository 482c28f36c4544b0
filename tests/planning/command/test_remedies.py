"""What `zbkern plan --config` says would make a model fit does, and less does not."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from tests.support.configurations import question_of, setting_of
from zbkern.pipeline import LayerCosts, ModelCosts, ScheduleError, plan
from zbkern.planning.command.answer import answer
from zbkern.planning.command.remedies import remedies, why_not
from zbkern.planning.costs.needs import least_need, least_uneven, least_work

LIMIT = 72e9


def fits(name: str, stages: int, **sizes: int) -> bool:
    try:
        found = plan(setting_of(name, **sizes).costs, stages, 2, memory_limit=LIMIT, effort=0)
    except ScheduleError:
        return False
    return max(found.timeline.peak_memory) <= LIMIT


@pytest.mark.parametrize(
    ("name", "stages", "given"),
    [
        pytest.param("llama-3-8b", 2, {"sequence": 4096}, marks=pytest.mark.slow),
        ("llama-3-8b", 1, {"sequence": 8192, "data_parallel": 16}),
        pytest.param(
            *("llama-3-8b", 4, {"sequence": 8192, "microbatch_size": 64, "tensor_parallel": 4}), marks=pytest.mark.slow
        ),
        pytest.param("gpt-oss-120b", 8, {"sequence": 4096}, marks=pytest.mark.slow),
    ],
)
def test_each_option_makes_it_fit(name: str, stages: int, given: dict[str, int]) -> None:
    one = dict.fromkeys(("microbatch_size", "tensor_parallel", "expert_parallel"), 1)
    sizes = {**one, "data_parallel": 0, **given}
    assert not fits(name, stages, **sizes)
    found = remedies(question_of(name, stages, 2, {"memory": (LIMIT, False)}, **sizes))
    assert found
    assert ("--fully-shard" in found) == (stages == 1)
    for option in found:
        key, *value = option.split()
        changes: dict[str, Any] = {key.removeprefix("--").replace("-", "_"): int(value[0]) if value else True}
        assert fits(name, **{"stages": stages, **sizes, **changes}), option
        if "stages" in changes:
            assert not fits(name, changes["stages"] - 1, **sizes)


@pytest.mark.slow
def test_options_leave_the_memory_limit_and_the_chunks_as_they_were_given() -> None:
    """A limit of 2x counts what a microbatch holds, which tensor parallelism divides as it divides weights."""

    def named(**asked: Any) -> list[str]:
        return re.search("it fits with (--.*)", why_not(question_of("llama-3-8b", 4, 8, asked)))[1].split(" or ")

    for option in named(memory=(2.0, True)):
        key, value = option.removeprefix("--").replace("-", "_").split()
        sizes = {"stages": 4, key: int(value)}
        assert answer(question_of("llama-3-8b", microbatches=8, asked={"memory": (2.0, True)}, **sizes))
    limit = (32e9, False)
    assert "--stages 6" in named(memory=limit, chunks=5)
    for given in ({"chunks": 6}, {"placement": (0, 1, 2, 3) * 6}):  # 36 of 34 layers
        assert not any("--stages" in option for option in named(memory=limit, **given))


def test_a_placement_that_is_spelt_out_is_for_its_number_of_stages() -> None:
    found = {}
    for placement in ("linear", (0, 1, 2, 3), "v", (0, 1, 2, 3, 3, 2, 1, 0)):
        short = question_of("llama-3-8b", 4, 8, {"memory": (32e9, False), "placement": placement})
        found[placement] = "--stages" in why_not(short)
    assert found == {"linear": True, (0, 1, 2, 3): False, "v": True, (0, 1, 2, 3, 3, 2, 1, 0): False}


def test_the_least_need_is_that_of_the_best_cut() -> None:
    layers = [
        LayerCosts("e", 1, 1, 1, static=5, tied="e"),
        *[LayerCosts(f"{n}", 1, 1, 1, 1, static=2) for n in range(6)],
    ]
    costs = ModelCosts([*layers, LayerCosts("h", 1, 1, 1, 2, static=5, tied="e")])
    assert least_need(costs, 1) == (5 + 12, 8, 0)
    assert least_need(costs, 2) == (5 + 6, 5, 0)  # the last three blocks and the head
    assert least_need(costs, 3).total == 11
    for stages in (1, 2, 3, 8):
        need = least_need(costs, stages).total
        assert plan(costs, stages, 2, placement="linear", memory_limit=need, effort=0)
        with pytest.raises(
            ScheduleError, match=rf" {need:g} in all, which is the smallest limit for one chunk per rank"
        ):
            plan(costs, stages, 2, placement="linear", memory_limit=need * 0.99, effort=0)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("times", [(1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 4), (3, 1, 2, 2, 1, 2), (0, 0, 5, 1, 1, 1)])
def test_no_rank_can_have_less_work_than_the_bound(times: tuple[float, ...], stages: int) -> None:
    costs = ModelCosts(tuple(LayerCosts(str(n), time, 0, 1, merge_saving=1) for n, time in enumerate(times)))
    spread = product(range(stages), repeat=len(times))
    best = min(
        max(sum(t for t, r in zip(times, ranks, strict=True) if r == rank) for rank in ranks) for ranks in spread
    )
    assert sum(times) / stages <= least_work(costs, stages) <= best
    if set(times) == {1}:
        assert least_work(costs, stages) == best
        assert least_uneven(costs, stages) == pytest.approx(1 - len(times) / (stages * best))
