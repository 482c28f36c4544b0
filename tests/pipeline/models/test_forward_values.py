"""What `Pipeline.forward` gives to an algorithm: of each token or sequence, in the bits that the step has, in order."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import zbkern
from tests.support.chunks import one_rank, results_on_threads
from tests.support.small_models import make
from zbkern.pipeline import (
    Costs,
    DeferredLogits,
    Pipeline,
    PlannedBatches,
    cut,
    per_sequence,
    plan_batch,
    schedules,
    sequence_targets,
    token_log_probs,
)
from zbkern.pipeline.transport.local import LocalTransport
from zbkern.planning.planner import native

pytestmark = pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")

LENGTHS = (90, 3, 5, 4, 40, 8, 2, 6)
QUICK = {(torch.float32, "log_probs", False), (torch.float32, "token_log_probs", True)}
COSTS = Costs(3.0, 5.0, 1.0, attention_forward=1.0, attention_backward=2.5, overhead=0.9, tokens=40)


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 60, (length,), generator=generator) for length in LENGTHS]


def following(tokens: Tensor) -> Tensor:
    return pad(tokens[1:], (0, 1), value=-100)[None]


class Policy:
    """Log-probabilities where there are no old ones, else the loss of their ratios, which it keeps."""

    def __init__(self, deferred: bool, how: str) -> None:
        self.takes_deferred_logits, self.how = deferred, how
        self.ratios: list[Tensor] = []
        self.kinds: set[type] = set()

    def __call__(self, logits: Any, given: tuple[Tensor, Any]) -> Tensor:
        tokens, old = given
        self.kinds.add(type(logits))
        if self.how == "log_probs" and isinstance(logits, DeferredLogits):
            found = logits.log_probs(tokens)
        else:
            found, _ = token_log_probs(logits, tokens)
        if old is None:
            return found
        self.ratios.append((found.detach() - old).exp())
        return -(found - old).exp().sum()


def planned() -> Any:
    [batch] = PlannedBatches([row.tolist() for row in rows()], COSTS, 2, sequences=len(LENGTHS), multiple=8)
    assert max(map(len, batch.plan.rows)) > 1
    assert max(map(len, batch.plan.schedule.own_slices)) > 1
    return batch


@pytest.mark.parametrize(
    ("dtype", "how", "of_sequences"),
    [
        pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.slow])
        for each in product((torch.float32, torch.bfloat16), ("log_probs", "token_log_probs", "logits"), (False, True))
    ],
)
def test_the_ratio_of_a_first_step_is_one(dtype: torch.dtype, how: str, of_sequences: bool) -> None:
    batch, schedule, policy = planned(), schedules.zb_v(2, 2), Policy(how != "logits", how)
    copies = [copy.deepcopy(make("llama")).to(dtype) for _ in range(2)]
    if of_sequences:
        loss_fn: Any = per_sequence(policy)
    else:
        loss_fn, policy.reduction = policy, "sum"  # type: ignore[attr-defined]
    tokens = (
        [following(rows()[number]) for number in batch.sequences] if of_sequences else [t.labels for t in batch.targets]
    )

    def targets(old: Any) -> Any:
        pairs = [*zip(tokens, old, strict=True)]
        return sequence_targets(pairs, batch.plan) if of_sequences else pairs

    def run(transport: LocalTransport) -> None:
        modules = [*map(zbkern.convert, cut(copies[transport.rank], schedule, rank=transport.rank))]
        how = {"schedule": batch.plan.schedule}
        with Pipeline(modules, schedule, loss_fn, transport, timeout=60) as pipe:
            old = pipe.forward(batch.inputs, targets([None] * len(tokens)), batch.side, **how)
            pipe.step(
                batch.inputs, targets([None if old is None else each for each in old or tokens]), batch.side, **how
            )

    results_on_threads(2, run)
    assert policy.kinds == {Tensor if how == "logits" else DeferredLogits}
    assert sum(ratio.numel() for ratio in policy.ratios) == sum(LENGTHS)
    assert all((ratio == 1).all() for ratio in policy.ratios)


@pytest.mark.parametrize("deferred", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_values_of_sequences_come_in_their_order(deferred: bool) -> None:
    batch, schedule, model = planned(), schedules.zb_v(2, 2), make("llama")
    policy = per_sequence(Policy(deferred, "token_log_probs"))
    copies = [copy.deepcopy(model) for _ in range(2)]
    mine = [rows()[number] for number in batch.sequences]
    targets = sequence_targets([(following(row), None) for row in mine], batch.plan)

    def run(transport: LocalTransport) -> Any:
        modules = [*map(zbkern.convert, cut(copies[transport.rank], schedule, rank=transport.rank))]
        with Pipeline(modules, schedule, policy, transport, timeout=60) as pipe:
            return pipe.forward(batch.inputs, targets, batch.side, schedule=batch.plan.schedule)

    found = next(each for each in results_on_threads(2, run) if each is not None)
    for values, row in zip(found, mine, strict=True):
        expected, _ = token_log_probs(model(row[None], use_cache=False).logits, following(row))
        torch.testing.assert_close(values, expected.detach(), rtol=1e-5, atol=1e-6)


# ---- rows that are padded behind their sequences


def mean_of(output: Any, target: Tensor) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return (output - target[: output.shape[-1]]).square().mean()


@pytest.mark.parametrize("padding", [0, 1, 9])
@pytest.mark.parametrize("lengths", [[4, 3], [4]])
def test_padding_behind_a_pack_belongs_to_no_sequence(padding: int, lengths: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    plain, sequences = copy.deepcopy(model), [torch.randn(1, length, 5).double() for length in lengths]
    values = [torch.randn(3).double() for _ in lengths]
    expected = torch.stack([mean_of(plain(x), y) for x, y in zip(sequences, values, strict=True)]).mean()
    expected.backward()
    plan = plan_batch(lengths, Costs(2.0, 3.0, 1.0, overhead=5.0, tokens=8), stages=1, chunks=1)
    row = torch.cat([*(sequences[number] for number in plan.rows[0]), torch.ones(1, padding, 5).double()], 1)
    targets = sequence_targets(values, plan)
    with one_rank([model], schedules.gpipe(1, 1), per_sequence(mean_of)) as pipe:
        loss = pipe.step([row], targets, schedule=plan.schedule)
        each = pipe.forward([row], targets, schedule=plan.schedule)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.stack(each).mean(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "output", [torch.ones(1, 9), torch.ones(1, 5, 3), (torch.ones(1, 9, 2), torch.ones(1, 8, 2)), {}]
)
def test_a_pack_without_its_tokens_is_refused(output: Any) -> None:
    targets = sequence_targets(
        [0, 1], plan_batch([4, 3], Costs(2.0, 3.0, 1.0, overhead=5.0, tokens=8), stages=1, chunks=1)
    )
    with pytest.raises(
        ValueError, match="must give the 7 tokens of the pack's 2 sequences as dimension 1, padded only"
    ):
        per_sequence(mean_of)(output, targets[0])
