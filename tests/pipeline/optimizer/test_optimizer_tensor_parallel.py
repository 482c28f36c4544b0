"""Tensor-parallel ranks of a stage that hear of a norm at different times take back the same steps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.support import tensor_parallel
from tests.support.tensor_parallel import OneProcess, Stages, apart, make_optimizer, values
from zbkern.pipeline import Optimizer
from zbkern.pipeline.transport.mailbox import Note

STEPS = range(6)
MAX_NORM = 50.0  # which two steps are above, and the first stage alone is not


def delay_norms(transport: Any) -> None:
    """One of the first stage's ranks hears later than the other whether it must clip, and has begun more forwards."""
    send = transport.send

    def send_late(rank: int, tag: Any, tensors: Any) -> None:
        if isinstance(tag, Note):
            time.sleep(0.1)
        send(rank, tag, tensors)

    transport.send = send_late


def trained(sequence: bool) -> tuple[list[float], dict[str, Any], int]:
    """Norms of all steps, the weights then, and how often a step was undone."""
    ours = Stages(2, 2, "zb_h1", tied=False, sequence=sequence, fill="planned")
    ours.pipe.detach()
    ours.optimizer = Optimizer(make_optimizer(ours.modules), ours.pipe, max_norm=MAX_NORM, adaptive=False)
    if torch.distributed.get_rank() == 3:
        delay_norms(ours.pipe.transport)
    with ours.pipe:
        _, norms = ours.train(STEPS)
    return norms, values(ours.named()), ours.optimizer.undone


@pytest.mark.dist
@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training_equals_one_process(four_ranks: Any, monkeypatch: pytest.MonkeyPatch, sequence: bool) -> None:
    monkeypatch.setattr(tensor_parallel, "MAX_NORM", MAX_NORM)
    plain = OneProcess(tied=False)
    _, expected = plain.train(STEPS)
    results = four_ranks.run(trained, sequence)
    assert [undone for _, _, undone in results] == [2, 2, 0, 0]
    for norms, weights, _ in results:
        assert norms == pytest.approx(expected, rel=1e-11)
        far = apart(weights, plain.named())
        assert max(far.values()) < 1e-10, far
