"""Checkpoints of a pipeline whose last optimizer step is not validated yet, with its Optimizer or without."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import make_data, make_model, results_on_threads
from zbkern.pipeline import Optimizer, Pipeline, PipelineError, checkpoint, schedules
from zbkern.pipeline.transport.local import LocalTransport

Call = Callable[[Path, Pipeline, Optimizer | None], object]


def rename(chunk: int, key: str) -> str:
    return f"{chunk}.{key}"


def weights_after(call: Call, folder: Path, given: bool) -> list[tuple[dict[str, Tensor], ...]]:
    """By rank: the weights at first, after `call`, and once the step is validated that was pending before it.

    The first rank has stepped, and will hear from the second that the step is skipped.
    """

    def rank_calls(transport: LocalTransport) -> tuple[dict[str, Tensor], ...]:
        module = zbkern.convert(make_model(2)[transport.rank])
        with Pipeline(module, schedules.zb_h2(2, 4), nn.functional.mse_loss, transport, timeout=60) as pipe:
            optimizer = Optimizer(torch.optim.SGD(module.parameters(), lr=0.1), pipe, max_norm=1e6)
            checkpoint.save(folder, 0, pipe, rename=rename)
            found = [copy.deepcopy(module.state_dict())]
            pipe.step(*make_data(4))
            if transport.rank == 1:
                module.linear.weight.grad.fill_(math.nan)
            optimizer.step()
            assert (optimizer._boundary.state != "validated") == (transport.rank == 0)
            call(folder, pipe, optimizer if given else None)
            found.append(copy.deepcopy(module.state_dict()))
            optimizer.validate()
            return *found, module.state_dict()

    return results_on_threads(2, rank_calls)


def load(folder: Path, pipe: Pipeline, optimizer: Optimizer | None) -> None:
    checkpoint.load(folder, pipe, rename=rename)
    for module in pipe.modules.values():
        with torch.no_grad():
            module.linear.weight.add_(1)  # seen if the step is undone after all


@pytest.mark.parametrize("given", [False, True])
def test_a_save_waits_for_the_global_check(tmp_path: Path, given: bool) -> None:
    def save(folder: Path, pipe: Pipeline, optimizer: Optimizer | None) -> None:
        checkpoint.save(folder, 1, pipe, optimizer, rename=rename)

    for first, saved, validated in weights_after(save, tmp_path, given):
        torch.testing.assert_close(saved, validated, rtol=0, atol=0)
        torch.testing.assert_close(saved, first, rtol=0, atol=0)


def test_a_load_gives_up_the_step(tmp_path: Path) -> None:
    for first, loaded, validated in weights_after(load, tmp_path, given=False):
        torch.testing.assert_close(loaded, validated, rtol=0, atol=0)
        first["linear.weight"] += 1
        torch.testing.assert_close(loaded, first, rtol=0, atol=0)


def test_ranks_that_are_threads_write_one_checkpoint(tmp_path: Path) -> None:
    model, again = make_model(2), make_model(2)
    nn.init.zeros_(again[1].linear.weight)

    def rank_calls(transport: LocalTransport) -> None:
        mine, other = model[transport.rank], again[transport.rank]
        with Pipeline(mine, schedules.zb_h2(2, 4), nn.functional.mse_loss, transport, timeout=60) as pipe:
            for step in range(3):
                checkpoint.save(tmp_path, step, pipe, rename=rename)
            if transport.rank == 1:
                with pytest.raises(TypeError, match="extra must be"):
                    checkpoint.save(tmp_path, 4, pipe, extra=object(), rename=rename)
            else:
                with pytest.raises(PipelineError, match=r"rank 1: TypeError: .*extra must be"):
                    checkpoint.save(tmp_path, 4, pipe, rename=rename)
        with Pipeline(other, schedules.zb_h2(2, 4), nn.functional.mse_loss, rings[transport.rank], timeout=60) as pipe:
            assert checkpoint.load(tmp_path, pipe, rename=rename) == (2, None)

    rings = LocalTransport.ring(2)
    results_on_threads(2, rank_calls)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    torch.testing.assert_close(nn.ModuleList(again).state_dict(), nn.ModuleList(model).state_dict(), rtol=0, atol=0)


def test_masters_take_the_weights_of_a_model_that_is_loaded_alone(tmp_path: Path) -> None:
    """betas of 0 have no memory of gradients."""

    def make() -> tuple[nn.Module, Pipeline, Optimizer]:
        module = zbkern.convert(nn.Linear(4, 4, dtype=torch.bfloat16))
        pipe = Pipeline(module, schedules.gpipe(1, 1), squared, LocalTransport.ring(1)[0])
        inner = torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.0, 0.0))
        return module, pipe, Optimizer(inner, pipe, master_weights=True)

    def squared(output: Any, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def train(pipe: Pipeline, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        pipe.step(data, data)
        optimizer.step()

    data = torch.ones(2, 4, dtype=torch.bfloat16)
    module, pipe, optimizer = make()
    checkpoint.save(tmp_path, 1, module)
    other, other_pipe, other_optimizer = make()
    train(other_pipe, other_optimizer)  # from here masters are in the state, too
    checkpoint.load(tmp_path, other_pipe)
    for one, stepping in ((pipe, optimizer), (other_pipe, other_optimizer)):
        train(one, stepping)
    torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)
