"""Checkpoints of tensor- and expert-parallel stages load at another size, and another number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.expert_parallel import one_process_of, stages_of
from tests.support.tensor_parallel import apart, values
from zbkern.pipeline import checkpoint

pytestmark = pytest.mark.dist

# stages, tensor- or expert-parallel size, schedule: of one run after the other, each of two steps; some are clipped
RUNS = [(2, 2, "zb_h1"), (4, 1, "zb_h1"), (1, 4, "one_f_one_b"), (2, 2, "zb_v")]


def trained(folder: Path, layout: tuple[int, int, str], kind: str, start: int) -> dict[str, Any]:
    """Two steps from the checkpoint of step `start`, where that is not 0, and another one; the weights then."""
    ours = stages_of(kind, layout)
    with ours.pipe:
        if start:
            assert checkpoint.load(folder, ours.pipe, ours.optimizer, timeout=60) == (start, {"at": start})
        ours.train(range(start, start + 2))
        checkpoint.save(folder, start + 2, ours.pipe, ours.optimizer, {"at": start + 2}, timeout=60)
        return values(ours.named())


def check(found: dict[str, Any], plain: Any) -> None:
    assert found.keys() == plain.named().keys()
    assert max(apart(found, plain.named()).values()) < 1e-10, apart(found, plain.named())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "sequence", "experts"])
def test_sizes_change_from_one_run_to_the_next(four_ranks: Any, tmp_path: Path, kind: str) -> None:
    plain = one_process_of(kind)
    for number, layout in enumerate(RUNS):
        plain.train(range(2 * number, 2 * number + 2))
        found: dict[str, Any] = {}
        for named in four_ranks.run(trained, tmp_path, layout, kind, 2 * number):
            found |= named
        check(found, plain)


@pytest.mark.parametrize("kind", ["sequence", pytest.param("experts", marks=pytest.mark.slow)])
def test_one_process_and_sharded_stages_read_each_others(four_ranks: Any, tmp_path: Path, kind: str) -> None:
    four_ranks.run(trained, tmp_path, RUNS[-1], kind, 0)
    ours, plain = one_process_of(kind), one_process_of(kind)
    assert checkpoint.load(tmp_path, ours.model, ours.optimizer) == (2, {"at": 2})
    ours.train(range(2, 4))
    checkpoint.save(tmp_path, 4, ours.model, ours.optimizer, {"at": 4})
    four_ranks.run(trained, tmp_path, RUNS[0], kind, 4)
    plain.train(range(6))
    ours = one_process_of(kind)
    assert checkpoint.load(tmp_path, ours.model, ours.optimizer) == (6, {"at": 6})
    check(values(ours.named()), plain)
