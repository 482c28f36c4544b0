"""Runs that are killed, and go on from their last checkpoint as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpointed import build, train
from tests.support.ranks import PRELOAD
from tests.support.restarts import restarted
from zbkern.pipeline import checkpoint


def run_rank(rank: int, folder: Path, steps: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    run(folder, steps, save_every=0)


def run_elastic(folder: Path, steps: int, save_every: int, dies: tuple[int, int]) -> int:
    """The same under torchrun's agent. dies: the rank that does, once, and before which step."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    doomed = attempt == 0 and dist.get_rank() == dies[0]
    run(folder, steps, save_every, dies[1] if doomed else None)
    return attempt


def run(folder: Path, steps: int, save_every: int, dies_before: int | None = None) -> None:
    """One rank of a run that goes on from the last checkpoint; the last rank logs every loss, exactly."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    _, pipe, optimizer = build("zb_h2")
    order = list(range(1000))  # the data of an epoch, drawn anew by a generator that is part of the data position
    generator = torch.Generator().manual_seed(5)
    start = 0
    with pipe:
        loaded = checkpoint.load(folder / "checkpoints", pipe, optimizer)
        if loaded is not None:
            start = loaded.step
            generator.set_state(loaded.extra["generator"])
        for step in range(start, steps):
            if step == dies_before:
                os.kill(os.getpid(), signal.SIGKILL)
            position = order[int(torch.randint(1000, (), generator=generator))]
            noise = random.random()  # Python's random numbers go on, too: the same on this rank as without a break
            (loss,) = train(pipe, optimizer, range(position, position + 1))
            if loss is not None:
                with open(folder / "losses", "a") as log:
                    log.write(f"{step} {loss.hex()} {noise.hex()}\n")
            if save_every and (step + 1) % save_every == 0:
                checkpoint.save(folder / "checkpoints", step + 1, pipe, optimizer, {"generator": generator.get_state()})
        optimizer.validate()
    dist.destroy_process_group()


def logged(folder: Path) -> list[tuple[str, ...]]:
    log = folder / "losses"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [tuple(line.split()) for line in lines if line.endswith("\n")]


def run_whole(folder: Path, steps: int) -> None:
    """A run that nothing ends, in two processes forked from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks = [context.Process(target=run_rank, args=(rank, folder, steps), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0, 0]


@pytest.mark.dist
def test_torchrun_restarts_after_a_kill(tmp_path: Path) -> None:
    """One rank dies by kill -9, all start again and load the checkpoint."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    run_whole(whole, 8)
    attempts = restarted(run_elastic, parts, 8, 3, (0, 5))
    assert attempts == {0: 1, 1: 1}, "nothing was started again"
    found = logged(parts)
    assert set(found) == set(logged(whole))
    steps = [int(step) for step, *_ in found]
    assert steps[-5:] == [3, 4, 5, 6, 7], "the second attempt was to go on from step 3"
    assert steps[:-5] in ([0, 1, 2, 3], [0, 1, 2, 3, 4])  # the other rank may end before it logs step 4
