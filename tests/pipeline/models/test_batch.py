"""A batch by names, as collators make it: what ranks must have alike. What a step makes of it: models_differential."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.chunks import one_rank, run_pipelines
from tests.support.small_models import batch, make
from zbkern.pipeline import PipelineError, cut, profile, schedules, token_loss, token_targets

TOKENS, MASK, LABELS = batch()
NAMED = {"input_ids": TOKENS, "attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0)}
TARGETS = token_targets(LABELS, 4)


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in NAMED.items() if key != name}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"step with side attention_mask \(4 rows\), position_ids \(4 rows\) on rank 0 and step on"),
        (TOKENS, "ranks make different calls"),
        (without("attention_mask"), r"step with side position_ids \(4 rows\) on rank 1"),
    ],
)
def test_a_rank_without_what_every_chunk_needs_is_told(given: Any, message: str) -> None:
    schedule = schedules.zb_h1(2, 4)
    chunks = [cut(make("llama"), schedule, rank=rank)[0] for rank in range(2)]
    with pytest.raises(PipelineError, match=message):
        run_pipelines(schedule, chunks, lambda pipe: pipe.step(given if pipe.rank else NAMED, TARGETS), token_loss)


def test_a_name_given_twice_is_told() -> None:
    schedule = schedules.zb_h1(1, 4)
    with one_rank(cut(make("llama"), schedule, rank=0), schedule, token_loss) as pipe:
        message = r"Pipeline.step: \['attention_mask'\] must be in inputs or in side; got both"
        with pytest.raises(TypeError, match=message):
            pipe.step(NAMED, TARGETS, {"attention_mask": MASK})


def test_a_batch_by_names_is_measured() -> None:
    costs = profile(cut(make("llama"), schedules.one_f_one_b(1, 4)), [0], token_loss, NAMED, TARGETS)
    assert costs.per_chunk(1).forward[0] > 0


def test_a_rank_may_leave_out_what_only_others_need() -> None:
    schedule = schedules.zb_h1(2, 4)
    chunks = [cut(make("llama"), schedule, rank=rank)[0] for rank in range(2)]

    def step(pipe: Any) -> Any:
        return pipe.step(without("input_ids") if pipe.rank else NAMED, TARGETS)

    assert isinstance(run_pipelines(schedule, chunks, step, token_loss)[1], torch.Tensor)
