"""Plans of sequences in slices: no worse than whole sequences, within the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbkern.pipeline import (
    Costs,
    LayerCosts,
    ModelCosts,
    PlanOptions,
    ScheduleError,
    plan,
    schedules,
    simulate,
)
from zbkern.planning.command.published import published_timelines
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.planner import native

CONFIGURATIONS = Path(__file__).parents[3] / "bench" / "configurations"
compiled = pytest.mark.skipif(native.core is None, reason="the compiled search core is not built")


LONG = Costs(
    *(4.0, 6.0, 2.0, 0.1, 1.0, 0.6), attention_forward=2.5, attention_backward=4.5, overhead=0.02, carried=0.05
)


@pytest.mark.parametrize(
    ("memory", "chunks"),
    [
        *((None, 1), (1.2, 1), (2.0, 2)),
        *(pytest.param(m, c, marks=pytest.mark.slow) for m, c in ((4.0, 1), (2.0, 1), (None, 2), (4.0, 2), (1.2, 2))),
    ],
)
def test_slices_are_never_worse_than_whole_sequences(memory: float | None, chunks: int) -> None:
    limit = None if memory is None else memory * chunks
    whole = plan(LONG, 4, 4, chunks, memory_limit=limit, effort=1)
    found = plan(LONG, 4, 4, chunks, memory_limit=limit, effort=1, slices="auto")
    assert found.timeline.cost <= whole.timeline.cost
    assert limit is None or max(found.timeline.peak_memory) <= limit * (1 + 1e-9)
    if memory != 1.2:
        assert found.timeline.cost < 0.85 * whole.timeline.cost
        assert len(found.schedule.slices) > 1
    assert found.lower_bound <= found.bubble_rate + 1e-9


def test_slices_that_cost_more_than_they_give_are_not_taken() -> None:
    costs = Costs(1.0, 1.0, 1.0, overhead=0.9)
    assert plan(costs, 2, 8, effort=1, slices="auto").schedule.slices == (1,)


def test_slices_as_they_are_said() -> None:
    assert plan(LONG, 2, 2, effort=0, slices=3).schedule.slices in {(1, 1, 1), (491, 298, 235)}
    assert plan(LONG, 2, 2, effort=0, slices=[3, 2]).schedule.slices == (3, 2)
    tokens = Costs(4.0, 6.0, 2.0, attention_forward=3.0, attention_backward=5.0, tokens=4096)
    assert all(each % 128 == 0 for each in plan(tokens, 2, 2, effort=0, slices=4).schedule.slices)
    options = PlanOptions(slice_tokens=512)
    assert all(each % 512 == 0 for each in plan(tokens, 2, 2, effort=0, slices=4, options=options).schedule.slices)
    with pytest.raises(ValueError, match='slices must be "auto"'):
        plan(LONG, 2, 2, slices="some")
    with pytest.raises(TypeError, match="slices must be a number"):
        plan(LONG, 2, 2, slices=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slice_tokens must be at least 1"):
        PlanOptions(slice_tokens=0)


def test_no_published_schedule_in_these_slices_is_better() -> None:
    found = plan(LONG, 4, 4, memory_limit=3.0, effort=0, slices=[4, 3, 2, 1])
    for make in (schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1, schedules.zb_h2):
        timeline = simulate(make(4, 4, slices=[4, 3, 2, 1]), LONG)
        assert max(timeline.peak_memory) > 3.0 or found.timeline.cost <= timeline.cost * (1 + 1e-9)


def test_a_sequence_whose_keys_and_values_do_not_fit_in_slices() -> None:
    costs = Costs(carried=0.9, held=0.1)
    assert plan(costs, 2, 2, memory_limit=1.0, effort=0, slices="auto").schedule.slices == (1,)
    with pytest.raises(ScheduleError, match=r"the smallest limit that any schedule fits is 1\.85"):
        plan(costs, 2, 2, memory_limit=1.0, effort=0, slices=2)
    tight = plan(costs, 2, 2, memory_limit=1.85, effort=1, slices=2)
    assert max(tight.timeline.peak_memory) <= 1.85 * (1 + 1e-9)


def test_layers_are_cut_for_slices() -> None:
    blocks = [
        LayerCosts(f"block {i}", 4.0, 6.0, 2.0, 1.0, attention_forward=2.5, attention_backward=4.5) for i in range(8)
    ]
    model = ModelCosts(tuple(blocks), tokens=8192)
    whole = plan(model, 4, 4, memory_limit=6.0, effort=1)
    found = plan(model, 4, 4, memory_limit=6.0, effort=1, slices="auto")
    assert found.timeline.cost < 0.9 * whole.timeline.cost
    assert max(found.timeline.peak_memory) <= 6.0 * (1 + 1e-9)
    assert sum(found.schedule.slices) == 8192


def test_what_does_not_fit_in_slices_is_recomputed_or_offloaded() -> None:
    costs = Costs(
        *(4.0, 6.0, 2.0, 0.0, 1.0, 0.6),
        attention_forward=2.5,
        checkpoint=0.1,
        offload_bandwidth=4.0,
        reload_bandwidth=4.0,
    )
    for saving in ({"offload": True}, {"recompute": True}):
        found = plan(costs, 4, 4, memory_limit=0.8, effort=1, slices=4, **saving)
        assert max(found.timeline.peak_memory) <= 0.8 * (1 + 1e-9)
        assert len(found.schedule.slices) == 4


@compiled
@pytest.mark.parametrize(("memory", "idle"), [(1.0, 0.05), (0.25, 0.12)])
@pytest.mark.slow
def test_a_long_context_on_nine_stages(memory: float, idle: float) -> None:
    """70B, as many sequences of 131,072 tokens as stages: nearly no idle time, also in a quarter of 1F1B's memory."""
    job = Job(131072, tensor_parallel=8)
    costs = Setting(load_architecture(CONFIGURATIONS / "llama-3-70b.json"), load_hardware("h100"), job).costs
    unlimited = {each.schedule.name: each for each in published_timelines(costs, 9, 9, None)}
    limit = memory * max(unlimited["one_f_one_b"].peak_memory)
    found = plan(costs, 9, 9, memory_limit=limit, effort=0, slices="auto")
    assert unlimited["one_f_one_b"].bubble_rate > 0.4
    assert found.bubble_rate <= idle
    assert max(found.timeline.peak_memory) <= limit * (1 + 1e-9)
