"""examples/grpo.py: one pipeline of two stages and two such replicas train the same policy, and ratios begin at 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import example, save_model

pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def train(folder: str, replicas: int) -> Any:
    return example("grpo").main(folder, replicas, 2)


def test_two_replicas_train_what_one_pipeline_does(two_ranks: Any, four_ranks: Any, tmp_path: Path) -> None:
    save_model(tmp_path, tied=False)
    one, two = two_ranks.run(train, str(tmp_path), 1), four_ranks.run(train, str(tmp_path), 2)
    by_replica = [log for log, _ in two if log]
    assert len(by_replica) == 2
    (log,) = [log for log, _ in one if log]
    mean = [sum(losses) / 2 for losses in zip(*([loss for loss, _ in each] for each in by_replica), strict=True)]
    assert mean == pytest.approx([loss for loss, _ in log], rel=1e-4, abs=1e-5)
    for each in (log, *by_replica):
        assert [ratio for _, ratio in each][::2] == [0, 0]  # exactly 1 in the first inner step of each
        assert min(ratio for _, ratio in each[1::2]) > 0
    torch.testing.assert_close(two[0][1], one[0][1], rtol=1e-3, atol=1e-4)
