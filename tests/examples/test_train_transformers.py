"""examples/train_transformers.py on two ranks: what it exports gives the loss that its pipeline has evaluated."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.programs import example

transformers = pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")


def train(model: str, schedule: str, slices: int | str, out: Path) -> float | None:
    sizes = {"slices": slices, "steps": 3, "microbatches": 2, "rows": 2, "length": 12, "lr": 3e-3}
    arguments = argparse.Namespace(model=model, config=None, schedule=schedule, memory=1e9, out=out, **sizes)
    return example("train_transformers").train(arguments)


@pytest.mark.dist
@pytest.mark.parametrize(("model", "schedule", "slices"), [("llama", "plan", "auto"), ("qwen3_moe", "zb_v", 3)])
def test_it_trains_evaluates_and_exports(
    two_ranks: Any, model: str, schedule: str, slices: int | str, tmp_path: Path
) -> None:
    (loss,) = [loss for loss in two_ranks.run(train, model, schedule, slices, tmp_path) if loss is not None]
    module = example("train_transformers")
    tokens, mask, labels = module.batch(module.EVALUATION, 4, 12, 64)
    assert len(set(mask.view(2, -1).sum(1).tolist())) == 2, "microbatches must have different numbers of tokens"
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = exported(tokens, attention_mask=mask).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert loss < 4.16  # of 64 tokens at random, and three steps have been made
