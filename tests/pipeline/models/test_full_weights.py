"""full_weights: every rank has the whole model by name, as `export` writes it, a layer at a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbkern
from tests.support.chunks import on_threads, results_on_threads
from tests.support.cut_models import assert_equal, written
from tests.support.ranks import named_mesh
from tests.support.small_models import batch, make
from zbkern import schedules
from zbkern.pipeline import Optimizer, Pipeline, cut, export, full_weights, token_loss, token_targets


def step_of(pipe: Pipeline, chunks: list[nn.Module], microbatches: int) -> Optimizer:
    """A step that is not validated yet, and that ranks before the last take back."""
    parameters = nn.ModuleList(chunks).parameters()
    optimizer = Optimizer(torch.optim.SGD(parameters, lr=0.5), pipe, max_norm=1.0, adaptive=False)
    tokens, mask, labels = batch()
    pipe.step({"input_ids": tokens, "attention_mask": mask}, token_targets(labels, microbatches))
    optimizer.step()
    return optimizer


def test_a_rank_that_reads_slowly_holds_two_layers() -> None:
    schedule, taken = schedules.zb_h1(2, 4), []

    def rank(transport: Any) -> int:
        chunks = cut(make("gpt2"), schedule, rank=transport.rank)
        most, read = 0, 0
        with Pipeline(chunks, schedule, token_loss, transport, timeout=60) as pipe:
            send = transport.send

            def counted(peer: int, tag: Any, message: Any) -> None:
                taken.extend(message if isinstance(message, dict) else ())
                send(peer, tag, message)

            transport.send = counted
            for _ in full_weights(pipe):
                read += 1
                if transport.rank == 1 and read < 20:  # while the first rank's layers come
                    while not most and len(taken) <= read:
                        time.sleep(0.001)
                    time.sleep(0.005)
                    most = max(most, len(taken) - read)
        return most

    of_a_layer = 12
    assert 0 < results_on_threads(2, rank)[1] <= 2 * of_a_layer


def test_what_fails_on_one_rank_is_told_to_all() -> None:
    schedule = schedules.zb_h1(2, 4)

    def rank(transport: Any) -> None:
        chunks = cut(make("gpt2"), schedule, rank=transport.rank)
        with Pipeline(chunks, schedule, token_loss, transport, timeout=60) as pipe:
            if transport.rank == 1:
                chunks[0].more = nn.Linear(2, 2)
            for _ in full_weights(pipe):
                pass

    for error in on_threads(2, rank):
        assert "rank 1" in str(error)
        assert "export: chunks must have the tensors of the model that was cut" in str(error)
    with pytest.raises(TypeError, match="full_weights: pipe must be a Pipeline of chunks that cut has made; got list"):
        next(full_weights([]))


def of_shards(folder: str) -> None:
    """Two replicas by FSDP2 of two stages."""
    from torch.distributed.fsdp import fully_shard

    mesh = named_mesh(replica=2, stage=2)
    schedule = schedules.zb_v(2, 4)
    chunks = [zbkern.convert(chunk) for chunk in cut(make("llama"), schedule, rank=mesh["stage"].get_local_rank())]
    for chunk in chunks:
        fully_shard(chunk, mesh=mesh["replica"])
    group = mesh.get_group("stage")
    with Pipeline(chunks, schedule, token_loss, group, timeout=60) as pipe:
        optimizer = step_of(pipe, chunks, 4)
        found = {name: tensor.clone() for name, tensor in full_weights(pipe)}
        assert optimizer.clipped == 1
        export(folder, chunks)
    dist.barrier()
    assert_equal(found, written(Path(folder)))


@pytest.mark.dist
def test_shards_come_as_whole_tensors(four_ranks: Any, tmp_path: Path) -> None:
    four_ranks.run(of_shards, str(tmp_path))
