"""Checkpoints of tensor-parallel stages load at another tensor-parallel size and another number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tensor_parallel import OneProcess, Stages, apart, values
from zbkern.pipeline import checkpoint

pytestmark = pytest.mark.dist

# stages, tensor-parallel size, schedule: of one run after the other, each of two steps; the fourth step is clipped
RUNS = [(2, 2, "zb_h1"), (4, 1, "zb_h1"), (1, 4, "one_f_one_b"), (2, 2, "zb_v")]


def trained(folder: Path, layout: tuple[int, int, str], tied: bool, sequence: bool, start: int) -> dict[str, Any]:
    """Two steps from the checkpoint of step `start`, where that is not 0, and another one; the weights then."""
    ours = Stages(*layout, tied, sequence, "planned")
    with ours.pipe:
        if start:
            assert checkpoint.load(folder, ours.pipe, ours.optimizer, timeout=60) == (start, {"at": start})
        ours.train(range(start, start + 2))
        checkpoint.save(folder, start + 2, ours.pipe, ours.optimizer, {"at": start + 2}, timeout=60)
        return values(ours.named())


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "sequence"), [(True, False), (False, True)])
def test_sizes_change_from_one_run_to_the_next(four_ranks: Any, tmp_path: Path, tied: bool, sequence: bool) -> None:
    plain = OneProcess(tied)
    for number, layout in enumerate(RUNS):
        plain.train(range(2 * number, 2 * number + 2))
        found: dict[str, Any] = {}
        for named in four_ranks.run(trained, tmp_path, layout, tied, sequence, 2 * number):
            found |= named
        far = apart(found, plain.named())
        assert far.keys() == plain.named().keys()
        assert max(far.values()) < 1e-10, (layout, far)


def test_one_process_and_tensor_parallel_stages_read_each_others(four_ranks: Any, tmp_path: Path) -> None:
    four_ranks.run(trained, tmp_path, RUNS[-1], False, True, 0)
    ours, plain = OneProcess(tied=False), OneProcess(tied=False)
    assert checkpoint.load(tmp_path, ours.model, ours.optimizer) == (2, {"at": 2})
    ours.train(range(2, 4))
    checkpoint.save(tmp_path, 4, ours.model, ours.optimizer, {"at": 4})
    four_ranks.run(trained, tmp_path, RUNS[0], False, False, 4)
    plain.train(range(6))
    ours = OneProcess(tied=False)
    assert checkpoint.load(tmp_path, ours.model, ours.optimizer) == (6, {"at": 6})
    far = apart(values(ours.named()), plain.named())
    assert max(far.values()) < 1e-10, far
