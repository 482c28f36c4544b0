"""PlannedBatches: the steps of a dataset of sequences of unequal lengths, each with a plan of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import date
from itertools import pairwise
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbkern.pipeline.models.losses import IGNORED, TokenTargets, token_targets
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.memory import Limit
from zbkern.planning.planner.batch import PASSES, BatchPlan, best_batch_plan, sequence_work
from zbkern.planning.planner.request import BatchRequest, Placement
from zbkern.schedules.actions import check_count
from zbkern.schedules.units import some


class PlannedBatch(NamedTuple):
    """What `pipe.step(batch.inputs, batch.targets, batch.side, schedule=batch.plan.schedule)` takes, on every rank.

    inputs: of each microbatch {"input_ids", "position_ids"}, both [1, tokens]; positions begin anew with each sequence
    of a pack. targets: for `token_loss`, the mean over all labelled tokens of the step. side: of packs, where their
    sequences end, by the names that models of the transformers library take. sequences: numbers in the dataset of those
    that `plan.rows` counts.
    """

    inputs: list[dict[str, Tensor]]
    targets: list[TokenTargets]
    side: list[dict[str, Any]]
    plan: BatchPlan
    sequences: list[int]


class _Item(NamedTuple):
    """A sequence of the dataset."""

    number: int
    tokens: Tensor
    labels: Tensor


class PlannedBatches:
    """An epoch of steps at a time, shuffled, the same on every rank of a pipeline; each is planned during the last one.

    Args:
        dataset: has a length, and gives for a number a list of tokens, or a mapping with "input_ids" and, where not all
            tokens count, "labels" (-100 for those that do not) or a mask such as "completion_mask". What is padding by
            "attention_mask" is left out.
        costs, stages, chunks, placement, memory_limit, multiple, packs, passes, fully_shard: as for `plan_batch`.
        sequences, tokens: how many a step has, one of the two; the last step of an epoch may have fewer.
        replica, replicas: which of how many data-parallel pipelines this is: each step's sequences are divided over
            them by work, and the losses' mean over replicas is that over all tokens.
        device: of the tensors.

    `state_dict` and `load_state_dict` keep the place, as a DataLoader's that can be resumed do. Raises TypeError or
    ValueError for wrong arguments, and in a step for a sequence without tokens or with columns that steps would leave
    out, and for fewer sequences than replicas.
    """

    def __init__(
        self,
        dataset: Any,
        costs: Costs,
        stages: int,
        *,
        sequences: int | None = None,
        tokens: int | None = None,
        chunks: int | None = None,
        placement: Placement = None,
        memory_limit: Limit = None,
        multiple: int = 128,
        packs: bool = True,
        passes: int = PASSES,
        fully_shard: bool = False,
        replica: int = 0,
        replicas: int = 1,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        _check(dataset)
        if (sequences is None) is (tokens is None) or (sequences or tokens or 0) < 1:
            raise ValueError(
                f"PlannedBatches: one of sequences and tokens must be at least 1; got {sequences} and {tokens}"
            )
        if not 0 <= replica < replicas:
            raise ValueError(f"PlannedBatches: replica must be from 0 to {replicas - 1}; got {replica}")
        self._dataset, self._seed, self._device = dataset, seed, device
        self._sequences, self._tokens = sequences, tokens
        self._replica, self._replicas = replica, replicas
        self._request = BatchRequest(
            function="PlannedBatches",
            costs=costs,
            stages=stages,
            chunks=chunks,
            placement=placement,
            memory_limit=memory_limit,
            multiple=multiple,
            packs=packs,
            passes=passes,
            fully_shard=fully_shard,
        )
        self._epoch = self._first = 0  # of the epoch's order, the first sequence of the next step

    def state_dict(self) -> dict[str, int]:
        """The place in the dataset, behind the steps that have been taken."""
        return {"epoch": self._epoch, "first": self._first, **self._order}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from a place that `state_dict` gave, with the same dataset and arguments.

        Raises ValueError for a place in another order: of another seed, or of a dataset of another length.
        """
        for name, own in self._order.items():
            if state.get(name, own) != own:
                raise ValueError(
                    f"PlannedBatches.load_state_dict: state must be of the same order of sequences, with {name} {own}; "
                    f"got {state[name]}; make it with the dataset and the seed= that were saved"
                )
        self._epoch, self._first = state["epoch"], state["first"]

    @property
    def _order(self) -> dict[str, int]:
        """What the order of an epoch follows from, besides its number."""
        return {"seed": self._seed, "length": len(self._dataset)}

    def __iter__(self) -> Iterator[PlannedBatch]:
        """The rest of this epoch."""
        order = list(range(len(self._dataset)))
        random.Random(f"{self._seed} {self._epoch}").shuffle(order)
        with ThreadPoolExecutor(1, thread_name_prefix="zbkern-plan") as thread:

            def begin(first: int) -> Future[tuple[PlannedBatch, int]] | None:
                return thread.submit(self._step, order, first) if first < len(order) else None

            coming = begin(self._first)
            while coming is not None:
                batch, self._first = coming.result()
                coming = begin(self._first)
                yield batch
        self._epoch, self._first = self._epoch + 1, 0

    def _step(self, order: list[int], first: int) -> tuple[PlannedBatch, int]:
        """A step of the sequences from `first` on, and the first of the next step."""
        items: list[_Item] = []
        budget = 0
        for number in order[first:]:
            tokens, labels = _read(self._dataset, number)
            budget += len(tokens)
            if items and (len(items) == self._sequences or (self._tokens is not None and budget > self._tokens)):
                break
            items.append(_Item(number, tokens, labels))
        next_step = first + len(items)
        labelled = sum(int((labels[1:] != IGNORED).sum()) for *_, labels in items)
        items = self._share(items)
        plan = best_batch_plan(self._request, [len(item.tokens) for item in items])
        inputs, targets = [], []
        for row in plan.rows:
            own = [items[number] for number in row]
            tokens = torch.cat([item.tokens for item in own])
            positions = torch.cat([torch.arange(len(item.tokens)) for item in own])
            inputs.append({"input_ids": self._there(tokens), "position_ids": self._there(positions)})
            targets.append(self._there(torch.cat([item.labels for item in own])))
        mean = labelled / self._replicas
        batch = token_targets(targets, len(targets), tokens=mean)
        side = [ends_of_pack(ends, self._device) if len(ends) > 2 else {} for ends in plan.ends]
        return PlannedBatch(inputs, batch, side, plan, [item.number for item in items]), next_step

    def _share(self, items: list[_Item]) -> list[_Item]:
        """This replica's: the longest first, each to the replica with the least work."""
        if self._replicas == 1:
            return items
        if len(items) < self._replicas:
            raise ValueError(
                f"PlannedBatches: a step must have a sequence for each of the {self._replicas} replicas; got "
                f"{len(items)}: raise tokens or sequences, or leave out the dataset's last ones"
            )
        works = [sequence_work(self._request.costs, len(item.tokens)) for item in items]
        load, mine = [0.0] * self._replicas, []
        for index in sorted(range(len(items)), key=lambda index: -works[index]):
            least = load.index(min(load))
            load[least] += works[index]
            if least == self._replica:
                mine.append(items[index])
        return mine

    def _there(self, values: Tensor) -> Tensor:
        return values[None].to(self._device or "cpu", non_blocking=True)


def as_packs(rows: Tensor, sequences: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    """Inputs and side inputs of these rows [rows, tokens], a microbatch each, as packs of so many sequences that are
    about as long, in the form of `PlannedBatch`: for `ProfileOptions(packs=...)`. Raises TypeError or ValueError for
    fewer than two sequences, or fewer tokens than sequences.
    """
    check_count("as_packs: sequences", sequences, 2)
    tokens = rows.shape[-1]
    if sequences > tokens:
        raise ValueError(f"as_packs: sequences must be at most the {tokens} tokens of a row; got {sequences}")
    ends = [tokens * number // sequences for number in range(sequences + 1)]
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)]).to(rows.device)[None]
    side = ends_of_pack(ends, rows.device)
    return [{"input_ids": row[None], "position_ids": positions} for row in rows], [side] * len(rows)


def ends_of_pack(ends: Sequence[int], device: torch.device | str | None) -> dict[str, Any]:
    """Where the sequences of a pack end, 0 first, by the names that models of the transformers library take."""
    every = torch.tensor(ends, dtype=torch.int32).to(device or "cpu", non_blocking=True)
    longest = max(b - a for a, b in pairwise(ends))
    return {"cu_seq_lens_q": every, "cu_seq_lens_k": every, "max_length_q": longest, "max_length_k": longest}


_COUNTED = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")  # TRL's, and of chat templates
_ABOUT = {"special_tokens_mask", "length"}  # what tokenizers say of the tokens, of which no loss is made


def _check(dataset: Any) -> None:
    """Raises TypeError for what gives no sequences by their numbers."""
    got = _described(dataset)
    if isinstance(dataset, (Mapping, str)):
        raise TypeError(
            f"PlannedBatches: dataset must be a list of sequences, or a dataset of such; got {got}; pass one of its "
            'splits, dataset["train"], or a list with a row for each sequence'
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"PlannedBatches: dataset must have a length and give sequences by their numbers; got {got}, which streams "
            "or batches them; pass a part at a time, [*itertools.islice(dataset, 10_000)]"
        )


def _read(dataset: Any, number: int) -> tuple[Tensor, Tensor]:
    """A sequence's tokens and labels, without padding; the first label of a sequence is nobody's to predict."""
    item = dataset[number]
    row = dict(item) if isinstance(item, Mapping) else {"input_ids": item}
    given = row.pop("input_ids", None)
    if given is None or isinstance(given, str):
        raise ValueError(
            f"PlannedBatches: sequence {number} must have tokens; got {_described(item)}; tokenize text first, into "
            '"input_ids"'
        )
    tokens = torch.as_tensor(given)
    labels, present = row.pop("labels", None), row.pop("attention_mask", None)
    labels = tokens if labels is None else torch.as_tensor(labels)
    masks = [torch.as_tensor(mask) for name in _COUNTED if (mask := row.pop(name, None)) is not None]
    present = torch.ones_like(tokens) if present is None else torch.as_tensor(present)
    if (
        tokens.dim() != 1
        or tokens.is_floating_point()
        or {each.shape for each in (labels, present, *masks)} != {tokens.shape}
    ):
        raise ValueError(
            f"PlannedBatches: sequence {number} must be a list of at least one token, with labels and masks as long; "
            f"got shapes {[list(each.shape) for each in (tokens, labels, present, *masks)]}"
        )
    for mask in masks:
        labels = labels.masked_fill(mask == 0, IGNORED)
    _check_others(row, number, len(tokens))
    there = present.nonzero().flatten()
    if not len(there) or len(there) <= there[-1] - there[0]:
        raise ValueError(
            f"PlannedBatches: sequence {number} must have at least one token, and none masked out between others; its "
            f"attention_mask has {len(there)} of {len(tokens)}"
        )
    labels = labels[there].long()
    labels[0] = IGNORED
    return tokens[there].long(), labels


def _check_others(row: dict[str, Any], number: int, tokens: int) -> None:
    """Raises ValueError for columns that may change a loss, which no step would see."""
    positions = row.get("position_ids")
    if positions is not None and [*map(int, positions)] == [*range(tokens)]:
        del row["position_ids"]
    if several := sorted({"position_ids", "seq_lengths", "seq_idx"} & row.keys()):
        raise ValueError(
            f"PlannedBatches: sequence {number} has {several[0]!r}, as a row of several sequences; give each by itself "
            "(packing=False of TRL's SFTConfig), which are packed for each step"
        )
    if unread := next((name for name, value in row.items() if name not in _ABOUT and not _is_about(value)), None):
        raise ValueError(
            f"PlannedBatches: sequence {number} has {unread!r}, and steps have tokens and labels alone; if it does not "
            f"count leave it out, dataset.remove_columns({unread!r}), else pass side inputs of your own with plan_batch"
        )


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {some([*map(str, value)])}" if isinstance(value, Mapping) else kind


def _is_about(value: Any) -> bool:
    """Whether it only tells of a sequence: a text, a number, a conversation."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(each, (str, Mapping, type(None))) for each in value)
    return value is None or isinstance(value, (str, bytes, Number, Mapping, date))
