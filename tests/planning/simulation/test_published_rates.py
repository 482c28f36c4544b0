"""simulate: the figures of arXiv 2401.10241 and arXiv 2405.15362, to the four digits in which they are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zbkern.pipeline import Costs, schedules, simulate

PUBLISHED = json.loads((Path(__file__).parent.parent.parent / "data" / "zb_profiles.json").read_text())
TO_FOUR_DIGITS = 0.00005 + 1e-9
NAMES = {"1F1B": "one_f_one_b", "ZB-H1": "zb_h1", "ZB-H2": "zb_h2", "V-Half": "v_half", "V-Min": "v_min"}


def label(cell: dict) -> str:
    return f"{cell.get('model', 'unit')}-p{cell['stages']}-m{cell['microbatches']}"


def profile(cell: dict, chunks: int) -> Costs:
    """The costs of one of `chunks` chunks per rank; a cell gives those of one chunk, or of one of two."""
    given_chunks = 1 if "forward" in cell else 2
    prefix = "" if given_chunks == 1 else "chunk_"
    share = given_chunks / chunks
    times = [cell[prefix + name] * share for name in ("forward", "backward", "weight")]
    memory = {name: cell[prefix + name] * share for name in ("activation", "held")}
    return Costs(*times, cell["communication"], **memory)


PROFILES = [*PUBLISHED["one_chunk"], *PUBLISHED["two_chunks"]]


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZB-H2"])
@pytest.mark.parametrize("cell", PROFILES, ids=label)
def test_published_rates_of_one_chunk_schedules(cell: dict, name: str) -> None:
    schedule = getattr(schedules, NAMES[name])(cell["stages"], cell["microbatches"])
    rate = simulate(schedule, profile(cell, chunks=1)).bubble_rate
    assert rate == pytest.approx(cell["bubble_rate"][name], abs=TO_FOUR_DIGITS)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("cell", PUBLISHED["unit_cost"], ids=label)
def test_published_rates_at_unit_costs(cell: dict, name: str) -> None:
    rate = simulate(getattr(schedules, NAMES[name])(cell["stages"], cell["microbatches"])).bubble_rate
    assert rate == pytest.approx(cell[name], abs=TO_FOUR_DIGITS)


@pytest.mark.parametrize("name", ["V-Half", "V-Min"])
@pytest.mark.parametrize("cell", [cell for cell in PUBLISHED["two_chunks"] if "low_memory" in cell], ids=label)
def test_published_rates_and_memory_of_low_memory_schedules(cell: dict, name: str) -> None:
    schedule = getattr(schedules, NAMES[name])(cell["stages"], cell["microbatches"])
    published = cell["low_memory"][name]
    assert simulate(schedule, profile(cell, chunks=2)).bubble_rate == pytest.approx(
        published["bubble_rate"], abs=TO_FOUR_DIGITS
    )
    # they count a chunk as held until its W, whole
    in_chunks = simulate(schedule, Costs(activation=1, held=1))
    assert max(in_chunks.peak_memory) == published["peak_chunks"]


@pytest.mark.parametrize("cell", PROFILES, ids=label)
def test_published_rates_of_interleaved_leave_out_a_dependency(cell: dict) -> None:
    """The published calculation lets the gradient of a chunk's first rank wait for the next chunk only for the first
    microbatch of each group of p, so that the last wait of a step is not seen. With every dependency in place the cost
    is higher by exactly p communications.
    """
    chunks, costs = 3 if "forward" in cell else 2, profile(cell, 3 if "forward" in cell else 2)
    flat = costs.per_chunk(1)
    timeline = simulate(schedules.interleaved(cell["stages"], cell["microbatches"], chunks=chunks), costs)
    work = chunks * cell["microbatches"] * (flat.forward[0] + flat.fused[0])
    as_published = timeline.cost - cell["stages"] * cell["communication"]
    assert 1 - work / as_published == pytest.approx(cell["bubble_rate"]["interleaved-1F1B"], abs=TO_FOUR_DIGITS)
