"""add_loss: losses that modules add where they are, against one process that adds them to its loss, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import zbkern
from tests.support.chunks import one_rank, run_pipelines
from tests.support.own_slices import all_forwards_first
from tests.support.saving import saved_in_turn, with_actions
from tests.support.two_by_two import Setup, assert_close, batch, make_model
from zbkern.pipeline import Pipeline, Schedule, StepOptions, add_loss, check_slices, schedules
from zbkern.pipeline.auxiliary_losses import _running

WIDTH, TOKENS = 6, 8


class Block(nn.Module):
    """Adds a loss, which is a mean over tokens, and another one inside of a reentrant checkpoint."""

    checkpoints = True

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

    def penalty(self, x: Tensor) -> Tensor:
        return self.gate(x).logsumexp(-1).square().mean() / 10

    def part(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return add_loss(y, y.square().mean(), "activity")

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        x = add_loss(x, self.penalty(x), "penalty")
        x = x if x.requires_grad else x.clone().requires_grad_()
        return x + (checkpoint(self.part, x, use_reentrant=True) if self.checkpoints else self.part(x))


class PlainBlock(Block):
    """The same, whose losses are in a list."""

    losses: dict[str, list[Tensor]]

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.losses["penalty"].append(self.penalty(x))
        self.losses["activity"].append(y.square().mean())
        return x + y


def make(count: int) -> list[Block]:
    torch.manual_seed(0)
    return [Block().double() for _ in range(count)]


def one_process(
    blocks: Sequence[nn.Module], inputs: Sequence[Tensor], targets: Sequence[Tensor], by_tokens: bool = False
) -> dict[str, float]:
    """The losses of plain torch by name, "" for the model's own, and the gradients in the blocks."""
    found = dict.fromkeys(("", "penalty", "activity"), 0.0)
    for x, y in zip(inputs, targets, strict=True):
        losses: dict[str, list[Tensor]] = {"penalty": [], "activity": []}
        for block in blocks:
            block.__class__, block.losses = PlainBlock, losses  # type: ignore[assignment]
            x = block(x)
        losses[""] = [mse_loss(x, y)]
        share = x.shape[1] / sum(each.shape[1] for each in inputs) if by_tokens else 1 / len(inputs)
        means = {name: sum(values) * (share if name else 1 / len(inputs)) for name, values in losses.items()}
        sum(means.values()).backward()
        found = {name: found[name] + means[name].item() for name in found}
    return found


def check(schedule: Schedule, lengths: Sequence[int] | None = None, **options: Any) -> None:
    """A step and an evaluation. lengths: of the sequences."""
    blocks = make(len(schedule.placement))
    plain = copy.deepcopy(blocks)
    lengths = lengths or [TOKENS] * schedule.microbatches
    inputs, targets = ([torch.randn(2, each, WIDTH).double() for each in lengths] for _ in range(2))
    expected = one_process(plain, inputs, targets, by_tokens=bool(schedule.own_slices))

    def run(pipe: Pipeline) -> None:
        for call in (pipe.step, pipe.evaluate):
            loss = call(inputs, targets)
            found = pipe.auxiliary_losses() | {"": expected[""] if loss is None else loss.item()}
            assert found == pytest.approx(expected, rel=1e-12)
        pipe.forward(inputs)
        assert pipe.auxiliary_losses() | {"": expected[""]} == pytest.approx(expected, rel=1e-12)

    run_pipelines(schedule, [zbkern.convert(block) for block in blocks], run, mse_loss, **options)
    for block, other in zip(blocks, plain, strict=True):
        for (name, parameter), reference in zip(block.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "one_f_one_b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("slices", [1, (3, 1)], ids=str)
def test_losses_and_gradients_are_those_of_one_process(name: str, slices: Any) -> None:
    check(getattr(schedules, name)(2, 4, slices=slices))


def test_each_microbatch_counts_once_where_its_forward_runs_twice() -> None:
    schedule = with_actions(schedules.zb_v(2, 4), saved_in_turn("recomputed", None, "copied"))
    check(schedule)
    check(schedule, options=StepOptions(recompute=("linear", "gate")))
    check(with_actions(schedules.zb_v(2, 2, slices=(3, 1)), saved_in_turn("recomputed")))


def test_sequences_with_slices_of_their_own_count_by_their_tokens() -> None:
    own = [(1, 3), (5,), (2, 2, 3)]  # packs are as the second
    check(all_forwards_first(own, (0, 1, 1, 0), split=True), lengths=[sum(each) for each in own])


def test_check_slices_takes_modules_that_add_losses() -> None:
    check_slices(make(1)[0], torch.randn(2, TOKENS, WIDTH).double(), (5, 3))


def test_a_loss_function_can_add_one_too() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH).double()

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = copy.deepcopy(linear)

        def forward(self, x: Tensor, carry: Any = None) -> Tensor:
            return self.linear(x)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(add_loss(output, output.abs().mean()), target)

    inputs, targets = torch.randn(2, 4, TOKENS, WIDTH).double()
    output = linear(inputs)
    (mse_loss(output, targets) + output.abs().mean()).backward()
    for slices in (1, 2):
        chunk = Sliced()
        with one_rank([chunk], schedules.zb_h1(1, 4, slices=slices), loss_fn) as pipe:
            pipe.step(inputs, targets)
            assert pipe.auxiliary_losses() == pytest.approx({"auxiliary": output.abs().mean().item()}, rel=1e-12)
        torch.testing.assert_close(chunk.linear.weight.grad, linear.weight.grad, rtol=1e-12, atol=1e-14)


def test_compiled_modules_weigh_every_step_anew() -> None:
    (block,) = make(1)
    (plain,) = copy.deepcopy([block])
    inputs, targets = torch.randn(2, 4, TOKENS, WIDTH).double()
    block.checkpoints = False
    with one_rank([block], lambda count: schedules.zb_h1(1, count), mse_loss) as pipe:
        block.compile(backend="aot_eager")
        for count in (4, 2):
            block.zero_grad()
            pipe.step([*inputs.chunk(count)], [*targets.chunk(count)])
            plain.zero_grad()
            one_process([plain], inputs.chunk(count), targets.chunk(count))
            for parameter, reference in zip(block.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-12, atol=1e-14)


def test_outside_of_a_pipeline_it_counts_once() -> None:
    (block,) = make(1)
    (plain,) = copy.deepcopy([block])
    x, y = torch.randn(2, 3, TOKENS, WIDTH).double()
    mse_loss(block(x), y).backward()
    one_process([plain], [x], [y])
    for parameter, reference in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-12, atol=1e-14)
    assert _running.losses is None


def test_what_is_no_loss_is_refused() -> None:
    x = torch.randn(3)
    with pytest.raises(TypeError, match="activation must be a tensor of floating-point numbers; got tuple"):
        add_loss((x,), x.sum())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"value must be a floating-point tensor with its graph; got float"):
        add_loss(x, x.sum().item())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"value must be one number, such as .mean\(\) gives; got shape \[3\]"):
        add_loss(x, x)


# ---- several ranks


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


def of_replicas(kind: str) -> None:
    setup = Setup(kind, "zb_v")
    for module in setup.plain:
        module[0].register_forward_hook(lambda _, inputs, output: add_loss(output, output.square().mean(), "size"))
    model, sizes = make_model(len(setup.schedule.placement)), [0.0, 0.0]
    for replica in range(2):
        inputs, targets = batch(0, replica)
        for chunk in model:
            inputs = chunk[0](inputs)
            sizes[replica] += inputs.square().mean()
            inputs = chunk[1](inputs)
        ((mse_loss(inputs, targets) + sizes[replica]) / 2).backward()
    with setup.pipe() as pipe:
        pipe.step(*setup.data(0))
        assert pipe.auxiliary_losses() == pytest.approx({"size": float(sizes[setup.replica].detach())}, rel=1e-12)
    expected = {f"{chunk}.{name}": p.grad for chunk, part in enumerate(model) for name, p in part.named_parameters()}
    assert_close(setup.named(lambda p: p.grad), expected, kind, rtol=1e-12, atol=1e-14)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_replicas_average_it_as_they_do_the_loss(kind: str, four_ranks: Any) -> None:
    four_ranks.run(of_replicas, kind)
