"""Data-parallel stages in a Pipeline: what ends with a rank, what does not go on, and checkpoints."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.ranks import Ranks
from tests.support.two_by_two import KINDS, MAX_NORM, Setup, make_model, make_optimizer, whole
from zbkern.pipeline import Optimizer, checkpoint
from zbkern.pipeline.transport.base import PipelineError

pytestmark = pytest.mark.dist


def die_at_the_third_step(folder: Path) -> None:
    """Rank 3 does; the others end as scripts do, and leave what they have to say."""
    setup, rank = Setup("ddp", "zb_h1"), dist.get_rank()
    try:
        with setup.pipe() as pipe:
            for step in range(50):
                if step == 2 and rank == 3:
                    (folder / "start").write_text(str(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                pipe.step(*setup.data(step))
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
    expected = {**dict.fromkeys((0, 1), "action reduction over replicas"), 2: "rank 1 exited unexpectedly"}
    for rank, message in expected.items():
        when, _, said = (tmp_path / str(rank)).read_text().partition(" ")
        assert float(when) - start < 10
        assert message in said, f"rank {rank}: {said}"


def go_on_after_a_failure() -> str:
    setup = Setup("ddp", "zb_h1")
    with setup.pipe() as pipe:
        pipe.step(*setup.data(0))
        if setup.stage == 1:
            setup.plain[0].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(PipelineError, match="rank 1, action 1F0: ZeroDivisionError"):
            pipe.step(*setup.data(1))
        with pytest.raises(PipelineError, match="cannot go on after a failure") as caught:
            pipe.step(*setup.data(1))
    return str(caught.value)


def test_replicas_do_not_go_on_after_a_failure(four_ranks: Any) -> None:
    assert all("restart all" in message for message in four_ranks.run(go_on_after_a_failure))


# ---- checkpoints


def rename(chunk: int, key: str) -> str:
    return f"chunk{chunk}.{key}"


def state(chunks: dict[int, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for chunk, module in chunks.items():
        for key, p in module.named_parameters():
            found[f"{chunk}.{key}"] = whole(p).detach().clone()
            found[f"{chunk}.{key}/exp_avg"] = whole(optimizer.state[p]["exp_avg"]).clone()
    return found


def save_or_load(folder: Path, kind: str, save: bool) -> dict[str, Tensor]:
    setup = Setup(kind, "zb_h1")
    with setup.pipe() as pipe:
        optimizer = Optimizer(make_optimizer(setup.parameters()), pipe, max_norm=MAX_NORM)
        for step in range(2 if save else 1):
            optimizer.zero_grad()
            pipe.step(*setup.data(step if save else 7))
            optimizer.step()
        if save:
            checkpoint.save(folder, 2, pipe, optimizer, {"position": 2}, rename=rename)
        else:
            assert checkpoint.load(folder, pipe, optimizer, rename=rename) == (2, {"position": 2})
        found = state(dict(zip(setup.chunks, setup.plain, strict=True)), optimizer.optimizer)
        optimizer.zero_grad()
        pipe.step(*setup.data(2))
        optimizer.step()
        optimizer.validate()
        return {**found, **{f"{name}/next": value for name, value in setup.named(lambda p: p).items()}}


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_replicas(four_ranks: Any, tmp_path: Path, kind: str) -> None:
    """Saved with one wrapper, loaded with both and in one process; steps after it are the same."""
    saved = four_ranks.run(save_or_load, tmp_path, kind, True)
    for other in KINDS:
        for rank, loaded in enumerate(four_ranks.run(save_or_load, tmp_path, other, False)):
            for key, value in loaded.items():
                if key.endswith("/next"):
                    torch.testing.assert_close(value, saved[rank][key], msg=lambda m, k=key: f"{k}: {m}")
                else:
                    assert torch.equal(value, saved[rank][key]), key
    chunks = dict(enumerate(make_model(2)))
    optimizer = make_optimizer([p for module in chunks.values() for p in module.parameters()])
    checkpoint.load(tmp_path, chunks, optimizer, rename=rename)
    for key, value in state(chunks, optimizer).items():
        assert torch.equal(value, saved[int(key[0])][key]), key
