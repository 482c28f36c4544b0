"""A batch by names, as collators make it, is what `step` takes: each chunk gets what its forward needs."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.small_models import make
from zbkern.pipeline import Pipeline, PipelineError, cut, profile, schedules, token_loss, token_targets

MICROBATCHES = 4


def padded_batch() -> dict[str, Tensor]:
    """Left-padded, as tokenizers of decoders pad, with positions that begin behind the padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 60, (8, 10), generator=generator)
    mask = torch.arange(10) >= torch.randint(0, 6, (8, 1), generator=generator)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    tokens = tokens.masked_fill(~mask, 0)
    labels = tokens.masked_fill(~mask, -100)
    return {"input_ids": tokens, "attention_mask": mask.long(), "position_ids": positions, "labels": labels}


def packed_batch() -> dict[str, Tensor]:
    """Rows of two sequences, told by their positions alone."""
    tokens = torch.randint(3, 60, (8, 10), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(4), torch.arange(6)]).expand(8, 10).contiguous()
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.clone()}


def in_microbatches(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: value[2 * i : 2 * i + 2] for name, value in batch.items()} for i in range(MICROBATCHES)]


def without(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != name}


def step(name: str, batch: dict[str, Tensor], given: Any, family: str = "llama") -> tuple[list[Any], list[Any]]:
    """The loss of a step, and of an evaluation, and its gradients; given: `inputs` and `side` by rank."""
    schedule = getattr(schedules, name)(2, MICROBATCHES)
    targets = token_targets(batch["labels"], MICROBATCHES)
    model = make(family)

    def run(transport: Any) -> Any:
        chunks = [zbkern.convert(chunk) for chunk in cut(copy.deepcopy(model), schedule, rank=transport.rank)]
        with Pipeline(chunks, schedule, token_loss, transport, timeout=20) as pipe:
            inputs, side = given(transport.rank)
            losses = [pipe.step(inputs, targets, side), pipe.evaluate(inputs, targets, side)]
        return losses, {key: p.grad for chunk in chunks for key, p in chunk.named_parameters()}

    results = results_on_threads(2, run)
    losses = [loss for found, _ in results for loss in found if loss is not None]
    return losses, [gradients for _, gradients in results]


@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3", "gpt_oss"))])
@pytest.mark.parametrize("batch", [padded_batch(), packed_batch()], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("zb_h1", lambda rank, batch: (batch, None)),
        ("zb_v", lambda rank, batch: (UserDict(batch), None)),  # as BatchEncoding is
        ("zb_h1", lambda rank, batch: (in_microbatches(batch), None)),
        ("zb_h1", lambda rank, batch: (without("position_ids", batch), {"position_ids": batch["position_ids"]})),
        ("zb_h1", lambda rank, batch: (without("input_ids", batch) if rank else batch, None)),
    ],
)
def test_a_batch_by_names_is_all_that_a_step_needs(
    name: str, given: Any, batch: dict[str, Tensor], family: str
) -> None:
    model = make(family)
    # gpt-oss by itself would let packed sequences see each other
    parts = [slice(None)] if "attention_mask" in batch else [slice(0, 4), slice(4, 10)]
    given_parts = [{key: value[:, part] for key, value in without("labels", batch).items()} for part in parts]
    logits = torch.cat([model(**part, use_cache=False).logits for part in given_parts], 1)
    expected = token_loss(logits, token_targets(batch["labels"], 1)[0])
    expected.backward()
    losses, gradients = step(name, batch, lambda rank: given(rank, batch), family)
    assert len(losses) == 2
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach())
    for found in gradients:
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, model.get_parameter(key).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda batch: None,
            r"step with side attention_mask \(8 rows\), position_ids \(8 rows\) on rank 0 and step on",
        ),
        (lambda batch: batch["input_ids"], "ranks make different calls"),
        (lambda batch: without("attention_mask", batch), r"step with side position_ids \(8 rows\) on rank 1"),
    ],
)
def test_a_rank_without_what_every_chunk_needs_is_told(given: Any, message: str) -> None:
    batch = padded_batch()
    with pytest.raises(PipelineError, match=message):
        step("zb_h1", batch, lambda rank: (given(batch) if rank else batch, None))


def test_a_name_given_twice_is_told() -> None:
    batch = padded_batch()
    with pytest.raises(TypeError, match=r"Pipeline.step: \['attention_mask'\] must be in inputs or in side; got both"):
        step("zb_h1", batch, lambda rank: (batch, {"attention_mask": batch["attention_mask"]}))


def test_a_batch_by_names_is_measured() -> None:
    batch = padded_batch()
    (chunk,) = cut(make("llama"), schedules.one_f_one_b(1, 4))
    costs = profile(zbkern.convert(chunk), [0], token_loss, batch, token_targets(batch["labels"], 4))
    assert costs.per_chunk(1).forward[0] > 0
