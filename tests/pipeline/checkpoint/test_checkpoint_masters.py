"""Checkpoints of the fp32 masters of an Optimizer: bit for bit, and with other stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support.checkpointed import (
    LAYERS,
    MICROBATCHES,
    assert_same,
    chunks,
    layers,
    plain_run,
    state_by_name,
    train,
)
from zbkern.pipeline import Optimizer, Pipeline, checkpoint, schedules


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


@pytest.mark.parametrize("inner", [sgd, adamw])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_go_on_bit_for_bit(tmp_path: Path, inner: Any, dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Sequential, Any]:
        module = layers(0, 2).to(dtype)
        return module, Optimizer(inner(module), max_norm=0.1, master_weights=True)

    module, optimizer = make()
    plain_run(module, optimizer, range(3))
    path = checkpoint.save(tmp_path, 3, module, optimizer)
    keys = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = [name for name, _ in module.named_parameters()] if dtype != torch.float32 else []
    assert {key for key in keys if "master" in key} == {f"master.{name}" for name in names}
    expected = plain_run(module, optimizer, range(3, 7))
    module, optimizer = make()
    plain_run(module, optimizer, range(10, 11))
    assert checkpoint.load(tmp_path, module, optimizer).step == 3
    assert plain_run(module, optimizer, range(3, 7)) == expected


def build_small(name: str) -> tuple[dict[int, nn.Sequential], Pipeline, Optimizer]:
    schedule = getattr(schedules, name)(2, MICROBATCHES)
    mine = {chunk: module.bfloat16() for chunk, module in chunks(schedule.placement, dist.get_rank()).items()}
    pipe = Pipeline(list(mine.values()), schedule, lambda y, target: (y.float() - target).square().mean(), timeout=30)
    parameters = [p for module in mine.values() for p in module.parameters()]
    return mine, pipe, Optimizer(torch.optim.AdamW(parameters, lr=0.01), pipe, max_norm=0.15, master_weights=True)


def small_on_two(folder: Path, name: str, save: bool) -> dict[str, Any]:
    modules, pipe, optimizer = build_small(name)
    with pipe:
        train(pipe, optimizer, range(3) if save else range(20, 21), torch.bfloat16)
        checkpoint.save(folder, 3, pipe, optimizer) if save else checkpoint.load(folder, pipe, optimizer)
        return state_by_name(list(modules.values()), optimizer)


@pytest.mark.dist
def test_masters_load_with_other_stages(two_ranks: Any, tmp_path: Path) -> None:
    saved = two_ranks.run(small_on_two, tmp_path, "zb_h1", True)
    expected = {**saved[0], **saved[1]}
    assert expected["layer0.0.weight/master"].dtype == torch.float32
    assert torch.equal(expected["layer0.0.weight/master"].bfloat16(), expected["layer0.0.weight"])
    loaded = two_ranks.run(small_on_two, tmp_path, "zb_v", False)
    assert_same({**loaded[0], **loaded[1]}, expected)
    whole = layers(0, LAYERS).bfloat16()
    optimizer = Optimizer(torch.optim.AdamW(whole.parameters()), master_weights=True)
    checkpoint.load(tmp_path, whole, optimizer)
    assert_same(state_by_name([whole], optimizer), expected)
