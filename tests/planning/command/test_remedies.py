"""What `zbkern plan --config` says would make a model fit does, and less does not."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from zbkern import __main__
from zbkern.pipeline import LayerCosts, ModelCosts, ScheduleError, plan
from zbkern.planning.command.remedies import remedies
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.model_costs import Job, model_costs
from zbkern.planning.simulation.needs import least_need, least_uneven, least_work

CONFIGURATIONS = Path(__file__).parents[3] / "bench" / "configurations"
LIMIT = 72e9
H100 = load_hardware("h100")


def costs_of(name: str, **sizes: int) -> ModelCosts:
    return model_costs(load_architecture(CONFIGURATIONS / f"{name}.json"), H100, Job(**sizes))


def fits(name: str, stages: int, **sizes: int) -> bool:
    try:
        found = plan(costs_of(name, **sizes), stages, 2, memory_limit=LIMIT, effort=0)
    except ScheduleError:
        return False
    return max(found.timeline.peak_memory) <= LIMIT


@pytest.mark.parametrize(
    ("name", "stages", "given"),
    [
        ("llama-3-8b", 2, {"sequence": 4096}),
        ("llama-3-8b", 1, {"sequence": 8192, "data_parallel": 16}),
        pytest.param(
            *("llama-3-70b", 8, {"sequence": 8192, "microbatch_size": 64, "tensor_parallel": 8}), marks=pytest.mark.slow
        ),
        pytest.param("gpt-oss-120b", 8, {"sequence": 4096}, marks=pytest.mark.slow),
        pytest.param(
            *("qwen3-235b", 4, {"sequence": 4096, "tensor_parallel": 4, "expert_parallel": 8}), marks=pytest.mark.slow
        ),
    ],
)
def test_each_option_makes_it_fit(name: str, stages: int, given: dict[str, int]) -> None:
    one = dict.fromkeys(("microbatch_size", "tensor_parallel", "expert_parallel"), 1)
    sizes = {**one, "data_parallel": 0, **given}
    assert not fits(name, stages, **sizes)
    found = remedies(load_architecture(CONFIGURATIONS / f"{name}.json"), H100, stages, sizes, LIMIT)
    assert found
    assert ("--fully-shard" in found) == (stages == 1)
    for option in found:
        key, *value = option.split()
        changes: dict[str, Any] = {key.removeprefix("--").replace("-", "_"): int(value[0]) if value else True}
        assert fits(name, **{"stages": stages, **sizes, **changes}), option
        if "stages" in changes:
            assert not fits(name, changes["stages"] - 1, **sizes)


@pytest.mark.slow
def test_options_leave_the_memory_limit_and_the_chunks_as_they_were_given(capsys: pytest.CaptureFixture) -> None:
    """A limit of 2x counts what a microbatch holds, which tensor parallelism divides as it divides weights."""
    config = ["plan", "--config", str(CONFIGURATIONS / "llama-3-8b.json"), "--microbatches", "8", "--effort", "0"]

    def named(*options: str) -> list[str]:
        assert __main__.main([*config, "--stages", "4", *options]) == 2
        return re.search(r"it fits with (--.*)\n", capsys.readouterr().err)[1].split(" or ")

    limit = ["--memory", "2x"]
    for option in named(*limit):
        assert __main__.main([*config, "--stages", "4", *limit, *option.split()]) == 0
    limit = ["--memory", "32e9"]
    assert "--stages 6" in named(*limit, "--chunks", "5")
    for chunks in (["--chunks", "6"], ["--placement", ",".join("0123" * 6)]):  # 36 of 34 layers
        assert not any("--stages" in option for option in named(*limit, *chunks))


def test_a_placement_that_is_spelt_out_is_for_its_number_of_stages(capsys: pytest.CaptureFixture) -> None:
    config = ["plan", "--config", str(CONFIGURATIONS / "llama-3-8b.json"), "--microbatches", "8", "--effort", "0"]
    short = [*config, "--stages", "4", "--memory", "32e9"]
    found = {}
    for placement in ("linear", "0,1,2,3", "v", "0,1,2,3,3,2,1,0"):
        assert __main__.main([*short, "--placement", placement]) == 2
        found[placement] = "--stages" in capsys.readouterr().err.partition("it fits with")[2]
    assert found == {"linear": True, "0,1,2,3": False, "v": True, "0,1,2,3,3,2,1,0": False}


def test_the_least_need_is_that_of_the_best_cut() -> None:
    layers = [
        LayerCosts("e", 1, 1, 1, static=5, tied="e"),
        *[LayerCosts(f"{n}", 1, 1, 1, 1, static=2) for n in range(6)],
    ]
    costs = ModelCosts([*layers, LayerCosts("h", 1, 1, 1, 2, static=5, tied="e")])
    assert least_need(costs, 1) == (5 + 12, 8)
    assert least_need(costs, 2) == (5 + 6, 5)  # the last three blocks and the head
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
