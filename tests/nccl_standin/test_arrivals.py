"""When a message is there, for the host and for others that wait for the rank that it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.nccl_standin.faults import Fault, Layer, batch, run_with
from tests.nccl_standin.ranks import MEETING, Run
from zbkern.pipeline import Pipeline, PipelineError, schedules
from zbkern.pipeline.transport.base import Tag

TAG = Tag(0, "F", 1, 0)


def test_a_message_is_ready_when_it_has_arrived_and_waits_for_no_pass_of_its_receiver() -> None:
    """Rank 0 has computed it after a second; rank 1's GPU is busy for three."""
    run = Run(2)
    for gpu in run.gpus:
        gpu.is_behind = True

    def rank(transport: Any) -> float:
        transport.connect([(0, 1)])
        transport.begin("call")
        run.current_stream().compute([1.0, 3.0][transport.rank])
        start = run.scheduler.now
        if transport.rank == 0:
            transport.send(1, TAG, torch.ones(4))
        else:
            while not transport.ready(TAG):
                run.scheduler.wait_until([], lambda: False, 0.01)
        arrived = run.scheduler.now
        if transport.rank == 1:
            assert transport.receive(0, TAG, 10.0).tolist() == [1.0] * 4
        transport.close()
        return arrived - start

    assert 1.0 < run.run(rank)[1] < 1.1


def test_who_is_asked_names_the_rank_that_its_gpu_waits_for() -> None:
    """Rank 0's GPU is busy; rank 2, whose timeout is the shortest, waits for rank 1, whose host waits for nothing."""
    run = Run(3)
    for gpu in run.gpus:
        gpu.is_behind = True

    def rank(transport: Any) -> str:
        busy = lambda: run.current_stream().compute(100.0) if transport.rank == 0 else None  # noqa: E731
        chunk, timeout = zbkern.convert(Layer(busy)), [50.0, 50.0, 5.0][transport.rank]
        with Pipeline([chunk], schedules.zb_h1(3, 6), nn.functional.mse_loss, transport, timeout=timeout) as pipe:
            pipe.evaluate(*batch(0, 3))
            run.scheduler.wait_until([], lambda: transport.failure is not None, 10.0)
            with pytest.raises(PipelineError) as caught:
                pipe.evaluate(*batch(0, 3))
        return str(caught.value)

    for told in run.run(rank):
        assert told.startswith("rank 0, action none: stuck for "), told


def test_a_rank_that_is_frozen_while_others_connect_ends_them() -> None:
    _, told = run_with(Fault("freeze", "connect", 2, 0), seed=0)
    assert told[0] is None
    assert told[1] is not None
    assert told[1].text == f"rank 1: NCCL did not connect in {MEETING:g} s"


def test_a_rank_that_has_closed_says_nothing_of_one_that_ends_then(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(2)

    def rank(transport: Any) -> float:
        if transport.rank == 0:
            run.scheduler.wait_until([], lambda: False, 1.0)
            run.kill(0)
        transport.close()
        return run.scheduler.now

    _, ended = run.run(rank)
    assert 1.0 < ended < 1.1
    assert not caplog.records
