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
from tests.support.ranks import named_mesh
from tests.support.schedules import is_valid, random_rows, with_neighbours_beside
from tests.support.seeds import seed
from zbkern.pipeline import Pipeline, Schedule, schedules
from zbkern.wgrad.queue import thread

pytestmark = pytest.mark.dist


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

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


class Case:
    """The same for all ranks of a mesh, from a seed. tokens: of each microbatch and expert rank, some of them none."""

    def __init__(self, rng: random.Random, ranks: int) -> None:
        self.stages = rng.choice([each for each in (1, 2, 4) if ranks % each == 0 and each < ranks])
        self.experts = ranks // self.stages
        while True:
            name = rng.choice([*schedules.NAMES, "dualpipe_v", "dualpipe_v"])
            published = getattr(schedules, name)(self.stages, rng.randint(1, 6))
            rows, placement, self.microbatches = random_rows(rng, published)
            if rng.random() < 0.3:
                self.schedule = published
                self.microbatches = published.microbatches
                break
            if is_valid(rows, placement, self.microbatches):
                self.schedule = Schedule.build(rows, placement, self.microbatches)
                break
        self.schedule = self.schedule if self.schedule.beside else with_neighbours_beside(rng, self.schedule)
        self.checkpointed = [rng.random() < 0.3 for _ in self.schedule.placement]
        self.frozen = {number for number in range(len(self.schedule.placement)) if rng.random() < 0.15}
        self.wgrads = rng.choice([0, 0, 1, 3])
        self.tokens = [[rng.choice([0, 1, 3, 5]) for _ in range(self.experts)] for _ in range(self.microbatches)]
        self.tokens[0][0] = max(1, self.tokens[0][0])

    def chunk(self, number: int, mesh: Any) -> Layer:
        layer = Layer(number, mesh, self.checkpointed[number])
        if number in self.frozen:
            layer.linear.requires_grad_(False)
        return layer

    def batch(self, expert_rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(expert_rank)
        counts = [each[expert_rank] for each in self.tokens]
        return [torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) for count in counts]


def loss(y: Tensor, _: Tensor) -> Tensor:
    return y.square().sum()


def worst_difference(chosen: int, number: int) -> tuple[float, int]:
    """Of any gradient of this rank from that in one process, relative to its largest; and how many turns there were."""
    import torch.distributed as dist

    case = Case(random.Random(f"{chosen} {number}"), dist.get_world_size())
    mesh = named_mesh(stage=case.stages, expert=case.experts)
    expert_rank, turns = mesh["expert"].get_local_rank(), 0
    mine = {each: case.chunk(each, mesh["expert"]) for each in case.schedule.chunks_of(mesh["stage"].get_local_rank())}

    class Counting(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            nonlocal turns
            turns += thread.give_way is not None
            return self.module(x)

    group: Any = mesh.get_group("stage")
    with Pipeline([Counting(each) for each in mine.values()], case.schedule, loss, group, timeout=60) as pipe:
        pipe.queue.wgrads_per_collective = case.wgrads
        for _ in range(2):
            for layer in mine.values():
                layer.zero_grad()
            pipe.step(case.batch(expert_rank), case.batch(expert_rank))
    alone = named_mesh(rank=dist.get_world_size(), alone=1)["alone"]
    model = nn.Sequential(*(case.chunk(each, alone) for each in range(len(case.schedule.placement))))
    for rank in range(case.experts):
        for x in case.batch(rank):
            (loss(model(x), x) / case.microbatches).backward()
    worst = 0.0
    for each, layer in mine.items():
        whole = dict(model[each].named_parameters())
        for name, parameter in layer.named_parameters():
            expected, gradient = whole[name].grad, parameter.grad
            if not parameter.requires_grad:
                assert gradient is None
                continue
            assert expected is not None
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            if ".experts." in f".{name}":
                if name.startswith("experts.experts."):
                    expected = expected.chunk(case.experts)[expert_rank]
                else:
                    dist.all_reduce(gradient, group=mesh.get_group("expert"))
            else:
                dist.all_reduce(gradient, group=mesh.get_group("expert"))
            worst = max(worst, ((gradient - expected).abs().max() / whole[name].grad.abs().max()).item())
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
def test_more_of_two_and_four_ranks(two_ranks: Any, four_ranks: Any) -> None:
    check(two_ranks, seed(1), 60)
    check(four_ranks, seed(2), 140)
