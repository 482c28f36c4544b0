"""Generators: valid for any size, and equal to torch's own tables.

Their closed forms and memory are those of docs/schedules.md: tests/docs/test_simulated_pages.py, tests/planning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zbkern.pipeline import Action, Costs, Schedule, schedules, simulate

GENERATORS: dict[str, Callable[..., Schedule]] = {name: getattr(schedules, name) for name in schedules.NAMES}


@pytest.mark.parametrize("name", GENERATORS)
def test_valid_for_any_size(name: str) -> None:
    """For all small sizes, more microbatches than stages and fewer."""
    for stages in range(1, 8):
        for microbatches in (*range(1, 10), 13, 16, 17):
            schedule = GENERATORS[name](stages, microbatches)
            schedule.validate()
            assert (schedule.ranks, schedule.microbatches, schedule.name) == (stages, microbatches, name)
            passes_per_chunk = 3 * microbatches - sum(
                action.kind == "BW" and action.chunk == 0 for row in schedule.actions for action in row
            )
            assert sum(action.chunk == 0 for row in schedule.actions for action in row) == passes_per_chunk


@pytest.mark.parametrize("name", ["interleaved", "interleaved_zero_bubble"])
def test_interleaved_is_valid_for_any_number_of_chunks_and_microbatches(name: str) -> None:
    for stages in range(1, 7):
        for chunks in range(1, 5):
            for microbatches in range(1, 4 * stages):
                schedule = GENERATORS[name](stages, microbatches, chunks=chunks)
                schedule.validate()
                assert schedule.chunks == chunks
                assert schedule.placement == tuple(chunk % stages for chunk in range(stages * chunks))


@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min", "one_f_one_b_v", "dualpipe_v"])
def test_v_placement(name: str) -> None:
    schedule = GENERATORS[name](3, 4)
    assert schedule.placement == (0, 1, 2, 2, 1, 0)
    assert schedule.chunks_of(1) == [1, 4]


@pytest.mark.parametrize("stages", [4, 5, 6, 7, 9])
def test_bubble_and_memory_of_the_vs_that_no_page_shows(stages: int) -> None:
    """At equal times; docs/schedules.md has those of the others."""
    p = stages
    forms = {
        "v_min": ((4 * p - (5 if p % 3 else 7)) / 2, (4 * p - (5 if p % 3 else 7)) / 2, (p + 1) // 3 + 1),
        "one_f_one_b_v": ((5 * p - 9) / 2, (5 * p - 5) / 2, 2 * p // 3 + 1),
    }
    for name, (least, most, memory) in forms.items():
        timeline = simulate(GENERATORS[name](p, 2 * p), Costs(0.5, 0.5, 0.5, activation=0.5, held=0.5))
        assert least <= timeline.cost - 2 * p * 3 <= most
        assert max(timeline.peak_memory) == memory


@pytest.mark.parametrize("microbatches", [1, 5, 30])
@pytest.mark.parametrize("stages", range(1, 10))
@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_building_blocks_stay_within_their_lifespans(name: str, stages: int, microbatches: int) -> None:
    """Peak <= sum over the rank's chunks of ceil(lifespan / 6) chunk activations: F to W of the block (2405.15362)."""
    p = stages
    if name == "v_min":
        g = 2 if p % 3 == 0 else 0
        block = [(i, 2 * p - i - 1, 2 * p + g + i, 4 * p + g - i - 1) for i in range(p)]
    else:
        g = 3 if p % 2 == 0 else 0
        block = [(2 * i, 3 * p - i - 2, 3 * p + g + 2 * i - 1, 6 * p + g - i - 2) for i in range(p)]
    bound = 0
    for row in block:
        taken = {slot % 6 for slot in row}
        weights = []
        for start in (row[2], row[3]):  # the next free slot of the repeated block, each of the two once
            weights.append(next(s for s in range(start + 1, start + 13) if s % 6 not in taken))
            taken.add(weights[-1] % 6)
        lives = [weights[0] + 1 - row[1], weights[1] + 1 - row[0]]
        bound = max(bound, sum(-(-life // 6) for life in lives))
    timeline = simulate(GENERATORS[name](stages, microbatches), Costs(activation=1, held=1))
    assert max(timeline.peak_memory) <= bound


def test_gaps_of_a_building_block_run_the_weights_of_the_late_chunk_first() -> None:
    """The end of the order that the paper's public scheduler gives."""
    cells = [str(action) for action in schedules.v_half(2, 12).actions[1]]
    assert " ".join(cells[-16:]) == "1F10 2F10 2B9 1B9 2W9 1F11 1W9 2F11 2B10 1B10 2B11 1B11 2W10 2W11 1W10 1W11"


# ---- against the tables of torch.distributed.pipelining


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def stages_for_torch(stages: int, chunks: int) -> list[SimpleNamespace]:
    """What torch's schedules ask of a stage before they run."""
    torch = pytest.importorskip("torch")
    return [
        SimpleNamespace(
            group_size=stages,
            group_rank=0,
            num_stages=stages * chunks,
            stage_index=index,
            is_last=False,
            submod=torch.nn.Identity(),
            has_backward=True,
        )
        for index in range(chunks)
    ]


def table(torch_schedule: Any) -> list[list[Action]]:
    """Its compute actions in our letters."""
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    rows = []
    for rank in sorted(torch_schedule.pipeline_order):
        cells = [cell for cell in torch_schedule.pipeline_order[rank] if cell is not None]
        flat = [part for cell in cells for part in (getattr(cell, "sub_actions", None) or (cell,))]
        rows.append([Action(kinds[c.computation_type.name], c.stage_index, c.microbatch_index) for c in flat])
    return rows


def pairs(torch_schedule: Any) -> list[tuple[tuple[int, int], ...]]:
    """Where in those rows torch overlaps two."""
    found = []
    for rank in sorted(torch_schedule.pipeline_order):
        ranges, at = [], 0
        for cell in filter(None, torch_schedule.pipeline_order[rank]):
            count = len(getattr(cell, "sub_actions", None) or (cell,))
            ranges += [(at, at + count)] if count > 1 else []
            at += count
        found.append(tuple(ranges))
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("name", "torch_name", "chunks"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", 1),
        ("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", 2),
        ("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", 3),
        ("zb_v", "ScheduleZBVZeroBubble", 2),
        ("dualpipe_v", "ScheduleDualPipeV", 2),
    ],
)
def test_same_actions_as_torch(torch_schedules: Any, name: str, torch_name: str, chunks: int, stages: int) -> None:
    if not hasattr(torch_schedules, torch_name):
        pytest.skip(f"this torch has no {torch_name}")
    compared = 0
    for microbatches in range(1, 4 * stages + 1):
        try:
            theirs = getattr(torch_schedules, torch_name)(stages_for_torch(stages, chunks), microbatches)
        except ValueError:  # torch refuses some sizes that we build
            continue
        keywords = {"chunks": chunks} if name.startswith("interleaved") else {}
        ours = GENERATORS[name](stages, microbatches, **keywords)
        assert [list(row) for row in ours.actions] == table(theirs), f"m={microbatches}"
        assert [*map(ours.beside_of, range(stages))] == pairs(theirs), f"m={microbatches}"
        compared += 1
    assert compared >= stages + 1


@pytest.mark.parametrize("name", GENERATORS)
def test_torch_loads_our_csv_and_gives_it_back(torch_schedules: Any, name: str, tmp_path: Path) -> None:
    """Through torch's loader, its checks, its insertion of communication and its writer."""
    ours = GENERATORS[name](3, 6)
    path = tmp_path / "ours.csv"
    path.write_text(ours.to_csv(header=False))
    theirs = torch_schedules._PipelineScheduleRuntime(stages_for_torch(3, ours.chunks), 6)
    theirs._load_csv(str(path))
    assert theirs.stage_index_to_group_rank == dict(enumerate(ours.placement))
    formats = [{"format": "compute_only"}, {"format": "compute_comms"}]
    if "format" not in inspect.signature(theirs._dump_csv).parameters:
        formats = [{}]  # with communication
    for keywords in formats:
        theirs._dump_csv(str(path), **keywords)
        assert Schedule.from_csv(path.read_text(), name) == ours
