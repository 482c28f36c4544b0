"""States that leave the device between steps: their memory goes, what was there comes back, and views stay views."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zbkern
from tests.support.chunks import make_data, make_model, needed, one_rank, run_pipelines
from tests.support.parallel_stages import Stages
from zbkern import schedules
from zbkern.pipeline import Optimizer, Pipeline, checkpoint
from zbkern.pipeline.transport.local import LocalTransport


def optimizer_of(pipe: Pipeline, **options: Any) -> Optimizer:
    parameters = [p for module in pipe.modules.values() for p in module.parameters()]
    first = torch.optim.SGD([p for p in parameters if p.dim() == 2], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([p for p in parameters if p.dim() < 2], lr=0.01)
    return Optimizer([(first, 3.0), (second, None)], pipe, adaptive=False, **options)


def memory_of(optimizer: Optimizer) -> list[StorageWeakRef]:
    """Of moments, masters, gradients and snapshots."""
    found: list[Tensor] = [tensor for state in optimizer.state.values() for tensor in state.values()]
    found += [master for _, master in optimizer.masters]
    found += [p.grad for p in optimizer._model_parameters() if p.grad is not None]
    found += [copy for part in optimizer._parts for copy in getattr(part.undo, "_copies", ())]
    assert len(found) > 12
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in found]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_memory_of_states_goes(dtype: torch.dtype) -> None:
    """What is computed then: test_differential.py."""
    inputs, targets = (part.to(dtype) for part in make_data(4))

    def train(pipe: Pipeline) -> None:
        optimizer = optimizer_of(pipe, master_weights=dtype == torch.bfloat16)
        for step in range(3):
            pipe.step(*needed(pipe, inputs, targets))
            optimizer.step()
            optimizer.validate()
            memory = memory_of(optimizer)
            optimizer.offload_states()
            gc.collect()
            assert all(reference.expired() for reference in memory)
            optimizer.offload_states()  # they are away already
            pipe.evaluate(*needed(pipe, inputs, targets))
            if step == 1:
                optimizer.reload_states()
                assert len(memory_of(optimizer)) == len(memory)

    chunks = [zbkern.convert(module.to(dtype)) for module in make_model(4)]
    run_pipelines(schedules.zb_v(2, 4), chunks, train)


def test_gradients_are_added_to_those_that_were_away(tmp_path: Path) -> None:
    """A checkpoint is saved meanwhile."""
    (module,) = make_model(1)
    schedule, (inputs, targets) = schedules.zb_h1(1, 4), make_data(4)
    with one_rank(zbkern.convert(module), schedule) as pipe:
        optimizer = optimizer_of(pipe)
        pipe.step(inputs, targets)
        once = [p.grad.clone() for p in module.parameters()]
        optimizer.offload_states()
        checkpoint.save(tmp_path, 1, pipe, optimizer)
        pipe.step(inputs, targets)
        torch.testing.assert_close([p.grad for p in module.parameters()], [2 * gradient for gradient in once])


def test_a_flat_buffer_stays() -> None:
    weights, flat = [nn.Parameter(torch.ones(2)) for _ in range(3)], torch.ones(4)
    for weight, view in zip(weights, flat.split(2), strict=False):
        weight.main_grad = view  # type: ignore[attr-defined]
    weights[2].main_grad = torch.ones(2)  # type: ignore[attr-defined]
    optimizer = Optimizer(torch.optim.SGD(weights, lr=1.0), LocalTransport.ring(1)[0])
    places = [weight.main_grad.data_ptr() for weight in weights]  # type: ignore[attr-defined]
    optimizer.offload_states()
    stayed = [w.main_grad.data_ptr() == place for w, place in zip(weights, places, strict=True)]  # type: ignore[attr-defined]
    assert stayed == [True, True, False]


def away_under_fsdp() -> None:
    """What is computed then: test_parallel_differential.py."""
    ours = Stages("fsdp", (2, 2, "zb_v"))
    parameters, optimizer = [*ours.named().values()], ours.optimizer
    with ours.pipe:
        for step in range(3):
            ours.gradients(step)
            optimizer.step()
            optimizer.validate()
            tensors = [p.grad for p in parameters] + [optimizer.state[p]["exp_avg"] for p in parameters]
            memory = [StorageWeakRef(tensor._local_tensor.untyped_storage()) for tensor in tensors]
            del tensors
            optimizer.offload_states()
            gc.collect()
            assert all(reference.expired() for reference in memory)


@pytest.mark.dist
def test_the_memory_of_shards_goes(four_ranks: Any) -> None:
    four_ranks.run(away_under_fsdp)
