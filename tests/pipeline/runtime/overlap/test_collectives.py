"""Collectives of modules that know nothing of passes beside them: where they wait, the rank goes on with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from zbkern.pipeline import overlap_collectives
from zbkern.wgrad.queue import thread

pytestmark = pytest.mark.dist


def all_kinds() -> dict[str, tuple[int, bool]]:
    """By what was called: how often the rank went on, and whether the result is that of the group itself."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    plain: Any = dist.group.WORLD
    overlapped = overlap_collectives()
    assert overlap_collectives(overlapped) is overlap_collectives() is overlapped
    x = torch.arange(4.0) + 10 * dist.get_rank()

    def into(call: Callable[..., Any], size: int) -> Callable[[Any], Tensor]:
        def result(group: Any) -> Tensor:
            y = torch.zeros(size)
            call(y, x, group=group)
            return y

        return result

    def later(group: Any) -> Tensor:
        y, before = torch.zeros(4), counted()
        work = dist.all_to_all_single(y, x, group=group, async_op=True)
        assert counted() == before  # what is started ahead of time stops nobody
        work.wait()
        work.wait()
        assert work.is_completed()
        return y

    def in_place(group: Any) -> Tensor:
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    def of_autograd(group: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        y = functional.all_to_all_single_autograd(leaf, [2, 2], [2, 2], group)
        y.square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def sharded(group: Any) -> Tensor:
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for part in (*net, net):
            fully_shard(part, mesh=mesh)
        net(x).square().sum().backward()
        return torch.cat([p.grad.full_tensor().flatten() for p in net.parameters()])

    def distributed(group: Any) -> Tensor:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("plain" if group is plain else "named",))
        leaf = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        y = torch.sin(leaf.redistribute(placements=[Replicate()])).redistribute(placements=[Shard(0)])
        y.to_local().square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad.to_local()

    calls: dict[str, Callable[[Any], Tensor]] = {
        "all to all": into(dist.all_to_all_single, 4),
        "all gather": into(dist.all_gather_into_tensor, 8),
        "reduce scatter": into(dist.reduce_scatter_tensor, 2),
        "all reduce": in_place,
        "waited for later": later,
        "functional": lambda group: functional.all_to_all_single(x, None, None, group) + 0,
        "functional, in a graph": of_autograd,
        "FSDP2": sharded,
        "DTensor": distributed,
    }
    count = [0]

    def counted() -> int:
        return count[0]

    def give_way() -> None:
        count[0] += 1

    distributed(plain)  # what torch then knows of the other mesh
    found = {}
    for name, call in calls.items():
        count[0], thread.give_way = 0, give_way
        try:
            mine = call(overlapped)
        finally:
            thread.give_way = None
        found[name] = counted(), bool(torch.equal(mine, call(plain)))
    return found


def test_every_kind_of_call_lets_the_rank_go_on_and_changes_nothing(two_ranks: Any) -> None:
    for found in two_ranks.run(all_kinds):
        assert all(same for _, same in found.values()), found
        once = ("all to all", "all gather", "reduce scatter", "all reduce", "waited for later", "functional")
        assert {name: found[name][0] for name in once} == dict.fromkeys(once, 1)
        assert found["functional, in a graph"][0] == 2  # there and back
        assert found["FSDP2"][0] >= 4
        assert found["DTensor"][0] >= 2  # there and back


def w_during() -> tuple[list[str], int]:
    import torch.distributed as dist

    group, events = overlap_collectives(), []
    queue = zbkern.WGradQueue(merge=False, wgrads_per_collective=1)
    queue.listeners.append(lambda tasks: events.append("W"))
    layer = zbkern.nn.Linear(4, 4)
    with queue.defer(0):
        layer(torch.ones(2, 4)).sum().backward()
        layer(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(torch.ones(1), group=group)
        events.append("waited")
    left = queue.pending()
    queue.run()
    return events[:2], left


def test_w_runs_meanwhile(two_ranks: Any) -> None:
    assert two_ranks.run(w_during) == [(["W", "waited"], 1)] * 2
