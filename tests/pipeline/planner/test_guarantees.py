"""What more memory, more choices and more effort can never make worse, at every effort and by construction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import examples
from zbkern.pipeline import Costs, LayerCosts, ModelCosts, ScheduleError, plan
from zbkern.pipeline.planner import Plan, levels, model_search, native, portfolio
from zbkern.pipeline.planner.settings import SearchSettings

pytestmark = pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")

SAME = 1 + 1e-8  # costs that differ by less are the same
times = st.floats(0.2, 3.0)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches so short that chance decides what they find: a guarantee that held by luck would fail."""
    short = SearchSettings(first_round=20_000, layers_rounds=(5_000, 10_000), trial_passes=200_000, layers_rules=3_000)
    for module in (portfolio, levels, model_search):
        monkeypatch.setattr(module, "SETTINGS", short)


@examples(5, 24)
@given(
    shape=st.sampled_from([(2, 1, "linear"), (3, 1, "linear"), (2, 2, "v"), (3, 2, "loop"), (2, 3, "zigzag")]),
    microbatches=st.integers(2, 12),
    work=st.tuples(times, times, times),
    latency=st.floats(0, 0.5),
    held=st.floats(0.3, 1.4),
    more=st.sampled_from(["", "saving", "overhead", "static", "uneven"]),
    limits=st.lists(st.floats(1.0, 3.5), min_size=3, max_size=5),
    objective=st.sampled_from(["cost", "makespan"]),
    seed=st.integers(0, 3),
)
def test_more_memory_and_more_effort_are_never_worse(
    shape: tuple[int, int, str],
    microbatches: int,
    work: tuple[float, float, float],
    latency: float,
    held: float,
    more: str,
    limits: list[float],
    objective: str,
    seed: int,
) -> None:
    stages, chunks, placement = shape
    count = stages * chunks
    given_: dict[str, object] = {"merge_saving": work[2] / 4} if more == "saving" else {}
    given_ |= {"split_overhead": min(work[1:]) / 2} if more == "overhead" else {}
    given_ |= {"static": [0.7 * (chunk % 3) for chunk in range(count)]} if more == "static" else {}
    activation = [1.0 + 0.3 * (chunk % 2) for chunk in range(count)] if more == "uneven" else 1.0
    costs = Costs(*work, latency, activation, held, **given_)
    found = []
    for limit in [*sorted(limits), None]:
        memory = None if limit is None else chunks * (limit * 1.3 + 2.1)
        given_plan = partial(
            plan, costs, stages, microbatches, chunks, placement, memory, objective=objective, seed=seed
        )
        efforts = [getattr(given_plan(effort=effort).timeline, objective) for effort in (0, 1, 3)]
        assert all(later <= earlier * SAME for earlier, later in pairwise(efforts))
        found.append(efforts)
    for less, enough in pairwise(found):
        assert all(b <= a * SAME for a, b in zip(less, enough, strict=True)), (limits, found)


def reached(given_plan: Callable[..., Plan], objective: str, **given_: object) -> float:
    """The objective; infinite where nothing fits."""
    try:
        return getattr(given_plan(**given_).timeline, objective)
    except ScheduleError:
        return float("inf")


@examples(2, 20)
@given(
    blocks=st.integers(5, 9),
    head=st.floats(0.3, 3.0),
    held=st.floats(0.4, 1.3),
    static=st.floats(0, 2.0),
    microbatches=st.integers(2, 8),
    limits=st.lists(st.floats(1.0, 4.0), min_size=2, max_size=4),
    objective=st.sampled_from(["cost", "makespan"]),
    effort=st.sampled_from([0, 1, 2]),
)
@example(8, 3.0, 0.5, 0.0, 8, [1.0, 1.3125], "makespan", 0)  # the best orders are of cuts without a level
def test_of_a_model_more_memory_and_more_choices_are_never_worse(
    blocks: int,
    head: float,
    held: float,
    static: float,
    microbatches: int,
    limits: list[float],
    objective: str,
    effort: int,
) -> None:
    block = [LayerCosts(f"{index}", 1.0, 1.1, 0.9, 1.0, held, output=0.1, static=static) for index in range(blocks)]
    ends = {"static": 2 * static, "tied": "embedding"}
    first = LayerCosts("embedding", 0.05, 0.0, 0.1, 0.1, 0.1, output=0.1, **ends)
    model = ModelCosts((first, *block, LayerCosts("head", head, head, head, 0.4, 0.5, **ends)), 0.02, 20.0)
    stages, before = 2, float("inf")
    for limit in [*sorted(limits), None]:
        memory = None if limit is None else (blocks + 2) / 2 * (static + limit)

        given_plan = partial(plan, model, stages, microbatches, memory_limit=memory, effort=effort, objective=objective)
        free = reached(given_plan, objective)
        assert free <= before * SAME, (limits, limit)
        before = free
        for given_ in ({"chunks": 1}, {"chunks": 2}, {"chunks": 3}, {"placement": "v"}, {"placement": "loop"}):
            assert free <= reached(given_plan, objective, **given_) * SAME, (limits, limit, given_)


def test_several_limits_of_a_model_are_never_worse_than_the_least_of_them_for_all_ranks() -> None:
    block = [LayerCosts(f"{index}", 1.0, 1.1, 0.9, 1.0, 1.2, output=0.1, static=1.0) for index in range(7)]
    model = ModelCosts((*block, LayerCosts("head", 2.0, 2.0, 2.0, 0.4, 0.5, static=2.0)), 0.02)
    for least in (11.0, 14.5, 17.0):
        one = reached(partial(plan, model, 2, 6, memory_limit=least, effort=0), "cost")
        for limits in ([least, 1.5 * least], [3 * least, least], [1.1 * least, least]):
            several = reached(partial(plan, model, 2, 6, memory_limit=limits, effort=0), "cost")
            assert several <= one * SAME, (least, limits)


def test_orders_are_compared_by_what_they_cost_and_not_by_what_the_list_scheduler_says() -> None:
    """It counts waits that its orders do not have: of two that it says cost the same, one was better here."""
    forward = [0.45, 0.2, 0.5, 0.63, 1.41, 0.34, 1.86, 0.67]
    costs = Costs(forward, 0.62, 1.0, 0.2, 1.134645, 1.475039, static=[1, 0, 1, 2, 0, 2, 1, 1])
    found = partial(plan, costs, 4, 11, 2, "v", objective="makespan", effort=0)
    one = reached(found, "makespan", memory_limit=9.843653)
    assert reached(found, "makespan", memory_limit=[9.843653, 9.843653, 9.843653, 14.76548]) <= one * SAME


def test_in_a_line_there_is_one_chunk_per_rank_unless_more_are_asked_for() -> None:
    """Chunks of a rank that follow each other take no part in a free search, so that it could be worse than they."""
    layers = tuple(LayerCosts(f"{index}", 1.0, 1.1, 0.9, 1.0, 1.2) for index in range(8))
    found = plan(ModelCosts(layers, 0.02), 2, 6, placement="linear", memory_limit=8.0, effort=0)
    assert found.schedule.placement == (0, 1)
    assert plan(ModelCosts(layers), 2, 6, 2, "linear", effort=0).schedule.placement == (0, 0, 1, 1)
