"""Steps of a dataset of unequal sequences, planned one by one, against one process."""

from __future__ import annotations

import random

import pytest

from zbkern.pipeline import Costs, PlannedBatches
from zbkern.planning.planner import native

pytestmark = pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled")

VOCABULARY = 31
COSTS = Costs(
    2.0,
    3.5,
    1.0,
    attention_forward=1.0,
    attention_backward=2.5,
    overhead=0.05,
    activation=1.0,
    held=1.2,
    carried=0.1,
    tokens=64,
)


def dataset_of(count: int, longest: int = 120, labelled: float = 1.0) -> list[dict[str, list[int]]]:
    generator = random.Random(0)
    found = []
    for _ in range(count):
        length = max(1, min(longest, int(generator.lognormvariate(2.5, 1.2))))
        tokens = [generator.randrange(VOCABULARY) for _ in range(length)]
        labels = [token if generator.random() < labelled else -100 for token in tokens]
        found.append({"input_ids": tokens, "labels": labels})
    return found


def test_both_packs_and_slices_are_in_these_steps() -> None:
    plans = [batch.plan for batch in PlannedBatches(dataset_of(24), COSTS, 2, sequences=8, multiple=8)]
    assert any(len(row) > 1 for plan in plans for row in plan.rows)
    assert any(len(cut) > 1 for plan in plans for cut in plan.schedule.own_slices)


def test_an_epoch_can_be_resumed_and_the_next_has_another_order() -> None:
    dataset = dataset_of(20)
    batches = PlannedBatches(dataset, COSTS, 2, sequences=6, multiple=8)
    whole = [batch.sequences for batch in batches]
    assert [len(sequences) for sequences in whole] == [6, 6, 6, 2]
    assert [batch.sequences for batch in batches] != whole
    first = PlannedBatches(dataset, COSTS, 2, sequences=6, multiple=8)
    for number, batch in enumerate(first):
        assert batch.sequences == whole[number]
        if number == 1:
            break
    again = PlannedBatches(dataset, COSTS, 2, sequences=6, multiple=8)
    again.load_state_dict(first.state_dict())
    assert [batch.sequences for batch in again] == whole[2:]


def test_a_budget_of_tokens() -> None:
    dataset = dataset_of(30)
    for batch in PlannedBatches(dataset, COSTS, 2, tokens=100, multiple=8):
        lengths = [len(dataset[number]["input_ids"]) for number in batch.sequences]
        assert sum(lengths) <= 100 or len(lengths) == 1


def test_replicas_share_every_step_by_work_and_one_mean_over_tokens() -> None:
    dataset = dataset_of(40)
    shares = [list(PlannedBatches(dataset, COSTS, 2, sequences=20, multiple=8, replica=r, replicas=2)) for r in (0, 1)]
    for both in zip(*shares, strict=True):
        together = sorted(number for batch in both for number in batch.sequences)
        assert len({*together}) == 20
        counted = sum(len(dataset[number]["input_ids"]) - 1 for number in together)
        for batch in both:
            weight = batch.targets[0].weight / len(batch.targets)  # of a token's loss in this replica's
            assert weight.item() == pytest.approx(2 / counted)
        tokens = [sum(len(dataset[number]["input_ids"]) for number in batch.sequences) for batch in both]
        assert max(tokens) < 1.6 * min(tokens)
