"""add_loss where random cases cannot follow it: outside of a pipeline, compiled, in a loss function, on shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss

from tests.support.chunks import one_rank
from zbkern import testing
from zbkern.pipeline import add_loss, check_slices, schedules
from zbkern.pipeline.auxiliary_losses import _thread

WIDTH, TOKENS = 6, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.added: list[Tensor] | None = None

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.added is None:
            return x + add_loss(y, y.square().mean(), "activity")
        self.added.append(y.square().mean())
        return x + y


def both() -> tuple[Block, Block]:
    """One that adds its losses to a list is the second."""
    torch.manual_seed(0)
    block = Block().double()
    plain = copy.deepcopy(block)
    plain.added = []
    return block, plain


def backward(plain: Block, inputs: Any, targets: Any) -> None:
    for x, y in zip(inputs, targets, strict=True):
        ((mse_loss(plain(x), y) + plain.added.pop()) / len(inputs)).backward()


def test_check_slices_takes_modules_that_add_losses() -> None:
    check_slices(both()[0], torch.randn(2, TOKENS, WIDTH).double(), (5, 3))


@pytest.mark.parametrize("slices", [1, 2])
def test_a_loss_function_can_add_one_too(slices: int) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(add_loss(output, output.abs().mean()), target)

    _, block = both()
    plain, (inputs, targets) = copy.deepcopy(block), torch.randn(2, 4, TOKENS, WIDTH).double()
    output = plain(inputs)
    (mse_loss(output, targets) + output.abs().mean()).backward()
    with one_rank([block], schedules.zb_h1(1, 4, slices=slices), loss_fn) as pipe:
        pipe.step(inputs, targets)
        assert pipe.last.auxiliary_losses() == pytest.approx({"auxiliary": output.abs().mean().item()}, rel=1e-12)
    testing.assert_same_gradients(block, plain, 1e-12)


def test_forward_leaves_those_of_the_last_step() -> None:
    block, _ = both()
    inputs, targets = torch.randn(2, 4, TOKENS, WIDTH).double()
    with one_rank([block], schedules.zb_h1(1, 4), mse_loss) as pipe:
        pipe.step(inputs, targets)
        of_step = pipe.last.auxiliary_losses()
        pipe.forward(2 * inputs)
        assert pipe.last.auxiliary_losses() == of_step
        pipe.evaluate(2 * inputs, targets)
        assert pipe.last.auxiliary_losses() != of_step


def test_compiled_modules_weigh_every_step_anew() -> None:
    block, plain = both()
    inputs, targets = torch.randn(2, 4, TOKENS, WIDTH).double()
    with one_rank([block], lambda count: schedules.zb_h1(1, count), mse_loss) as pipe:
        block.compile(backend="aot_eager")
        for count in (4, 2):
            block.zero_grad()
            plain.zero_grad()
            pipe.step([*inputs.chunk(count)], [*targets.chunk(count)])
            backward(plain, inputs.chunk(count), targets.chunk(count))
            testing.assert_same_gradients(block, plain, 1e-12)


def test_outside_of_a_pipeline_it_counts_once() -> None:
    block, plain = both()
    x, y = torch.randn(2, 3, TOKENS, WIDTH).double()
    mse_loss(block(x), y).backward()
    backward(plain, [x], [y])
    testing.assert_same_gradients(block, plain, 1e-12)
    assert _thread.running is None


def of_shards() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, weight = torch.randn(4, WIDTH).double(), torch.randn(WIDTH, WIDTH).double().requires_grad_()
    hidden = x @ weight
    (hidden.sum() + hidden.square().mean()).backward()
    shared = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()]))
    hidden = distribute_tensor(x, mesh, [Shard(0)]) @ shared
    add_loss(hidden, hidden.square().mean()).sum().backward()
    torch.testing.assert_close(shared.grad.full_tensor(), weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.dist
def test_the_loss_of_shards_is_that_of_the_whole(two_ranks: Any) -> None:
    two_ranks.run(of_shards)
