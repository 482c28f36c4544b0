"""What waits on a rank, in bytes, is what plans count: never more, and as much where the rank is late."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import nn

import zbkern
from tests.nccl_standin.ranks import Run
from tests.nccl_standin.training import ROWS, WIDTH, Case, batch_of, in_one_process, model_of, train
from tests.support.chunks import results_on_threads
from zbkern.pipeline import Costs, Pipeline, schedules
from zbkern.pipeline.transport.mailbox import Mailbox, Tag
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.planning.costs.flat import flat_costs
from zbkern.schedules.schedule import Schedule

BYTES = 4 * ROWS * WIDTH


class Waiting:
    """By rank, the bytes of messages that are there, or are received, and were not taken."""

    def __init__(self) -> None:
        self.now: dict[int, int] = defaultdict(int)
        self.most: dict[int, int] = defaultdict(int)

    def watching(self) -> Any:
        put, take = Mailbox.put, Mailbox.take

        def watched_put(mailbox: Mailbox, tag: Any, message: Any, sender: int, call: Any) -> Any:
            if isinstance(tag, Tag) and sender != mailbox._rank:
                self.now[mailbox._rank] += self._size(message)
                self.most[mailbox._rank] = max(self.most[mailbox._rank], self.now[mailbox._rank])
            return put(mailbox, tag, message, sender, call)

        def watched_take(mailbox: Mailbox, tag: Any) -> Any:
            message = take(mailbox, tag)
            if isinstance(tag, Tag) and self.now[mailbox._rank]:
                self.now[mailbox._rank] -= self._size(message)
            return message

        return mock.patch.multiple(Mailbox, put=watched_put, take=watched_take)

    @staticmethod
    def _size(message: Any) -> int:
        return sum(each.nbytes for each in tensors_in(message[0]))


def counted(schedule: Schedule) -> tuple[float, ...]:
    """What plans leave room for."""
    return flat_costs(Costs(message=BYTES), schedule).ahead


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h2", "interleaved"])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_as_much_waits_for_a_rank_that_is_late_as_is_counted(name: str, late: int) -> None:
    schedule = getattr(schedules, name)(3, 6)
    case, waiting = Case((schedule,)), Waiting()
    row, expected = schedule.actions[late], counted(schedule)[late]
    parts = model_of(case)
    slow = max(range(len(row)), key=lambda place: waits_before(schedule, late, place))

    def rank(transport: Any) -> None:
        mine = [zbkern.convert(parts[chunk]) for chunk in schedule.chunks_of(transport.rank)]
        begin: Callable[[object], None] = transport.begin_action

        def begin_late(action: object) -> None:
            deadline = time.monotonic() + 60
            while action == row[slow] and waiting.now[late] < expected and time.monotonic() < deadline:
                time.sleep(0.001)
            begin(action)

        if transport.rank == late:
            transport.begin_action = begin_late
        with Pipeline(mine, schedule, nn.functional.mse_loss, transport) as pipe:
            pipe.step(*batch_of(case, 0))

    with waiting.watching():
        results_on_threads(3, rank)
    assert waiting.most[late] == expected


def waits_before(schedule: Schedule, rank: int, place: int) -> int:
    """Messages that others can have sent to a rank before this place in its row, less those that it has taken."""
    from tests.schedules.test_ahead import sent

    return sent(schedule, rank, place)


@pytest.mark.parametrize(("name", "size"), [("one_f_one_b", 4), ("zb_v", 3), ("interleaved", 2), ("zb_h2", 3)])
def test_no_more_waits_on_a_gpu_than_is_counted(name: str, size: int) -> None:
    case = Case((getattr(schedules, name)(size, 2 * size),), optimizer=False)
    whole, limits = in_one_process(case), counted(case.schedules[0])
    reached = [0.0] * size
    for seed in range(6):
        waiting = Waiting()
        with waiting.watching():
            train(case, Run(size, 32, seed), whole)
        reached = [max(reached[rank], waiting.most[rank]) for rank in range(size)]
    # a step's first messages may be there before the one before has ended
    assert all(most <= limit for most, limit in zip(reached, limits, strict=True)), (reached, limits)
    assert max(reached) > 0
