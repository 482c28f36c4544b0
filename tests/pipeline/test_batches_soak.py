"""Many batches, each with a plan of its own: what a process holds of the system stays what it was."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import zbkern
from tests.support.small_models import DECODERS, config_of, transformers
from zbkern.pipeline import Costs, Optimizer, Pipeline, PlannedBatches, cut, schedules, token_loss
from zbkern.planning.planner import native

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(native.core is None, reason="the planner's search is not compiled"),
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc"),
]

STEPS, WARM_UP, SEQUENCES, LONGEST = 60, 30, 6, 60


class Held(NamedTuple):
    """By a process: open files, sockets among them, threads, and resident bytes."""

    files: int
    threads: int
    nbytes: int


def held() -> Held:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * os.sysconf("SC_PAGE_SIZE")
    )


def soak() -> tuple[list[Held], int]:
    """What this process holds after some steps and after all, and how many schedules differed."""
    generator = random.Random(0)
    dataset = [
        [generator.randrange(61) for _ in range(round(LONGEST ** generator.random()))] for _ in range(STEPS * SEQUENCES)
    ]
    name, sizes = DECODERS["llama"]
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(name, {**sizes, "max_position_embeddings": LONGEST})
    )
    placed = schedules.zb_v(2, 2)
    chunks = [*map(zbkern.convert, cut(model, placed, rank=dist.get_rank()))]
    costs = Costs(2.5, 4.0, 1.0, attention_forward=1.0, attention_backward=2.5, overhead=0.1, tokens=60)
    found, seen = [], set()
    with Pipeline(chunks, placed, token_loss) as pipe:
        parameters = torch.nn.ModuleList(chunks).parameters()
        optimizer = Optimizer(torch.optim.SGD(parameters, lr=1e-3), pipe, max_norm=1.0)
        for number, batch in enumerate(PlannedBatches(dataset, costs, 2, sequences=SEQUENCES, multiple=8)):
            optimizer.zero_grad()
            pipe.step(batch.inputs, batch.targets, batch.side, schedule=batch.plan.schedule)
            optimizer.step()
            seen.add(batch.plan.schedule.checksum)
            if number + 1 in (WARM_UP, STEPS):
                found.append(held())
    return found, len(seen)


def test_files_threads_and_memory_stay(fresh_ranks: Any) -> None:
    for (before, after), different in fresh_ranks.run(soak, timeout=1000):
        assert different > 0.9 * STEPS
        assert after.files <= before.files
        assert after.threads <= before.threads
        assert after.nbytes < before.nbytes + 4e6
