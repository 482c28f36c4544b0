"""Norms, clipping, skipping where an embedding is the head, or a stage has little to train: as in one process."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support import tensor_parallel
from tests.support.meshes import named_mesh
from tests.support.tensor_parallel import (
    BLOCKS,
    MAX_NORM,
    OneProcess,
    TrainedStages,
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
from zbkern.pipeline import Optimizer, Pipeline, schedules

pytestmark = pytest.mark.dist

STEPS = range(6)
EMBEDDING, HEAD = "0.weight", f"{BLOCKS + 1}.vocabulary.weight"


class Declared(nn.Sequential):
    """Chunks that say themselves which weight is tied, as those of `cut` do: also once it has become a DTensor."""

    @property
    def tied_parameters(self) -> dict[str, Tensor]:
        named = dict(self.named_parameters(remove_duplicate=False))
        found = [named[name] for name in (EMBEDDING, HEAD) if name in named]
        return {"embedding": found[0]} if found else {}


class Stages(TrainedStages):
    """Two stages of two ranks each, tensor-parallel or replicas of one batch, whose first and last weight are tied."""

    def __init__(self, schedule: str, kind: str, **options: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = named_mesh(stage=2, other=2)
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


@functools.cache
def one_process() -> tuple[list[float], list[float], dict[str, Tensor]]:
    plain = OneProcess(tied=True)
    return *plain.train(STEPS), plain.named()


def trained(schedule: str, kind: str, options: dict[str, Any]) -> tuple[Any, ...]:
    ours = Stages(schedule, kind, **options)
    with ours.pipe:
        losses, norms = ours.train(STEPS)
        weights = values(ours.named())
    return losses, norms, weights, ours.optimizer.clipped


@pytest.mark.parametrize(
    ("schedule", "kind", "options"),
    [
        ("zb_v", "fsdp", {}),
        pytest.param("zb_h1", "fsdp", {"adaptive": False}, marks=pytest.mark.slow),
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
    for found, found_norms, found_weights, times in four_ranks.run(trained, schedule, kind, options):
        assert found in ([None] * len(STEPS), pytest.approx(losses, rel=1e-11))
        assert found_norms == pytest.approx(norms, rel=1e-11)
        far = apart(found_weights, weights)
        assert max(far.values()) < 1e-10, far
        assert times == clipped


FIRST, LAST = tuple(f"{index}." for index in range(2)), tuple(f"{index}." for index in range(2, BLOCKS + 2))
NAN = 2  # the step in which a microbatch's loss is none, while the others' gradients are to be clipped


def poisoned(output: Tensor, target: Tensor) -> Tensor:
    return tensor_parallel.loss_fn(output, target) * (math.nan if target[0, -1] < 0 else 1)


def poisoned_batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(step)
    if step == NAN:
        targets[:, -1], targets[0, -1] = 100, -1
    return inputs, targets


def freeze(named: dict[str, Tensor], names: tuple[str, ...]) -> None:
    for name, parameter in named.items():
        parameter.requires_grad_(not name.startswith(names))


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": parameters}], lr=1e-2, eps=1e-4)  # which may be none


def partly_frozen(
    schedule: str, kind: str, names: tuple[str, ...], listed: bool, max_norm: float | None
) -> tuple[Any, ...]:
    """listed: the optimizer has frozen parameters, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "loss_fn", poisoned)
        patch.setattr(tensor_parallel, "batch", poisoned_batch)
        ours = Stages(schedule, kind)
        ours.pipe.detach()
        freeze(ours.named(), names)
        parameters = [p for p in dict.fromkeys(ours.named().values()) if listed or p.requires_grad]
        ours.optimizer = Optimizer(adamw(parameters), ours.pipe, max_norm=max_norm, adaptive=False)
        with ours.pipe:
            _, norms = ours.train(STEPS)
    return norms, values(ours.named()), ours.optimizer.skipped


@pytest.mark.parametrize(
    ("schedule", "kind", "names", "listed", "max_norm"),
    [
        ("zb_h1", "tensor", (*FIRST, HEAD), False, MAX_NORM),
        pytest.param("zb_v", "tensor", (EMBEDDING, HEAD), True, MAX_NORM, marks=pytest.mark.slow),
        pytest.param("zb_v", "tensor", (), True, math.inf, marks=pytest.mark.slow),
        pytest.param("zb_h1", "fsdp", (EMBEDDING, HEAD), False, None, marks=pytest.mark.slow),
        pytest.param("zb_h1", "tensor", (*LAST, EMBEDDING), True, MAX_NORM, marks=pytest.mark.slow),
        pytest.param("zb_v", "fsdp", (*FIRST, HEAD), True, MAX_NORM, marks=pytest.mark.slow),
        pytest.param("zb_h1", "fsdp", (*LAST, EMBEDDING), False, MAX_NORM, marks=pytest.mark.slow),
    ],
)
def test_what_is_frozen_and_a_step_that_is_skipped(
    four_ranks: Any, schedule: str, kind: str, names: tuple[str, ...], listed: bool, max_norm: float | None
) -> None:
    plain, norms = OneProcess(tied=True), []
    freeze(plain.named(), names)
    trainable = [parameter for parameter in plain.model.parameters() if parameter.requires_grad]
    optimizer = adamw(trainable)
    for step in STEPS:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss_fn(plain.model(inputs), targets).backward()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in trainable])
        norms.append(norm.item())
        if step != NAN:
            nn.utils.clip_grads_with_norm_(trainable, max_norm or math.inf, norm.float())
            optimizer.step()
    assert any(norm > MAX_NORM for norm in norms[NAN + 1 :])
    for found, weights, skipped in four_ranks.run(partly_frozen, schedule, kind, names, listed, max_norm):
        assert not math.isfinite(found[NAN])
        assert skipped == 1
        del found[NAN]
        assert found == pytest.approx([norm for step, norm in enumerate(norms) if step != NAN], rel=1e-11)
        far = apart(weights, plain.named())
        assert max(far.values()) < 1e-10, far
