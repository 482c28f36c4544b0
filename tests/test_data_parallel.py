"""Deferred W under DistributedDataParallel and FSDP2, on two gloo ranks, against one process with the whole batch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from zbkern import testing
from zbkern.data_parallel import ShardedReduction

pytestmark = pytest.mark.dist


class Net(nn.Module):
    """Plain parameters, converted layers, and one layer used twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = x + block(x)
        return x


class Reused(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).sin())


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return {"plain": Net, "reused": Reused}[kind]().double()


def data(steps: int, microbatches: int) -> Tensor:
    return torch.randn(steps, microbatches, 2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step_alone(model: nn.Module, microbatches: Tensor) -> None:
    """The mean over both ranks' data."""
    for batch in microbatches:
        (sum(model(part).square().mean() for part in batch) / 2).backward()


def train(model: nn.Module, alone: nn.Module, step: Callable[[Tensor], None]) -> None:
    """Three steps of plain SGD, whose gradients are those of one process."""
    for microbatches in data(3, 2):
        for each in (model, alone):
            each.zero_grad()
        step(microbatches)
        step_alone(alone, microbatches)
        for (name, p), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            testing.assert_close(getattr(p.grad, "full_tensor", lambda p=p: p.grad)(), other.grad, name)
        for each in (model, alone):
            torch.optim.SGD(each.parameters(), 0.1).step()


def ddp_steps(kind: str, mode: str, options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    model, alone = make(kind), make(kind)
    zbkern.convert(model)
    if mode == "compiled":
        model.compile(backend="aot_eager")
    bucket = 1 if mode == "compiled" else 0.0005  # the compiler refuses buckets below the first one's 1 MiB
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket, **options)
    queue = zbkern.WGradQueue()

    def step(microbatches: Tensor) -> None:
        first, second = microbatches[:, rank]
        deferred = 0
        if mode in ("one key", "compiled"):  # both microbatches in one forward: one backward, one reduction
            loss = ddp(torch.stack([first, second])).square().mean() * 2
            with queue.defer():
                loss.backward()
            deferred = queue.run()
        elif mode == "no_sync":  # the first accumulates locally; its W runs before the second's forward
            with ddp.no_sync(), queue.defer("local"):
                ddp(first).square().mean().backward()
            deferred = queue.run("local")
            loss = ddp(second).square().mean()
            with queue.defer("reduced"):
                loss.backward()
            deferred += queue.run()
        else:  # nobody defers, though a queue exists
            with ddp.no_sync():
                ddp(first).square().mean().backward()
            ddp(second).square().mean().backward()
        assert (deferred > 0) == (mode in ("one key", "no_sync") and not options)

    train(model, alone, step)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *itertools.product(["plain", "reused"], ["one key", "no_sync", "not deferred"]),
        pytest.param("reused", "compiled", marks=pytest.mark.slow),
    ],
)
def test_ddp(two_ranks: Any, kind: str, mode: str) -> None:
    two_ranks.run(ddp_steps, kind, mode, {})


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_ddp_that_reads_the_graph_is_right_but_not_deferred(two_ranks: Any, options: dict[str, Any]) -> None:
    two_ranks.run(ddp_steps, "plain", "one key", options)


def ddp_order() -> list[str]:
    """The order of bucket reductions and W launches of one step."""
    model = make("plain")
    ddp = nn.parallel.DistributedDataParallel(zbkern.convert(model), bucket_cap_mb=0.0005)
    events: list[str] = []

    def hook(state, bucket):  # unannotated: DDP wants the types themselves, not their names
        events.append("reduce")
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    ddp.register_comm_hook(None, hook)
    queue = zbkern.WGradQueue()
    queue.listeners.append(lambda tasks: events.append("W"))
    for _ in range(2):  # DDP rebuilds its buckets after the first
        events.clear()
        loss = ddp(data(1, 1)[0, 0, 0]).square().mean()
        with queue.defer():
            loss.backward()
        events.append("B ends")
        queue.run()
    return events


def test_ddp_reduces_buckets_while_other_w_still_run(two_ranks: Any) -> None:
    events, _ = two_ranks.run(ddp_order)
    assert events.index("reduce") < len(events) - 1 - events[::-1].index("W")
    assert events.index("B ends") < events.index("W")
    assert events.count("reduce") > 2


def fsdp_steps(kind: str, order: str, reshard: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model, alone = make(kind), make(kind)
    for module in (*zbkern.convert(model).blocks, model):
        fully_shard(module, reshard_after_forward=reshard)
    queue = zbkern.WGradQueue()
    reduction = ShardedReduction(model, queue)

    def step(microbatches: Tensor) -> None:
        for key, batch in enumerate(microbatches[:, dist.get_rank()]):
            loss = model(batch).square().mean()
            with queue.defer(key):
                loss.backward()
            if order == "at once":
                queue.run(key)
        for key in (1, 0) if order == "reversed" else ():
            queue.run(key)
        queue.run()
        reduction.finish()

    train(model, alone, step)
    queue.listeners.clear()


@pytest.mark.parametrize("order", ["at once", "merged", "reversed"])
@pytest.mark.parametrize(("kind", "reshard"), [("plain", True), ("plain", False), ("reused", False)])
def test_fsdp2(two_ranks: Any, kind: str, order: str, reshard: bool) -> None:
    two_ranks.run(fsdp_steps, kind, order, reshard)


def forgotten_run() -> list[str]:
    from torch.distributed.fsdp import fully_shard

    model, other = zbkern.convert(make("plain")), nn.Linear(2, 2)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    queue = zbkern.WGradQueue()
    with queue.defer():
        model(data(1, 1)[0][0][dist.get_rank()]).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.optim.SGD(other.parameters(), 0.1).step()
        optimizer.step()
    queue.discard()
    return [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]


def test_a_step_of_shards_while_w_of_what_was_gathered_waits_is_a_warning(two_ranks: Any) -> None:
    for messages in two_ranks.run(forgotten_run):
        assert len(messages) == 1
        assert "W of its parameters still wait in a WGradQueue" in messages[0]


def fsdp_order() -> list[str]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    model = zbkern.convert(make("plain"))
    for module in (*model.blocks, model):
        fully_shard(module)
    queue, events, real = zbkern.WGradQueue(), [], groups.foreach_reduce
    ShardedReduction(model, queue)
    queue.listeners.insert(0, lambda tasks: events.append("W"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "foreach_reduce", lambda *a, **options: (events.append("reduce"), real(*a, **options))[1])
        loss = model(data(1, 1)[0, 0, 0]).square().mean()
        with queue.defer():
            loss.backward()
        events.append("B ends")
        queue.run()
    return events


def test_fsdp2_reduces_groups_while_other_w_still_run(two_ranks: Any) -> None:
    events, _ = two_ranks.run(fsdp_order)
    after = events[events.index("B ends") :]
    assert "reduce" in after
    assert after.index("reduce") < len(after) - 1 - after[::-1].index("W")
