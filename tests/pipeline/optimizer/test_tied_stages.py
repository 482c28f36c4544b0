"""Norms, clipping and skipping where an embedding is the head, too, or a stage has little to train: as in one process."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.tensor_parallel import (
    BLOCKS,
    MAX_NORM,
    STEEP,
    OneProcess,
    Trained,
    apart,
    batch,
    chunk,
    layers,
    loss_fn,
    make_optimizer,
    parallelize,
    tie,
    values,
)
from zbkern.pipeline import Optimizer, Pipeline, clip_grad_norm_, grad_norm, schedules

pytestmark = pytest.mark.dist

STEPS = range(6)
EMBEDDING, HEAD = "0.weight", f"{BLOCKS + 1}.vocabulary.weight"


class Declared(nn.Sequential):
    """Chunks that say themselves which weight is tied, as those of `cut` do: also once it has become a DTensor."""

    @property
    def tied_parameters(self) -> dict[str, Tensor]:
        return {"embedding": p for name, p in self.named_parameters() if name in (EMBEDDING, HEAD)}


class Stages(Trained):
    """Two stages of two ranks each, tensor-parallel or replicas of one batch, whose first and last weight are tied."""

    def __init__(self, schedule: str, kind: str, **options: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "other"))
        self.group, other = mesh.get_group("stage"), mesh["other"]
        plan = getattr(schedules, schedule)(2, 4)
        count = len(plan.placement)
        self.mine = {index: chunk(index, count) for index in plan.chunks_of(mesh["stage"].get_local_rank())}
        if count - 1 in self.mine:
            self.mine[count - 1][-1].vocabulary.load_state_dict(layers(range(1))[0].state_dict())
        if kind != "tensor":
            tie(self.mine, count)
        modules: list[nn.Module] = []
        for index, module in self.mine.items():
            zbkern.convert(module)
            module.__class__ = Declared
            if kind == "tensor":
                parallelize(module, other, sequence=False)
            elif kind == "fsdp":
                for part in (*module, module):
                    fully_shard(part, mesh=other, reshard_after_forward=False)
            elif kind == "ddp":
                self.mine[index] = module
                module = nn.parallel.DistributedDataParallel(module, process_group=other.get_group())
            modules.append(module)
        if kind == "tensor":
            tie(self.mine, count)
        self.pipe = Pipeline(modules, plan, loss_fn, self.group, timeout=60)
        self.first, self.last = 0 in self.mine, count - 1 in self.mine
        self.optimizer = Optimizer(make_optimizer([*self.mine.values()]), self.pipe, max_norm=MAX_NORM, **options)

    def gradients(self, step: int) -> float | None:
        inputs, targets = batch(step)
        self.optimizer.zero_grad()
        loss = self.pipe.step(inputs if self.first else None, targets if self.last else None)
        return None if loss is None else loss.item()

    def named(self) -> dict[str, Tensor]:
        return {name: p for module in self.mine.values() for name, p in module.named_parameters(remove_duplicate=False)}


@functools.cache
def one_process() -> tuple[list[float], list[float], dict[str, Tensor]]:
    plain = OneProcess(tied=True)
    return *plain.train(STEPS), plain.named()


def trained(schedule: str, kind: str, options: dict[str, Any]) -> tuple[Any, ...]:
    ours = Stages(schedule, kind, **options)
    with ours.pipe:
        losses, norms = ours.train(STEPS)
        weights = values(ours.named())
        ours.gradients(STEEP[0])
        parameters = ours.named().values()
        found = [grad_norm(parameters, group) for group in (ours.pipe, ours.group, ours.pipe.transport)]
        found.append(clip_grad_norm_(parameters, 1.0, ours.group))
        found.append(grad_norm(parameters, ours.pipe))
    return losses, norms, weights, ours.optimizer.clipped, found


@pytest.mark.parametrize(
    ("schedule", "kind", "options"),
    [
        ("zb_v", "fsdp", {}),
        ("zb_h1", "fsdp", {"adaptive": False}),
        pytest.param("zb_v", "tensor", {"undo": None}, marks=pytest.mark.slow),
        pytest.param("zb_v", "tensor", {"undo": "inverse"}, marks=pytest.mark.slow),
        pytest.param("zb_h1", "ddp", {"undo": None}, marks=pytest.mark.slow),
        pytest.param("zb_v", "ddp", {"adaptive": False}, marks=pytest.mark.slow),
    ],
)
def test_a_tied_weight_counts_once(four_ranks: Any, schedule: str, kind: str, options: dict[str, Any]) -> None:
    losses, norms, weights = one_process()
    clipped = sum(norm > MAX_NORM for norm in norms)
    assert 0 < clipped < len(STEPS)
    plain = OneProcess(tied=True)
    plain.model.load_state_dict({name: p.detach() for name, p in weights.items()})
    plain.gradients(STEEP[0])
    expected = plain.clip()
    for found, found_norms, found_weights, times, more in four_ranks.run(trained, schedule, kind, options):
        assert found in ([None] * len(STEPS), pytest.approx(losses, rel=1e-11))
        assert found_norms == pytest.approx(norms, rel=1e-11)
        far = apart(found_weights, weights)
        assert max(far.values()) < 1e-10, far
        assert times == clipped
        assert more == pytest.approx([*[expected] * 4, 1.0], rel=1e-6)


_ = math
