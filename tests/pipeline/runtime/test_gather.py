"""A value of every rank on all ranks: in their order, however large; and a rank that fails or hangs beside it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import assert_same, make_data, make_model, run_pipelines
from zbkern.pipeline import Pipeline, schedules
from zbkern.pipeline.transport.base import PipelineError
from zbkern.pipeline.transport.local import LocalTransport


def gathering(size: int) -> list[Any]:
    with Pipeline([zbkern.convert(make_model(4)[0])], schedules.zb_h1(4, 4), nn.functional.mse_loss) as pipe:
        return [pipe.gather(torch.full((size,), pipe.rank).tolist()) for _ in range(3)]


@pytest.mark.dist
@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_a_gather_brings_the_values_of_all_ranks_in_order(four_ranks: Any, size: int) -> None:
    assert four_ranks.run(gathering, size) == [[[[rank] * size for rank in range(4)]] * 3] * 4


def broadcasting() -> list[Any]:
    """Trees of every rank in turn, from within and from the ends of the chain, beside steps; and one that fails."""
    with Pipeline(
        [zbkern.convert(make_model(4)[0])], schedules.zb_h1(4, 4), nn.functional.mse_loss, timeout=60
    ) as pipe:
        found = []
        for source in range(4):
            made = {"a": torch.full((source + 1, 2), source), "b": (torch.tensor(source + 0.5).bfloat16(), b"c")}
            found.append(
                pipe._calls.broadcast(source, lambda made=made: made if made["a"][0, 0] == pipe.rank else 1 / 0)
            )
        torch.distributed.barrier()  # else the failure may end the last broadcast of a slower rank
        with pytest.raises(PipelineError, match="rank 2, action none: ZeroDivisionError"):
            pipe._calls.broadcast(2, lambda: 1 / 0)
        return found


@pytest.mark.dist
def test_a_broadcast_brings_tensors_of_one_rank_to_all(four_ranks: Any) -> None:
    for found in four_ranks.run(broadcasting):
        for source, tree in enumerate(found):
            half = torch.tensor(source + 0.5).bfloat16()
            assert_same({"a": torch.full((source + 1, 2), source), "b": (half, b"c")}, tree)


def test_a_value_that_cannot_be_sent_is_known_to_all_at_once() -> None:
    def steps(pipe: Pipeline) -> Pipeline:
        with pytest.raises(PipelineError, match="rank 1, action none: TypeError: cannot pickle"):
            pipe.gather(pipe.rank if pipe.rank == 0 else threading.Lock())
        pipe.step(*make_data(4))
        return pipe

    for pipe in run_pipelines(schedules.zb_h1(2, 4), [*map(zbkern.convert, make_model(2))], steps):
        with pytest.raises(RuntimeError, match=r"Pipeline\.gather: this pipeline was closed"):
            pipe.gather(pipe.rank)


def test_what_is_no_data_is_a_type_error() -> None:
    for value in (torch.ones(()), threading.Lock()):
        with pytest.raises(TypeError, match=r"cannot send a torch\._utils|cannot pickle"):
            LocalTransport.ring(1)[0].gather(value)


def test_a_gather_that_has_everything_ends_well_beside_a_failure() -> None:
    """One rank goes on and fails before the other one wakes up: that is not a failure of the gather."""
    first, second = LocalTransport.ring(2)
    gathered: list[Any] = []
    waiting = threading.Thread(target=lambda: gathered.append(first.gather("a")))
    waiting.start()
    while first.awaits is None:
        time.sleep(0.01)
    with first._mailbox._changed:  # held, so that the other thread sleeps until both have happened
        gathered.append(second.gather("b"))
        second.fail("broken")
    waiting.join(60)
    assert gathered == [["a", "b"]] * 2
    assert not first._mailbox._messages, "what all have taken is kept"
    with pytest.raises(PipelineError, match="broken"):
        first.gather("c")
