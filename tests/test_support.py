"""What tests stand on: ranks that have begun other collectives are replaced before the next test; patience ends."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.patience import patiently
from tests.support.ranks import Ranks


def one_alone() -> int:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(3), async_op=True)
    return os.getpid()


def all_of_them() -> tuple[int, float]:
    value = torch.ones(1)
    dist.all_reduce(value)
    return os.getpid(), value.item()


@pytest.mark.dist
def test_a_collective_that_not_all_have_begun_meets_no_later_one() -> None:
    ranks = Ranks(2)
    try:
        first, second = ranks.run(all_of_them), ranks.run(all_of_them)
        assert first == second
        assert ranks.run(one_alone) == [pid for pid, _ in first]
        third = ranks.run(all_of_them)
        assert [total for _, total in third] == [2, 2]
        assert not {pid for pid, _ in third} & {pid for pid, _ in first}
    finally:
        ranks.close()


@pytest.mark.filterwarnings("ignore:is tried again with")
def test_what_is_wrong_fails_with_any_patience() -> None:
    scales: list[float] = []

    def late_by(least: float) -> Callable[[float], None]:
        def check(scale: float) -> None:
            scales.append(scale)
            assert scale >= least

        return check

    patiently(late_by(4))
    with pytest.raises(AssertionError):
        patiently(late_by(100))
    assert scales == [1, 4, 1, 4, 16]
