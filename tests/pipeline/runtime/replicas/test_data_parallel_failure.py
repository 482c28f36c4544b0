"""Data-parallel stages in a Pipeline: what ends with a rank, and what does not go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.parallel_stages import Stages
from tests.support.ranks import Ranks
from zbkern.pipeline.transport.base import PipelineError

pytestmark = pytest.mark.dist


def die_at_the_third_step(folder: Path) -> None:
    """Rank 3 does; the others end as scripts do, and leave what they have to say."""
    ours, rank = Stages("ddp", (2, 2, "zb_h1")), dist.get_rank()
    try:
        with ours.pipe as pipe:
            for step in range(50):
                if step == 2 and rank == 3:
                    (folder / "start").write_text(str(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                pipe.step(*ours.batch(step))
    except PipelineError as error:
        (folder / f"{rank}").write_text(f"{time.monotonic()} {error}")
        os._exit(1)


def test_a_rank_that_dies_ends_all_replicas(tmp_path: Path) -> None:
    """Its own pipeline hears of it as always, the other when a reduction with it fails."""
    ranks = Ranks(4)
    try:
        with pytest.raises(AssertionError):
            ranks.run(die_at_the_third_step, tmp_path)
    finally:
        ranks.close()
    start = float((tmp_path / "start").read_text())
    expected = {**dict.fromkeys((0, 2), "action reduction over replicas"), 1: "rank 1 exited unexpectedly"}
    for rank, message in expected.items():
        when, _, said = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(when) - start < 60
        assert message in said, f"rank {rank}: {said}"


def go_on_after_a_failure() -> str:
    ours = Stages("ddp", (2, 2, "zb_h1"))
    with ours.pipe as pipe:
        pipe.step(*ours.batch(0))
        if ours.last:
            ours.mine[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(PipelineError, match="rank 1, action 1F0: ZeroDivisionError"):
            pipe.step(*ours.batch(1))
        with pytest.raises(PipelineError, match="cannot go on after a failure") as caught:
            pipe.step(*ours.batch(1))
    return str(caught.value)


def test_replicas_do_not_go_on_after_a_failure(four_ranks: Any) -> None:
    assert all("restart all" in message for message in four_ranks.run(go_on_after_a_failure))
