from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.pipeline.chunks import WIDTH
from zbkern.pipeline import Pipeline, schedules


def tied_step(main_grad: bool) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    table, middle = nn.Embedding(7, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
    tokens = torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(2))

    class Unembed(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return zbkern.functional.linear(x, self.weight)

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    whole = copy.deepcopy(nn.Sequential(table, middle, Unembed(table.weight)))
    for part in (tokens, tokens + (tokens < 6)):  # gradients add up over steps
        loss_fn(whole(part), part).backward()
    if main_grad:
        table.weight.main_grad = torch.zeros_like(table.weight)
    module = nn.Sequential(table, middle) if rank == 0 else Unembed(table.weight)
    with Pipeline(zbkern.convert(module), schedules.zb_h1(2, 4), loss_fn, tied={"table": table.weight}) as pipe:
        for part in (tokens, tokens + (tokens < 6)):
            pipe.step(part if rank == 0 else None, part if rank == 1 else None)
    found = table.weight.main_grad if main_grad else table.weight.grad
    torch.testing.assert_close(found, whole[0].weight.grad)


@pytest.mark.dist
@pytest.mark.parametrize("main_grad", [False, True])
def test_tied_weights_of_two_ranks_get_the_sum(two_ranks: Any, main_grad: bool) -> None:
    two_ranks.run(tied_step, main_grad)


def tied_and_different() -> list[str]:
    """What the log says of copies that are equal, that differ, and of one without memory."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zbkern").addHandler(handler)
    rank = torch.distributed.get_rank()
    for values in (torch.ones(3), torch.ones(3) + rank, torch.ones(3, device="meta" if rank else "cpu")):
        schedule = schedules.zb_h1(2, 2)
        Pipeline(nn.Linear(2, 2), schedule, nn.functional.mse_loss, tied={"table": nn.Parameter(values)}).close()
    logging.getLogger("zbkern").removeHandler(handler)
    return said


@pytest.mark.dist
def test_tied_copies_that_differ_are_told(two_ranks: Any) -> None:
    (warning,), nothing = two_ranks.run(tied_and_different)
    assert warning.startswith("Pipeline: the copies of tied 'table' differ between ranks [0, 1]")
    assert nothing == []


def frozen_step() -> tuple[bool, float]:
    """Whether a frozen copy got a gradient, and how far a step with weight decay moved it."""
    torch.manual_seed(0)
    module = zbkern.convert(nn.Linear(3, 3))
    table = module.table = nn.Parameter(torch.ones(3), requires_grad=False)
    with Pipeline(module, schedules.zb_h1(2, 2), nn.functional.mse_loss, tied={"table": table}) as pipe:
        pipe.step(torch.ones(2, 3), torch.ones(2, 3))
        torch.optim.AdamW(module.parameters(), weight_decay=0.5).step()
    return table.grad is not None, (table - 1).abs().max().item()


@pytest.mark.dist
def test_a_frozen_tied_weight_stays_as_it_is(two_ranks: Any) -> None:
    assert two_ranks.run(frozen_step) == [(False, 0.0)] * 2


def tied_on_the_outer_ranks() -> list[list[float]]:
    """The gradients of two pipelines, one after the other, whose first and last rank hold one weight."""
    rank, found = torch.distributed.get_rank(), []
    schedule = schedules.zb_h1(4, 4)
    x = torch.ones(4, WIDTH)
    for _ in range(2):
        torch.manual_seed(0)
        layer = zbkern.convert(nn.Linear(WIDTH, WIDTH, bias=False))
        tied = {"weight": layer.weight} if rank in (0, 3) else None
        with Pipeline(layer, schedule, nn.functional.mse_loss, tied=tied, timeout=60) as pipe:
            pipe.step(x if rank == 0 else None, x if rank == 3 else None)
        found.append(layer.weight.grad.flatten().tolist())
    return found


@pytest.mark.dist
def test_ranks_with_and_without_tied_weights_meet_again(four_ranks: Any) -> None:
    """torch.distributed.new_group would give the second pipeline's groups one name on some ranks, another on others."""
    results = four_ranks.run(tied_on_the_outer_ranks)
    for first, second in results:
        assert first == second
    assert results[0] == results[3]
    assert results[0] != results[1]
