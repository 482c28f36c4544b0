"""Stages of several ranks each, replicas, sharded, tensor- and expert-parallel ones, against one process.

What `test_differential.py` does on threads, over gloo. The slow run has another seed than the quick ones: see
`tests/support/seeds.py`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import expert_parallel
from tests.support.parallel_stages import (
    BLOCKS,
    EMBEDDING,
    HEAD,
    KINDS,
    MICROBATCHES,
    REPLICAS,
    Forced,
    Layout,
    OneProcess,
    Stages,
    apart,
    loss_fn,
    values,
)
from tests.support.schedules import saved_in_turn, with_actions
from tests.support.seeds import seed
from zbkern.pipeline import ProfileOptions, Schedule, StepOptions, checkpoint, profile, simulate

pytestmark = pytest.mark.dist

QUICK = ("tensor", "ddp", "fsdp", "experts")  # the others differ from one of these by an option
FIRST, LAST = tuple(f"{index}." for index in range(2)), tuple(f"{index}." for index in range(2, BLOCKS + 2))
FROZEN = [(), (), (), (*FIRST, HEAD), (*LAST, EMBEDDING), (EMBEDDING, HEAD)]
SAVED = [(), (), ("recomputed", "copied", None), ("copied",), ("recomputed", "copied")]
LAYOUTS: list[Layout] = [(2, 2, "zb_h1"), (2, 2, "zb_v"), (2, 2, "zb_h2"), (2, 2, "one_f_one_b")]
OTHER_LAYOUTS: list[Layout] = [(4, 1, "zb_h1"), (1, 4, "one_f_one_b"), (1, 4, "zb_v")]


@dataclass(frozen=True)
class Part:
    """Some steps by some ranks, as `Stages` says; saved: as `saved_in_turn` takes it."""

    kind: str
    layout: Layout
    steps: range
    saved: tuple[str | None, ...]
    slices: Any
    fill: str
    options: StepOptions
    undo: str | None
    adaptive: bool
    late: bool
    disagrees: str  # which W the second replica runs in its waits: the newest by "order", none by "time"
    offloads: bool  # states between steps


@dataclass(frozen=True)
class Case:
    """What the parts have in common: each goes on from the checkpoint of the one before it."""

    parts: tuple[Part, ...]
    tied: bool
    forced: Forced
    frozen: tuple[str, ...]
    pairs: bool
    penalised: bool = False
    dtype: torch.dtype = torch.float64


def random_case(rng: random.Random, kind: str) -> Case:
    frozen, experts = rng.choice(FROZEN), kind == "experts"
    names = [kind] if experts or rng.random() < 0.6 else [kind, rng.choice(KINDS)]
    parts = tuple(random_part(rng, each, number) for number, each in enumerate(names * (2 if experts else 1)))
    count = parts[-1].steps.stop
    forced = [(step, rng.choice([100.0, 100.0, math.nan, math.inf])) for step in range(count) if rng.random() < 0.5]
    if experts:
        return Case(parts, False, (), (), False)
    tied, penalised = bool(frozen) or rng.random() < 0.5, "sequence" not in names and rng.random() < 0.3
    return Case(parts, tied, tuple(forced), frozen, rng.random() < 0.3, penalised)


def random_part(rng: random.Random, kind: str, number: int) -> Part:
    saved, slices = rng.choice(SAVED), rng.choice([1, 1, 2, (1, 3)])
    if kind in ("sequence", "experts"):
        slices = 1
    saved = () if kind == "experts" else saved
    fill = "planned" if saved else rng.choice(["planned", "eager"])
    layout = rng.choice(LAYOUTS if number == 0 else LAYOUTS + OTHER_LAYOUTS)
    parts = [(), ("[0-9]",), *([("*norm",)] if layout[0] == 2 and layout[2] != "zb_v" else [])]  # of every chunk
    return Part(
        kind,
        layout,
        range(3 * number, 3 * number + 3),
        saved,
        slices,
        fill,
        StepOptions(
            copy_size=rng.choice([500, 2**26]),
            recompute=rng.choice(parts) if saved else (),
            max_wgrad_bytes=None if saved or kind == "sequence" else rng.choice([None, 2000]),
        ),
        rng.choice(["snapshot", "snapshot", None]),
        rng.random() < 0.5,
        rng.random() < 0.3,
        rng.choice(["", "order", "time"]) if fill == "eager" and kind in REPLICAS else "",
        rng.random() < 0.3,
    )


# ---- on the ranks


def stages_of(case: Case, part: Part) -> Any:
    how = {"undo": part.undo, "adaptive": part.adaptive}
    if part.kind == "experts":
        return expert_parallel.Stages(*part.layout, part.fill, **how)

    def saving(schedule: Schedule) -> Schedule:
        return with_actions(schedule, saved_in_turn(*part.saved)) if part.saved else schedule

    common = {"frozen": case.frozen, "pairs": case.pairs, "dtype": case.dtype, "penalised": case.penalised}
    own = {"slices": part.slices, "late": part.late, "fill": part.fill, "options": part.options}
    return Stages(part.kind, part.layout, case.tied, case.forced, saving=saving, how=how, **common, **own)


def trained(case: Case, number: int, folder: Path) -> tuple[Any, ...]:
    """Losses, norms and weights of a part, what was planned and held at the peak, and the optimizer's counts."""
    part = case.parts[number]
    ours, planned = stages_of(case, part), None
    if part.saved and part.slices == 1:
        planned = planned_peaks(ours, part)
    with ours.pipe:
        if number:
            loaded = checkpoint.load(folder, ours.pipe, ours.optimizer, timeout=60)
            assert loaded == (part.steps.start, {"at": part.steps.start})
        disagree(ours, part)
        losses, norms = ours.train(part.steps)
        peaks = planned and (planned, ours.pipe.last.gather_timeline().peak_memory)
        if number + 1 < len(case.parts):
            checkpoint.save(folder, part.steps.stop, ours.pipe, ours.optimizer, {"at": part.steps.stop}, timeout=60)
        counts = ours.optimizer.clipped, ours.optimizer.skipped, ours.optimizer.undone
        return losses, norms, values(ours.named()), peaks, counts


def disagree(ours: Any, part: Part) -> None:
    """Replicas run W in another order, or in other waits."""
    pipe, second = ours.pipe, part.disagrees and ours.data[0] == 1
    if part.disagrees == "order" and second:
        run = pipe._calls.loop._run_oldest
        pipe._calls.loop._run_oldest = lambda key=None: run(key or pipe.queue.keys()[-1])
    if part.disagrees == "time":
        pipe._calls.loop._ready = lambda tag: second
    if part.offloads:
        step = ours.optimizer.step
        ours.optimizer.step = lambda: (step(), ours.optimizer.validate(), ours.optimizer.offload_states())


def planned_peaks(ours: Stages, part: Part) -> tuple[float, ...]:
    """Bytes of every rank, with costs that were measured."""
    options = ProfileOptions(1, 0, copy_size=part.options.copy_size, recompute=part.options.recompute)
    given = loss_fn, *ours.batch(0), MICROBATCHES, ours.group
    costs = profile(ours.modules, ours.schedule.placement, *given, options=options)
    return simulate(
        ours.schedule, replace(costs, static=0, message=0, offload_bandwidth=1e9, reload_bandwidth=1e9)
    ).peak_memory


# ---- against one process


def one_process(case: Case) -> OneProcess:
    return OneProcess(case.tied, case.forced, case.frozen, case.pairs, case.penalised)


def check(ranks: Any, case: Case, folder: Path) -> None:
    experts = case.parts[0].kind == "experts"
    plain: Any = expert_parallel.OneProcess() if experts else one_process(case)
    for number, part in enumerate(case.parts):
        losses, norms = plain.train(part.steps)
        results = ranks.run(trained, case, number, folder, timeout=120)
        replicas = part.layout[1] if part.kind not in ("tensor", "sequence") else 1
        found = [of_rank for of_rank, *_ in results if of_rank[0] is not None]
        for step_losses, loss in zip(zip(*found, strict=True), losses, strict=True):
            total = sum(step_losses) / len(step_losses) * (replicas if experts else 1)
            assert total == pytest.approx(loss, rel=1e-6)  # the clipping coefficient is float32
        for _, found_norms, weights, peaks, _ in results:
            assert found_norms == pytest.approx(norms, rel=1e-6, nan_ok=True)
            far = apart(weights, plain.named())
            assert max(far.values()) < 1e-6, far
            assert peaks is None or peaks[1] == pytest.approx(peaks[0], rel=0.1)
        skipped = sum(not math.isfinite(norm) for norm in norms)
        assert {counts[1] for *_, counts in results} == {skipped}
        if not case.pairs:
            clipped = sum(norm > plain.max_norm for norm in norms if math.isfinite(norm))
            assert {counts[0] for *_, counts in results} == {clipped}


def check_all(ranks: Any, chosen: int, kinds: list[str], folder: Path) -> None:
    for number, kind in enumerate(kinds):
        case = random_case(random.Random(f"{chosen} {number} {kind}"), kind)
        (folder / str(number)).mkdir()
        try:
            check(ranks, case, folder / str(number))
        except BaseException as error:
            raise AssertionError(f"ZBKERN_SEED={chosen}, {kind}, number {number}:\n{case}") from error


@pytest.mark.parametrize("kind", QUICK)
def test_random_stages_train_as_one_process(four_ranks: Any, tmp_path: Path, kind: str) -> None:
    check_all(four_ranks, seed(0), [kind], tmp_path)


@pytest.mark.slow
def test_more_random_stages(four_ranks: Any, tmp_path: Path) -> None:
    check_all(four_ranks, seed(1), [kind for kind in KINDS if kind not in QUICK], tmp_path)


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_weights_below_float32_and_their_masters(four_ranks: Any, tmp_path: Path, kind: str) -> None:
    """A step that does not wait is one that waits, bit for bit, through clipped and skipped ones."""
    forced = ((1, 100.0), (2, math.nan))
    part = Part(kind, LAYOUTS[2], range(5), (), 1, "planned", StepOptions(), "snapshot", False, False, "", False)
    case = Case((part,), True, forced, (), False, dtype=torch.bfloat16)
    at_once = four_ranks.run(trained, case, 0, tmp_path)
    waited = four_ranks.run(trained, replace(case, parts=(replace(part, undo=None),)), 0, tmp_path)
    assert at_once[0][4][:2] == waited[0][4][:2]
    assert at_once[0][4][2] > waited[0][4][2] == 0
    for ours, theirs in zip(at_once, waited, strict=True):
        torch.testing.assert_close(ours[:2], theirs[:2], rtol=0, atol=0, equal_nan=True)
        for name, value in ours[2].items():
            assert (value == theirs[2][name]).all(), name
