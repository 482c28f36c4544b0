"""Steps of a dataset of unequal sequences, planned one by one, against one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from zbkern.pipeline import Costs, PlannedBatches
from zbkern.planning.planner import native
from zbkern.planning.planner.batch import PASSES, best_batch_plan

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


def test_a_token_counts_alike_in_every_number_of_replicas() -> None:
    """Also where there are fewer labelled tokens than replicas."""
    labels = [[-100, -100, 3]] + [[-100] * 3] * 7
    dataset = [{"input_ids": [1, 2, 3], "labels": each} for each in labels]
    for replicas in (1, 2, 4, 8):
        counted = 0.0
        for replica in range(replicas):
            [batch] = PlannedBatches(dataset, COSTS, 2, sequences=8, replica=replica, replicas=replicas)
            counted += sum(float((t.labels != -100).sum() * t.weight) for t in batch.targets) / len(batch.targets)
        assert counted / replicas == pytest.approx(1)


# ---- what rows of datasets have

TOKENS = [7, 8, 9, 10, 11]


def read(row: Any) -> tuple[list[int], list[int]]:
    """The tokens of a step of this row alone, and the labels as token_targets shifts them."""
    [batch] = PlannedBatches([row], COSTS, 1, sequences=1)
    return batch.inputs[0]["input_ids"][0].tolist(), batch.targets[0].labels[0].tolist()


@pytest.mark.parametrize(
    ("row", "tokens", "labels"),
    [
        ({}, TOKENS, [8, 9, 10, 11, -100]),
        (
            {"labels": None, "attention_mask": None, "text": "a b", "id": 3, "messages": [{"role": "user"}]},
            TOKENS,
            None,
        ),
        ({"labels": [7, -100, 9, 10, -100]}, TOKENS, [-100, 9, 10, -100, -100]),
        ({"attention_mask": [1, 1, 1, 1, 1], "special_tokens_mask": [1, 0, 0, 0, 1], "length": 5}, TOKENS, None),
        ({"attention_mask": [1, 1, 1, 0, 0]}, [7, 8, 9], [8, 9, -100]),
        ({"attention_mask": [0, 0, 1, 1, 1]}, [9, 10, 11], [10, 11, -100]),
        ({"completion_mask": [0, 0, 0, 1, 1]}, TOKENS, [-100, -100, 10, 11, -100]),
        ({"assistant_masks": [0, 1, 0, 1, 1], "completion_mask": [0, 1, 1, 1, 0]}, TOKENS, [8, -100, 10, -100, -100]),
        ({"loss_mask": [True, True, False, False, True]}, TOKENS, [8, -100, -100, 11, -100]),
        ({"attention_mask": [0, 1, 1, 1, 1], "completion_mask": [0, 0, 0, 1, 1]}, TOKENS[1:], [-100, 10, 11, -100]),
        ({"position_ids": [0, 1, 2, 3, 4]}, TOKENS, None),
    ],
)
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_columns_that_say_which_tokens_count(row: Any, tokens: Any, labels: Any, kind: Any) -> None:
    wide = {
        name: kind(value) if isinstance(value, list) and name != "messages" else value for name, value in row.items()
    }
    assert read({"input_ids": kind(TOKENS), **wide}) == (tokens, labels or [8, 9, 10, 11, -100])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": TOKENS, "position_ids": [0, 1, 2, 0, 1]}, "'position_ids', as a row of several sequences"),
        ({"input_ids": TOKENS, "position_ids": torch.arange(5) + 3}, "'position_ids', as a row of several sequences"),
        (
            {"input_ids": TOKENS, "seq_lengths": [3, 2]},
            r"'seq_lengths', as a row .* \(packing=False of TRL's SFTConfig\)",
        ),
        ({"input_ids": TOKENS, "token_type_ids": [0] * 5}, r"has 'token_type_ids'.*remove_columns\('token_type_ids'\)"),
        ({"input_ids": TOKENS, "advantages": [0.5] * 5}, "has 'advantages', and steps have tokens and labels alone"),
        ({"input_ids": TOKENS, "pixel_values": torch.ones(3, 4, 4)}, "has 'pixel_values'"),
        ({"input_ids": TOKENS, "images": [object()]}, "has 'images'"),
        ({"input_ids": TOKENS, "attention_mask": [1, 0, 1, 1, 1]}, "none masked out between others; .* 4 of 5"),
        ({"input_ids": TOKENS, "attention_mask": [0] * 5}, "at least one token, .* 0 of 5"),
        ({"input_ids": TOKENS, "completion_mask": [1, 1]}, r"masks as long; got shapes \[\[5\], \[5\], \[5\], \[2\]\]"),
        ({"input_ids": [TOKENS]}, r"must be a list of at least one token.*got shapes \[\[1, 5\]"),
        ({"input_ids": []}, "must be a list of at least one token"),
        ({"text": "the pipeline"}, "sequence 0 must have tokens; got dict of 'text'; tokenize text first"),
        ("the pipeline", "sequence 0 must have tokens; got str; tokenize text first"),
        ([0.5, 0.25], "must be a list of at least one token"),
    ],
)
def test_columns_that_a_step_would_leave_out_are_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"PlannedBatches: .*{message}"):
        read(row)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            {"train": [TOKENS], "test": [TOKENS]},
            r"got dict of 'train', 'test'; pass one of its splits, dataset\[\"train\"\]",
        ),
        ((row for row in [TOKENS]), r"must have a length and give sequences by their numbers; got generator"),
        (torch.utils.data.DataLoader([TOKENS]), "got DataLoader, which streams or batches them"),
        ("the pipeline", "must be a list of sequences, or a dataset of such; got str"),
    ],
)
def test_what_gives_no_sequences_by_number_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"PlannedBatches: dataset {message}" if "must" in message else message):
        PlannedBatches(dataset, COSTS, 2, sequences=1)


def test_datasets_of_the_datasets_library() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the datasets library: pip install datasets")
    rows = datasets.Dataset.from_list([{"input_ids": TOKENS, "attention_mask": [0, 1, 1, 1, 1], "text": "a"}] * 3)
    for each in (rows, rows.with_format("torch"), rows.with_format("numpy")):
        [batch] = PlannedBatches(each, COSTS, 1, sequences=3)
        assert sum(row["input_ids"].numel() for row in batch.inputs) == 12
    with pytest.raises(TypeError, match="got IterableDataset, which streams"):
        PlannedBatches(rows.to_iterable_dataset(), COSTS, 2, sequences=1)
    with pytest.raises(TypeError, match="got DatasetDict of 'train'; pass one of its splits"):
        PlannedBatches(datasets.DatasetDict({"train": rows}), COSTS, 2, sequences=1)


def test_a_place_is_one_of_the_same_order() -> None:
    state = PlannedBatches(dataset_of(20), COSTS, 2, sequences=6, seed=3).state_dict()
    PlannedBatches(dataset_of(20), COSTS, 2, sequences=4, seed=3).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"the same order of sequences, with seed 4; got 3; make it with the dataset and"
    ):
        PlannedBatches(dataset_of(20), COSTS, 2, sequences=6, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="with length 21; got 20"):
        PlannedBatches(dataset_of(21), COSTS, 2, sequences=6, seed=3).load_state_dict(state)


def test_a_step_is_planned_with_as_many_passes_as_are_asked_for(monkeypatch) -> None:
    asked = []

    def noted(request, lengths):
        asked.append(request.passes)
        return best_batch_plan(request, lengths)

    monkeypatch.setattr("zbkern.pipeline.batches.best_batch_plan", noted)
    for passes in ({}, {"passes": 5000}):
        next(iter(PlannedBatches(dataset_of(8), COSTS, 2, sequences=8, multiple=8, **passes)))
    assert sorted({*asked}) == [5000, PASSES]
