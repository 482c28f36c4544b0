"""Offload, load and recompute in the simulator: when copies run, what waits for them, what is held meanwhile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from zbkern.pipeline import Action, Costs, Event, Schedule, Timeline, schedules, simulate
from zbkern.planning.draw import svg, trace
from zbkern.planning.simulation import drift, step_costs


def build(*rows: str, microbatches: int = 1) -> Schedule:
    actions = [[Action.parse(text) for text in row.split()] for row in rows]
    return Schedule.build(actions, range(len(rows)), microbatches)


def passes(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return _times(timeline.events)


def copies(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return _times(timeline.copies)


def _times(rows: tuple[tuple[Event, ...], ...]) -> dict[str, tuple[float, float]]:
    return {str(event.action): (round(event.start, 9), round(event.end, 9)) for row in rows for event in row}


OFFLOAD = "0F0 0F1 0F2 0O0 0F3 0L0 0BW3 0BW2 0BW1 0BW0"


def test_a_copy_out_begins_after_its_forward_and_is_waited_for_where_it_stands() -> None:
    schedule = build(OFFLOAD, microbatches=4)
    quick = simulate(schedule, Costs(offload_bandwidth=1, reload_bandwidth=1))
    assert copies(quick) == {"0O0": (1, 2), "0L0": (4, 5)}
    assert quick.cost == simulate(build("0F0 0F1 0F2 0F3 0BW3 0BW2 0BW1 0BW0", microbatches=4)).cost
    slow = simulate(schedule, Costs(offload_bandwidth=0.25, reload_bandwidth=1))
    assert copies(slow) == {"0O0": (1, 5), "0L0": (6, 7)}
    assert passes(slow)["0F3"] == (5, 6)
    assert passes(slow)["0F2"] == (2, 3)
    assert quick.peak_memory == slow.peak_memory == (4,)  # the load before the first backward


def test_a_pass_waits_for_its_load_and_no_other_does() -> None:
    late = "0F0 0F1 0O0 0BW1 0L0 0BW0"
    timeline = simulate(build(late, microbatches=2), Costs(offload_bandwidth=1, reload_bandwidth=0.2))
    assert copies(timeline)["0L0"] == (4, 9)
    assert passes(timeline)["0BW0"] == (9, 11)
    early = "0F0 0F1 0O0 0L0 0BW1 0BW0"
    timeline = simulate(build(early, microbatches=2), Costs(offload_bandwidth=1, reload_bandwidth=0.2))
    assert passes(timeline)["0BW1"] == (2, 4)
    assert passes(timeline)["0BW0"] == (7, 9)


def test_one_direction_copies_one_thing_after_the_other_and_both_run_beside_each_other() -> None:
    row = "0F0 0F1 0F2 0F3 0O0 0O1 0L0 0O2 0BW0 0L1 0BW1 0L2 0BW2 0BW3"
    timeline = simulate(build(row, microbatches=4), Costs(offload_bandwidth=1 / 3, reload_bandwidth=1 / 3))
    found = {"0O0": (1, 4), "0O1": (4, 7), "0O2": (7, 10), "0L0": (7, 10), "0L1": (12, 15), "0L2": (17, 20)}
    assert copies(timeline) == found


IN_TRANSFERS = {"forward": 4, "backward": 2, "weight": 2, "activation": 4, "copy_size": 1}


def test_activations_leave_in_transfers_while_their_forward_runs() -> None:
    row = build("0F0 0F1 0O0 0F2 0L0 0BW1 0BW0 0BW2", microbatches=3)
    even = simulate(row, Costs(offload_bandwidth=1, reload_bandwidth=1, **IN_TRANSFERS))
    assert copies(even)["0O0"] == (1, 5)
    quick = simulate(row, Costs(offload_bandwidth=4, reload_bandwidth=1, **IN_TRANSFERS))
    assert copies(quick)["0O0"] == (3.25, 4.25)  # as long as it copies, up to the end of the last transfer
    slow = simulate(row, Costs(offload_bandwidth=0.5, reload_bandwidth=1, **IN_TRANSFERS))
    assert copies(slow)["0O0"] == (1, 9)
    assert passes(slow)["0F1"] == (4, 8)
    assert passes(slow)["0F2"] == (9, 13)
    assert even.peak_memory == quick.peak_memory == slow.peak_memory == (12,)  # with the load
    beside = simulate(row, Costs(offload_bandwidth=1, reload_bandwidth=1, copy_slowdown=0.5, **IN_TRANSFERS))
    assert passes(beside)["0F0"] == (0, 5)  # two thirds of its speed for three transfers


def test_a_forward_whose_offload_follows_holds_two_transfers_and_waits_for_the_others() -> None:
    row = build("0F0 0O0 0F1 0O1 0L1 0BW1 0L0 0BW0", microbatches=2)
    quick = simulate(row, Costs(offload_bandwidth=1, reload_bandwidth=1, **IN_TRANSFERS))
    assert passes(quick)["0F0"] == (0, 4)
    assert passes(quick)["0F1"] == (5, 9)
    slow = simulate(row, Costs(offload_bandwidth=0.5, reload_bandwidth=1, **IN_TRANSFERS))
    assert passes(slow)["0F0"] == (0, 6)  # its last transfer is filled once the second has been copied
    assert copies(slow)["0O0"] == (1, 9)
    assert passes(slow)["0F1"] == (9, 15)
    assert quick.peak_memory == slow.peak_memory == (4,)  # of the load
    held = [level for _, level in slow.memory_held(Costs(**IN_TRANSFERS))[0]]
    assert held[:4] == [2, 0, 2, 0]


@pytest.mark.parametrize(("copy_size", "begun"), [(None, 4), (4, 4), (2, 2)])
def test_a_forward_of_one_or_two_transfers_waits_for_none(copy_size: float | None, begun: float) -> None:
    row = build("0F0 0O0 0F1 0O1 0L0 0BW0 0L1 0BW1", microbatches=2)
    costs = Costs(offload_bandwidth=1, reload_bandwidth=1, **{**IN_TRANSFERS, "copy_size": copy_size})
    begun = {None: 4, 4: 4, 2: 2}[copy_size]
    timeline = simulate(row, costs)
    assert passes(timeline)["0F0"] == (0, 4)
    assert copies(timeline)["0O0"] == (begun, begun + 4)
    assert passes(timeline)["0F1"] == (begun + 4, begun + 8)


def test_a_backward_waits_for_the_transfers_as_it_needs_them() -> None:
    row = build("0F0 0F1 0O0 0BW1 0L0 0BW0", microbatches=2)
    even = simulate(row, Costs(offload_bandwidth=1, reload_bandwidth=1, **IN_TRANSFERS))
    assert copies(even)["0L0"] == (12, 16)
    assert passes(even)["0BW0"] == (13, 17)
    slow = simulate(row, Costs(offload_bandwidth=1, reload_bandwidth=0.5, **IN_TRANSFERS))
    assert copies(slow)["0L0"] == (12, 20)
    assert passes(slow)["0BW0"] == (14, 21)


def test_what_w_needs_is_offloaded_after_its_backward() -> None:
    costs = Costs(activation=2, held=1, offload_bandwidth=0.5, reload_bandwidth=1)
    timeline = simulate(build("0F0 0B0 0O0 0F1 0B1 0W1 0L0 0W0", microbatches=2), costs)
    assert copies(timeline) == {"0O0": (2, 4), "0L0": (7, 8)}
    assert passes(timeline)["0F1"] == (4, 5)
    assert passes(timeline)["0W0"] == (8, 9)
    assert timeline.peak_memory == (2,)


def test_a_weight_gradient_waits_for_the_transfers_as_it_needs_them() -> None:
    costs = Costs(weight=4, activation=2, held=4, offload_bandwidth=1, copy_size=1)
    row = "0F0 0B0 0O0 0F1 0B1 0W1 0L0 0W0"
    fast = simulate(build(row, microbatches=2), replace(costs, reload_bandwidth=2))
    assert copies(fast)["0L0"] == (12, 14)
    assert passes(fast)["0W0"] == (12.5, 16.5)
    slow = simulate(build(row, microbatches=2), replace(costs, reload_bandwidth=0.5))
    assert copies(slow)["0L0"] == (12, 20)
    assert passes(slow)["0W0"] == (14, 21)  # the last quarter after the last transfer


def test_passes_beside_copies_take_longer() -> None:
    row = "0F0 0F1 0F2 0O0 0L0 0BW0 0BW1 0BW2"
    costs = Costs(offload_bandwidth=2, reload_bandwidth=1, copy_slowdown=0.5)
    timeline = simulate(build(row, microbatches=3), costs)
    found = passes(timeline)
    assert copies(timeline)["0O0"] == (1, 1.5)
    assert found["0F1"] == pytest.approx((1, 2 + 1 / 6))  # half a unit at two thirds of the speed
    assert found["0F2"] == pytest.approx((2 + 1 / 6, 3 + 1 / 6))
    both = "0F0 0F1 0F2 0O0 0L0 0BW1 0BW2 0BW0"  # the load beside the first backward, from its start
    found = passes(simulate(build(both, microbatches=3), costs))
    start = found["0BW1"][0]
    assert found["0BW1"][1] - start == pytest.approx(2 + 1 / 3)


def test_recomputed_activations_are_held_from_the_recomputation_on() -> None:
    costs = Costs(activation=4, held=1, checkpoint=0.5)
    timeline = simulate(build("0F0 0F1 0R0 0B0 0W0 0BW1", microbatches=2), costs)
    assert timeline.peak_memory == (8,)
    both = build("0F0 0F1 0R0 0B0 0W0 0R1 0BW1", microbatches=2)
    assert simulate(both, costs).peak_memory == (4.5,)
    assert passes(simulate(both, costs))["0R0"] == (2, 3)
    assert passes(simulate(both, Costs(recompute=0.25, checkpoint=0)))["0R1"] == (4.25, 4.5)


def test_costs_of_copies_and_recomputations_are_carried_by_json() -> None:
    given = Costs(checkpoint=[0, 1], offload_bandwidth=2, reload_bandwidth=3, copy_slowdown=0.1, recompute=2)
    assert Costs.from_json(given.to_json()) == given


def test_jitter_of_the_other_passes_does_not_depend_on_recomputations() -> None:
    costs = Costs(checkpoint=0)
    plain = passes(simulate(build("0F0 0B0 0W0"), costs, jitter=0.1, seed=3))
    recomputing = passes(simulate(build("0F0 0R0 0B0 0W0"), costs, jitter=0.1, seed=3))
    lengths = [{name: end - start for name, (start, end) in found.items()} for found in (plain, recomputing)]
    assert {name: lengths[1][name] for name in plain} == pytest.approx(lengths[0])
    assert lengths[1]["0R0"] != pytest.approx(1.0)


def test_between_copies_no_weights_are_merged() -> None:
    costs = Costs(merge_saving=0.5, offload_bandwidth=9, reload_bandwidth=9)
    row = "0F0 0F1 0F2 0B0 0B1 0B2 0O2 0W0 0W1 0L2 0W2"
    found = passes(simulate(build(row, microbatches=3), costs))
    assert found["0W1"][1] - found["0W1"][0] == pytest.approx(0.5)
    assert found["0W2"][1] - found["0W2"][0] == pytest.approx(1.0)


def test_pictures_show_copies_in_lanes_of_their_own() -> None:
    costs = Costs(offload_bandwidth=1, reload_bandwidth=1)
    timeline = simulate(build(OFFLOAD, microbatches=4), costs)
    plain = simulate(schedules.gpipe(1, 4), costs)
    assert ">out<" not in svg([plain])
    picture = svg([timeline], costs=[costs])
    assert ">out<" in picture
    assert "0O0 on rank 0: 1 to 2" in picture
    assert "0L0 on rank 0: 4 to 5" in picture
    assert "O offload" in picture
    assert ">out</text>" in picture
    assert ">out</text>" not in svg([plain])
    events = trace.events([timeline])
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M" and "tid" in event}
    assert threads == {0: "rank 0", 1: "rank 0: copies out", 2: "rank 0: copies back"}
    shown = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert (shown["0O0"], shown["0L0"], shown["0F0"]) == (1, 2, 0)
    held = timeline.memory_held(costs)[0]
    assert max(level for _, level in held) == timeline.peak_memory[0]
    assert all(a[0] <= b[0] for a, b in pairwise(held))


def test_measured_copies_and_recomputations_give_costs_that_simulate_alike() -> None:
    given = Costs(held=0.5, offload_bandwidth=0.5, reload_bandwidth=2, recompute=0.75, checkpoint=0.25)
    schedule = build("0F0 0F1 0F2 0O0 0R1 0BW1 0L0 0BW0 0B2 0O2 0L2 0W2", microbatches=3)
    timeline = simulate(schedule, given)
    found = step_costs.costs([timeline], given)
    assert simulate(schedule, found).events == timeline.events
    assert simulate(schedule, step_costs.costs([timeline], Costs(held=0.5))).cost == pytest.approx(timeline.cost)
    assert "planned" in str(drift.compare(timeline))
    seconds = drift.in_seconds(Costs(offload_bandwidth=3, recompute=[2, 4], latency=5, time_unit="ms"))
    assert (seconds.offload_bandwidth, seconds.reload_bandwidth, seconds.recompute) == (3000, None, (0.002, 0.004))
    assert seconds.latency == 0.005
