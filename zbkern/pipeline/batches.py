"""PlannedBatches: the steps of a dataset of sequences of unequal lengths, each with a plan of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbkern.pipeline.models.losses import IGNORED, TokenTargets, token_targets
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.planner.batch import BatchPlan, plan_batch, sequence_work


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
            tokens count, "labels" (-100 for those that do not).
        costs, stages, chunks, placement, memory_limit, multiple, packs: as for `plan_batch`.
        sequences, tokens: how many a step has, one of the two; the last step of an epoch may have fewer.
        replica, replicas: which of how many data-parallel pipelines this is: each step's sequences are divided over
            them by work, and the losses' mean over replicas is that over all tokens.
        device: of the tensors.

    `state_dict` and `load_state_dict` keep the place, as a DataLoader's that can be resumed do. Raises TypeError or
    ValueError for wrong arguments, and in a step for a sequence without tokens, or fewer sequences than replicas.
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
        placement: str | Sequence[int] | None = None,
        memory_limit: float | None = None,
        multiple: int = 128,
        packs: bool = True,
        replica: int = 0,
        replicas: int = 1,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if (sequences is None) is (tokens is None) or (sequences or tokens or 0) < 1:
            raise ValueError(
                f"PlannedBatches: one of sequences and tokens must be at least 1; got {sequences} and {tokens}"
            )
        if not 0 <= replica < replicas:
            raise ValueError(f"PlannedBatches: replica must be from 0 to {replicas - 1}; got {replica}")
        self._dataset, self._costs, self._seed, self._device = dataset, costs, seed, device
        self._sequences, self._tokens = sequences, tokens
        self._replica, self._replicas = replica, replicas
        self._how: dict[str, Any] = {
            "stages": stages,
            "chunks": chunks,
            "placement": placement,
            "memory_limit": memory_limit,
            "multiple": multiple,
            "packs": packs,
        }
        self._epoch = self._first = 0  # of the epoch's order, the first sequence of the next step

    def state_dict(self) -> dict[str, int]:
        """The place in the dataset, behind the steps that have been taken."""
        return {"epoch": self._epoch, "first": self._first}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from a place that `state_dict` gave, with the same dataset and arguments."""
        self._epoch, self._first = state["epoch"], state["first"]

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
        plan = plan_batch([len(item.tokens) for item in items], self._costs, **self._how)
        inputs, targets = [], []
        for row in plan.rows:
            own = [items[number] for number in row]
            tokens = torch.cat([item.tokens for item in own])
            positions = torch.cat([torch.arange(len(item.tokens)) for item in own])
            inputs.append({"input_ids": self._there(tokens), "position_ids": self._there(positions)})
            targets.append(self._there(torch.cat([item.labels for item in own])))
        mean = labelled / self._replicas
        batch = token_targets(targets, len(targets), tokens=mean)
        side = [self._of_pack(ends) if len(ends) > 2 else {} for ends in plan.ends]
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
        works = [sequence_work(self._costs, len(item.tokens)) for item in items]
        load, mine = [0.0] * self._replicas, []
        for index in sorted(range(len(items)), key=lambda index: -works[index]):
            least = load.index(min(load))
            load[least] += works[index]
            if least == self._replica:
                mine.append(items[index])
        return mine

    def _of_pack(self, ends: Sequence[int]) -> dict[str, Any]:
        every = torch.tensor(ends, dtype=torch.int32).to(self._device or "cpu", non_blocking=True)
        longest = max(b - a for a, b in pairwise(ends))
        return {"cu_seq_lens_q": every, "cu_seq_lens_k": every, "max_length_q": longest, "max_length_k": longest}

    def _there(self, values: Tensor) -> Tensor:
        return values[None].to(self._device or "cpu", non_blocking=True)


def _read(dataset: Any, number: int) -> tuple[Tensor, Tensor]:
    """A sequence's tokens and labels; the first label of a sequence is nobody's to predict."""
    item = dataset[number]
    tokens = torch.as_tensor(item["input_ids"] if isinstance(item, Mapping) else item)
    labels = torch.as_tensor(item["labels"]) if isinstance(item, Mapping) and "labels" in item else tokens
    if tokens.dim() != 1 or not len(tokens) or tokens.is_floating_point() or labels.shape != tokens.shape:
        raise ValueError(
            f"PlannedBatches: sequence {number} must be a list of at least one token, and labels as long; got shapes "
            f"{list(tokens.shape)} and {list(labels.shape)}"
        )
    labels = labels.long().clone()
    labels[0] = IGNORED
    return tokens.long(), labels
