"""Random pipelines of expert-parallel stages whose passes run beside each other, against one process, in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbkern
from tests.support.expert_parallel import WIDTH, block
from tests.support.ranks import Ranks, named_mesh
from tests.support.schedules import random_schedule, sliced_schedule, with_neighbours_beside
from tests.support.seeds import seed
from zbkern.pipeline import Optimizer, Pipeline, schedules
from zbkern.wgrad.queue import thread

pytestmark = pytest.mark.dist
STEPS, RATE = 3, 0.01
POISONED = 1  # the step of a trained case that is undone


class Layer(nn.Module):
    """A norm, a linear and experts; checkpointed: run again in B, whose all-to-alls are then B's."""

    def __init__(self, number: int, mesh: Any, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm, self.linear = nn.RMSNorm(WIDTH).double(), zbkern.nn.Linear(WIDTH, WIDTH).double()
        self.experts = block(mesh.size(), mesh.get_local_rank(), mesh.get_group(), seed=number)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return x + self.experts(torch.tanh(self.linear(self.norm(x))))

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


class Case:
    """The same for all ranks of a mesh, from a seed. rows: of each microbatch and expert rank, some of them none.

    A row is a token, or with slices a sequence. trained: the optimizer's steps do not wait, and one of them is undone.
    """

    def __init__(self, rng: random.Random, ranks: int) -> None:
        self.experts = rng.choice([each for each in (2, 4) if ranks % each == 0 and ranks // each <= 4])
        self.stages = ranks // self.experts
        name = rng.choice([*schedules.NAMES, "dualpipe_v", "dualpipe_v"])
        self.schedule = getattr(schedules, name)(self.stages, rng.randint(1, 6))
        draw = rng.choice([None, random_schedule, random_schedule, sliced_schedule])
        if draw is not None:
            self.schedule = draw(rng, self.schedule.placement)
        self.schedule = self.schedule if self.schedule.beside else with_neighbours_beside(rng, self.schedule)
        self.microbatches, self.trained = self.schedule.microbatches, rng.random() < 0.4
        self.checkpointed = [rng.random() < 0.3 for _ in self.schedule.placement]
        self.frozen = {number for number in range(len(self.schedule.placement)) if rng.random() < 0.15}
        self.wgrads = rng.choice([0, 0, 1, 3, "eager"])
        self.rows = [[rng.choice([0, 1, 3, 5]) for _ in range(self.experts)] for _ in range(self.microbatches)]
        self.rows[0][0] = max(1, self.rows[0][0])

    def chunk(self, number: int, mesh: Any) -> Layer:
        layer = Layer(number, mesh, self.checkpointed[number])
        if number in self.frozen:
            layer.linear.requires_grad_(False)
        return layer

    def batch(self, expert_rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(expert_rank)
        found = []
        for number, rows in enumerate(self.rows):
            own = self.schedule.own_slices
            length = () if not self.schedule.is_sliced else (sum(own[number]) if own else 6,)
            found.append(torch.randn(rows[expert_rank], *length, WIDTH, generator=generator, dtype=torch.float64))
        return found


def loss(y: Tensor, _: Tensor) -> Tensor:
    return y.square().sum()


loss.reduction = "sum"  # type: ignore[attr-defined]


def worst_difference(chosen: int, number: int) -> tuple[float, int]:
    """Of any gradient, or trained weight, of this rank from that in one process, relative to its largest; and how many
    passes ran beside others."""
    import torch.distributed as dist

    case = Case(random.Random(f"{chosen} {number}"), dist.get_world_size())
    mesh = named_mesh(stage=case.stages, expert=case.experts)
    expert_rank, turns = mesh["expert"].get_local_rank(), 0
    mine = {each: case.chunk(each, mesh["expert"]) for each in case.schedule.chunks_of(mesh["stage"].get_local_rank())}

    class Counting(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor, carry: Any = None) -> Tensor:
            nonlocal turns
            turns += thread.give_way is not None
            return self.module(x) if carry is None else self.module(x, carry=carry)

    def own(name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter, or gradient, of the whole model."""
        return whole.chunk(case.experts)[expert_rank] if name.startswith("experts.experts.") else whole

    group: Any = mesh.get_group("stage")
    modules = nn.ModuleList(Counting(each) for each in mine.values())
    with Pipeline([*modules], case.schedule, loss, group, timeout=60) as pipe:
        pipe.queue.wgrads_per_collective = case.wgrads
        trained = [p for p in modules.parameters() if p.requires_grad]
        optimizer = Optimizer(torch.optim.SGD(trained, RATE), pipe, max_norm=1e9) if case.trained else None
        for step in range(STEPS if case.trained else 2):
            modules.zero_grad()
            pipe.step(case.batch(expert_rank), case.batch(expert_rank))
            for name, parameter in modules.named_parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    if ".experts.experts." not in name:
                        dist.all_reduce(parameter.grad, group=mesh.get_group("expert"))
            if optimizer is not None:
                if step == POISONED and 0 in mine:
                    mine[0].norm.weight.grad[0] = float("nan")
                optimizer.step()
        if optimizer is not None:
            optimizer.validate()
            assert optimizer.skipped == 1
    alone = named_mesh(rank=dist.get_world_size(), alone=1)["alone"]
    model = nn.Sequential(*(case.chunk(each, alone) for each in range(len(case.schedule.placement))))
    for _ in range(STEPS - 1 if case.trained else 1):
        model.zero_grad()
        for rank in range(case.experts):
            for x in case.batch(rank):
                (loss(model(x), x) / case.microbatches).backward()
        if case.trained:
            torch.optim.SGD(model.parameters(), RATE).step()
    worst = 0.0
    for each, layer in mine.items():
        whole = dict(model[each].named_parameters())
        for name, parameter in layer.named_parameters():
            expected = whole[name].detach() if case.trained else whole[name].grad
            found = parameter.detach() if case.trained else parameter.grad
            if not parameter.requires_grad:
                assert parameter.grad is None
                continue
            difference = (found - own(name, expected)).abs().max()
            worst = max(worst, (difference / expected.abs().max()).item())
    return worst, turns


def check(ranks: Any, chosen: int, count: int) -> None:
    turns = 0
    for number in range(count):
        found = ranks.run(worst_difference, chosen, number)
        assert max(worst for worst, _ in found) < 1e-12, f"ZBKERN_SEED={chosen}, number {number}: {found}"
        turns += sum(each for _, each in found)
    assert turns > count


def test_random_expert_parallel_pipelines_equal_one_process(four_ranks: Any) -> None:
    check(four_ranks, seed(0), 6)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [(2, 6), (6, 2), (8, 2)])
def test_those_of_two_six_and_eight_ranks(size: int, count: int) -> None:
    ranks = Ranks(size)
    try:
        check(ranks, seed(size), count)
    finally:
        ranks.close()
