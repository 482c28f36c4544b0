from __future__ import annotations

import re
from dataclasses import replace

import pytest

from zbkern.pipeline import Costs, LayerCosts, ModelCosts, PlanOptions, draw, plan, schedules, simulate
from zbkern.planning.command import report, tables
from zbkern.planning.command.answer import Answer, answer
from zbkern.planning.command.question import Measured, Question
from zbkern.planning.draw.svg import note
from zbkern.planning.planner import Plan


def told(costs: Costs, stages: int, microbatches: int, limit: float | None = None, effort: int = 0) -> tuple[Plan, str]:
    """The plan, and what is said of it."""
    memory = None if limit is None else (limit, False)
    found = answer(Question(stages, microbatches, Measured(costs), memory=memory, effort=effort))
    return found.plan, report.describe(found, 120)


@pytest.mark.parametrize("width", [30, 31, 40, 60, 79])
@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe_v"])
def test_a_grid_is_cut_to_the_width_in_its_middle(name: str, width: int) -> None:
    schedule = getattr(schedules, name)(3, 12)
    *lines, note = tables.grid(schedule, width).split("\n")
    whole = [line.split()[2:] for line in schedule.to_text().split("\n")]
    assert max(map(len, lines)) <= width
    first, last, total = (int(word) for word in note.replace("(", " ").split() if word.isdigit())
    assert total == len(whole[0])
    for line, row in zip(lines, whole, strict=True):
        assert line.split()[2:] == [*row[:first], "..", *row[last + 1 :]]
    assert abs(first - (total - 1 - last)) <= 1


def test_it_says_how_many_backwards_are_one_pass() -> None:
    costs = Costs(1, 1.1, 0.8, activation=1, held=1.15)
    tight, text = told(costs, 4, 8, 2.0)
    kinds = [action.kind for row in tight.schedule.actions for action in row]
    assert 0 < kinds.count("BW") < 32
    assert f"\nbackward  {kinds.count('BW')} of 32 in one pass, BW, the others as B and W\n" in text
    assert "backward  " not in told(costs, 4, 8)[1]


def test_it_says_what_an_error_of_each_cost_changes() -> None:
    plan, text = told(Costs(4, 5, 3, communication=0), 2, 6)
    more = simulate(plan.schedule, Costs(4, 5.5, 3, communication=0))
    changed = f"B {more.cost / plan.timeline.cost - 1:+.1%} ({100 * (more.bubble_rate - plan.bubble_rate):+.1f})"
    assert "errors    of 10% in one cost change the cost (points of bubble): F +" in text
    assert changed in text
    assert "messages +0.0% (+0.0)" in text


def test_a_bound_of_zero_is_not_printed_as_one() -> None:
    found = answer(Question(4, 8, Measured(Costs(communication=0.1)), memory=(4, False), effort=0))
    text = report.describe(replace(found, plan=replace(found.plan, bound=0.0)), 120)
    assert "0.00%" not in text
    assert "how much less any order of these chunks in this memory could have is not known" in text


def test_a_plan_that_offloads_is_not_told_to_offload() -> None:
    costs = Costs(1, 1, 1, checkpoint=0.1, offload_bandwidth=0.5, reload_bandwidth=0.5)
    short = Question(4, 12, Measured(costs), memory=(2.0, False), effort=0)
    plain, saving = answer(short), answer(replace(short, offload=0.0, recompute=True))
    assert any(action.kind in "OR" for row in saving.plan.schedule.actions for action in row)
    assert min(plain.plan.idle.memory, saving.plan.idle.memory) > 0.001
    advice = "forwards wait for memory: a higher limit"
    assert f"{advice}, offloading or recomputation" in report.describe(plain, 120)
    assert f"{advice}\n" in report.describe(saving, 120) + "\n"


def test_what_does_not_fit_on_any_cut_has_no_time() -> None:
    """Its cut is the one that holds least, which says nothing about how fast it is on those of the others."""
    costs = Costs(activation=2.5e9, memory_unit="bytes", time_unit="ms")
    timelines = [simulate(schedules.gpipe(2, 8), costs), simulate(schedules.one_f_one_b(2, 8), costs)]
    for tokens in (0, 1000):
        _, fits, not_fitting = tables.table(timelines, 6e9, tokens=tokens, cuts=True).split("\n")
        assert fits.startswith("one_f_one_b")
        assert "%" in fits
        assert re.fullmatch(r"gpipe +1 +20 GB +at least: does not fit", not_fitting)
    assert re.search(r"gpipe .*%.* over the limit", tables.table(timelines, 6e9))


def test_memory_in_bytes_is_printed_for_people() -> None:
    costs = Costs(activation=2.5e9, memory_unit="bytes")
    timeline = simulate(schedules.one_f_one_b(2, 4), costs)
    text = told(costs, 2, 4, 5e9)[1]
    assert re.search(r"^memory +5(\.\d+)? \d+(\.\d+)? GB by rank \(limit 5 GB, 1x\)$", text, re.MULTILINE), text
    assert " 5 GB  1.00x" in tables.table([timeline], None, 5e9)
    with pytest.raises(ValueError, match=r"memory_limit=1 GB .* any schedule fits is 2\.5 GB"):
        plan(costs, 2, 4, memory_limit=1e9)


def test_times_have_their_unit_where_it_is_known() -> None:
    timeline = simulate(schedules.one_f_one_b(2, 4), Costs(time_unit="ms"))
    assert "15 ms" in tables.table([timeline], None, 1)
    nothing = simulate(schedules.one_f_one_b(2, 4), Costs(0, 0, 0, time_unit="ms"))
    assert re.search(r"0\.00% +0 ms", tables.table([nothing], None, 1))
    assert "makespan 15 ms" in note(timeline)
    assert "cost 15 ms" in repr(timeline)


@pytest.mark.parametrize("size", [1.0, 2.5e9])
def test_without_units_there_are_plain_numbers_however_large(size: float) -> None:
    costs = Costs(size, size, size, activation=size)
    found, text = told(costs, 2, 4, 2 * size)
    texts = [text, tables.table([found.timeline], None, 1)]
    for text in (*texts, note(found.timeline), repr(found.timeline), draw.svg([found.timeline], costs=[costs])):
        assert not re.search(r"\d ([kMGT]?B|bytes|m?s)\b", text), text


def test_a_plan_says_when_the_model_is_cut_badly() -> None:
    """The idle time that comes of one rank's load is in any order."""
    costs = Costs(forward=[1, 1, 1, 2], backward=[1, 1, 1, 2], weight=[1, 1, 1, 2])
    found, text = told(costs, 4, 16, effort=1)
    assert found.idle.busiest == 3
    assert found.idle.load == pytest.approx(9 / 24 * 96 / found.timeline.cost)
    assert found.idle.total == pytest.approx(found.bubble_rate)
    assert f"\nidle      {found.idle.load:.2%} rank 3 has the most work: divide the model more evenly" in text
    assert "has the most work" not in told(Costs(), 4, 16, effort=1)[1]


def test_a_rank_that_recomputes_needs_memory_and_no_other_cut() -> None:
    costs = Costs(1, 1, 1, activation=1, recompute=1, checkpoint=0.1)
    found = answer(Question(4, 16, Measured(costs), memory=(2.5, False), recompute=True, effort=1))
    busiest = found.plan.idle.busiest
    assert any(action.kind == "R" for action in found.plan.schedule.actions[busiest])
    text = report.describe(found, 120)
    assert f"rank {busiest} has the most work, R included: a higher limit" in text


def layers(blocks: int, head: float) -> ModelCosts:
    each = [LayerCosts(f"block {number}", 1, 1, 1, 1) for number in range(blocks)]
    return ModelCosts((*each, LayerCosts("head", head, head, head, 1)))


def advice(found: Plan, costs: ModelCosts, limit: float | None = None, chunks: int | None = None) -> str:
    """chunks: as they were given; None where they were searched for."""
    memory = None if limit is None else (limit, False)
    sizes = found.schedule.ranks, found.schedule.microbatches
    question = Question(*sizes, Measured(costs), memory=memory, chunks=chunks)
    return "\n".join(report.idle_causes(Answer(question, found)))


@pytest.mark.parametrize("overhead", [0.0, 0.05])
def test_the_most_even_cut_is_told_and_a_number_of_stages_that_suits_the_layers(overhead: float) -> None:
    costs = replace(layers(14, 1), pass_overhead=overhead)
    found = plan(costs, 4, 16, effort=0)
    assert found.idle.load == pytest.approx(1 - 15 / 16, abs=0.01 if overhead else 0.005)
    told = "has the most work; the most even cut into 4 has about 6%, into 3 0%"
    assert told in advice(found, costs)
    assert told in advice(plan(costs, 4, 16, 1, effort=0, options=PlanOptions(partition=[0, 4, 8, 9])), costs)
    followed = plan(costs, 3, 16, effort=0)
    assert followed.idle.load < 0.01
    assert "has the most work" not in advice(followed, costs)


def test_a_layer_that_takes_too_long_for_any_number_of_stages() -> None:
    costs = layers(2, 8)
    (line,) = [each for each in advice(plan(costs, 3, 16, effort=0), costs).split("\n") if "most work" in each]
    assert line.endswith("rank 2 has the most work; the most even cut into 3 has about 58%")
    nearly = layers(280, 1)  # 281 are 0.7 % less uneven on 3 ranks
    (line,) = advice(plan(nearly, 4, 64, effort=0), nearly).split("\n")[:1]
    assert line.endswith("the most even cut into 4 has about 1%")


def test_nothing_is_advised_that_was_searched_or_is_not_there() -> None:
    costs = layers(7, 1)
    found = plan(costs, 4, 4, effort=0)
    assert "up: more microbatches\n" in advice(found, costs) + "\n"
    assert "up: more microbatches, or more chunks per rank" in advice(found, costs, chunks=2)
    slow = ModelCosts(costs.layers, latency=2.0)
    assert "messages are on their way: faster links\n" in advice(plan(slow, 4, 4, 1, effort=0), slow, chunks=1) + "\n"
    waits = "passes wait for other ranks in between"
    tight = plan(costs, 4, 16, memory_limit=3, effort=0)
    assert f"{waits}: more memory" in advice(tight, costs, 3)
    assert "more memory" not in advice(tight, costs)


def test_the_last_line_says_whether_it_is_worth_it() -> None:
    found, text = told(Costs(communication=0), 4, 8)
    usual, more = (simulate(schedules.one_f_one_b(4, m), Costs(communication=0)) for m in (8, 32))
    last = text.split("\n")[-1]
    assert last.startswith(f"worth     1F1B idles {usual.bubble_rate:.0%}, this plan {found.bubble_rate:.0%}: ")
    assert f"{usual.cost / found.timeline.cost:.3g} times as fast; with 32 microbatches 1F1B would idle " in last
    assert last.endswith(f"{more.bubble_rate:.0%}")
    _, text = told(Costs(1, 1, 0, communication=0), 2, 64)
    assert text.split("\n")[-1].startswith("worth     nothing: 1F1B idles 2% and this plan ")
    assert "worth" not in told(Costs(), 1, 4)[1]
    layers = ModelCosts([LayerCosts(f"{n}", 1, 1, 1, 1) for n in range(8)])
    tight = report.describe(answer(Question(4, 8, Measured(layers), memory=(5.0, False), effort=0)), 200)
    assert "where 1F1B needs 8 and does not fit; with 32 microbatches" in tight.split("\n")[-1]
