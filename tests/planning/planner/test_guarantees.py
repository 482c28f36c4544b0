"""What more effort can never make worse, nor more memory than 1F1B's; other memory only by chance and by little."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import examples
from zbkern.pipeline import Costs, LayerCosts, ModelCosts, PlanOptions, plan, schedules, simulate
from zbkern.planning.command.published import published_timelines
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.planner import native

pytestmark = pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")

CONFIGURATIONS = Path(__file__).parents[3] / "bench" / "configurations"
SAME = 1 + 1e-8  # costs that differ by less are the same
times = st.floats(0.2, 3.0)


@examples(5, 24)
@given(
    shape=st.sampled_from([(2, 1, "linear"), (3, 1, "linear"), (2, 2, "v"), (3, 2, "loop"), (2, 3, "zigzag")]),
    microbatches=st.integers(2, 12),
    work=st.tuples(times, times, times),
    latency=st.floats(0, 0.5),
    held=st.floats(0.3, 1.4),
    more=st.sampled_from(["", "saving", "overhead", "static", "uneven", "messages"]),
    limit=st.floats(1.0, 3.5),
    objective=st.sampled_from(["cost", "makespan"]),
    seed=st.integers(0, 3),
)
@example((2, 2, "v"), 10, (1.25, 1.125, 2.0), 0.25, 1.125, "saving", 1.0, "cost", 1)
def test_more_effort_is_never_worse(
    shape: tuple[int, int, str],
    microbatches: int,
    work: tuple[float, float, float],
    latency: float,
    held: float,
    more: str,
    limit: float,
    objective: str,
    seed: int,
) -> None:
    stages, chunks, placement = shape
    count = stages * chunks
    given_: dict[str, object] = {"merge_saving": work[2] / 4} if more == "saving" else {}
    given_ |= {"split_overhead": min(work[1:]) / 2} if more == "overhead" else {}
    given_ |= {"static": [0.7 * (chunk % 3) for chunk in range(count)]} if more == "static" else {}
    given_ |= {"message": [0.1 + 0.2 * (edge % 2) for edge in range(count - 1)]} if more == "messages" else {}
    activation = [1.0 + 0.3 * (chunk % 2) for chunk in range(count)] if more == "uneven" else 1.0
    costs = Costs(*work, latency, activation, held, **given_)
    find = partial(plan, costs, stages, microbatches, chunks, placement, chunks * (limit * 1.3 + 2.1))
    best, steady = (PlanOptions(objective, seed=seed, steady=each) for each in (False, True))
    efforts = [getattr(find(effort=effort, options=best).timeline, objective) for effort in (0, 1, 2)]
    assert all(later <= earlier * SAME for earlier, later in pairwise(efforts))
    assert getattr(find(effort=2, options=steady).timeline, objective) <= efforts[-1] * 1.003 * SAME


def model(blocks: int, head: float, held: float) -> ModelCosts:
    block = [LayerCosts(f"{index}", 1.0, 1.1, 0.9, 1.0, held, output=0.1, static=0.3) for index in range(blocks)]
    return ModelCosts(
        (*block, LayerCosts("head", head, head, head, 0.4, 0.5, static=0.6)), latency=0.02, bandwidth=20.0
    )


MODELS = [(15, 2.0, 1.13, 4, 8), (31, 3.0, 0.8, 8, 16)]


@pytest.mark.parametrize(
    ("blocks", "head", "held", "stages", "microbatches", "limits"),
    [(*each, (0.6, 0.85, 1.2, None)) for each in MODELS],
)
@pytest.mark.slow
def test_more_memory_is_worse_by_less_than_three_per_mille(
    blocks: int, head: float, held: float, stages: int, microbatches: int, limits: tuple[float | None, ...]
) -> None:
    """Times what 1F1B holds. Each limit is searched by itself: what is found for less memory is not known there."""
    layers = model(blocks, head, held)
    even = layers.chunk_costs(tuple(range(0, blocks + 1, (blocks + 1) // stages))[:stages])
    unit = max(simulate(schedules.one_f_one_b(stages, microbatches), even).peak_memory)
    reached = [
        plan(layers, stages, microbatches, memory_limit=None if limit is None else limit * unit).timeline.cost
        for limit in limits
    ]
    for index, cost in enumerate(reached):
        assert cost <= min(reached[: index + 1]) * 1.003, reached


@pytest.mark.parametrize(
    ("costs", "microbatches", "chunks", "placement"),
    [
        (Costs(18.5, 18.1, 9.3, 4 * 0.6, 1.0, 1.15), 24, 4, "zigzag"),
        (Costs(1.0, 1.2, 0.9, 4 * 0.05, 1.0, 1.3), 24, 4, "zigzag"),
        (Costs(1.0, 1.2, 0.9, 2 * 0.05, 1.0, 1.3), 32, 2, "v"),
        (Costs(1.0, 1.2, 0.9, 2 * 0.05, 1.0, 1.3), 32, 2, "loop"),
    ],
)
def test_what_is_constructed_in_1f1bs_memory_is_a_candidate_in_more(
    costs: Costs, microbatches: int, chunks: int, placement: str
) -> None:
    """And what is in 1.5 times that; at effort 0, where rules alone decide, and they are as many in every limit."""
    names = ("forward", "backward", "weight", "communication", "activation", "held")
    costs = Costs(*(getattr(costs, name) / chunks for name in names))
    options = PlanOptions(steady=False)
    reached = [
        plan(costs, 8, microbatches, chunks, placement, share and 8 * share, effort=0, options=options).timeline.cost
        for share in (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 3.0, None)
    ]
    assert max(reached) <= reached[0] * SAME, reached
    assert max(reached[3:]) <= reached[3] * SAME, reached


def test_cuts_for_1f1bs_memory_are_candidates_in_more() -> None:
    """Llama 3 8B with as many microbatches as stages: light first chunks, as little memory asks for, are better."""
    model = load_architecture(CONFIGURATIONS / "llama-3-8b.json")
    layers = Setting(model, load_hardware("h100"), Job(8192)).costs
    unlimited = {each.schedule.name: each for each in published_timelines(layers, 8, 8, None)}
    unit = max(unlimited["one_f_one_b"].peak_memory)
    options = PlanOptions(steady=False)
    reached = [
        plan(layers, 8, 8, memory_limit=share and share * unit, effort=0, options=options).timeline.cost
        for share in (1.0, 1.1, 1.5, None)
    ]
    assert max(reached) <= reached[0] * SAME, reached


def test_in_a_line_there_is_one_chunk_per_rank_unless_more_are_asked_for() -> None:
    layers = tuple(LayerCosts(f"{index}", 1.0, 1.1, 0.9, 1.0, 1.2) for index in range(8))
    found = plan(ModelCosts(layers, latency=0.02), 2, 6, placement="linear", memory_limit=8.0, effort=0)
    assert found.schedule.placement == (0, 1)
    assert plan(ModelCosts(layers), 2, 6, 2, "linear", effort=0).schedule.placement == (0, 0, 1, 1)
