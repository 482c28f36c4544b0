"""W while a collective of B is in flight, and inputs that W gathers again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
from torch import Tensor, nn

import zbkern
from bench.tensor_parallel import Block, sequence_styles
from tests.support.needs import OLD_TORCH
from tests.support.ranks import cpu_mesh
from tests.support.sharded_model import TOKENS, WIDTH, whole

NEW_NAMES = hasattr(torch.distributed._functional_collectives, "all_gather_single")
GATHER, REDUCE = (
    ("all_gather_single", "reduce_scatter_single") if NEW_NAMES else ("all_gather_tensor", "reduce_scatter_tensor")
)


def sequence_linear(mesh: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A norm and two linears of its output under sequence parallelism; and this rank's part of a [batch, tokens, K]."""
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(0)
    model = zbkern.convert(Block(WIDTH).double())
    return parallelize_module(model, mesh, sequence_styles()), lambda x: x.chunk(mesh.size(), 1)[mesh.get_local_rank()]


def order_rank(batch: int, wgrads_per_collective: int) -> tuple[list[str], int, list[Tensor]]:
    """What happened in B of the second microbatch, how many W waited after it, and the gradients in the end."""
    import torch.distributed._functional_collectives as collectives

    model, part = sequence_linear(cpu_mesh())
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 2, batch, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    events: list[str] = []
    queue = zbkern.WGradQueue(merge=False, wgrads_per_collective=wgrads_per_collective)
    queue.listeners.append(lambda tasks: events.append("W"))

    def recorded(name: str, event: str) -> Callable[..., Any]:
        original = getattr(collectives, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return original(*args, **kwargs)

        return call

    names = {GATHER: "gather", REDUCE: "reduce", "wait_tensor": "wait"}
    for key in range(2):
        with queue.defer(key):
            y = model.mlp(model.norm(part(x[key]).requires_grad_()))
            with pytest.MonkeyPatch.context() as patch:
                for name, event in names.items():
                    patch.setattr(collectives, name, recorded(name, event))
                events.clear()
                y.backward(part(dy[key]))
    in_b, waiting = list(events), queue.pending()
    queue.run()
    return in_b, waiting, [whole(p.grad) for p in model.parameters()]


@pytest.mark.dist
@pytest.mark.skipif(OLD_TORCH, reason="this torch waits for the gather where it starts it")
def test_w_runs_between_the_start_of_a_collective_and_the_wait(two_ranks: Any) -> None:
    for rank in range(2):
        events, waiting, covered = two_ranks.run(order_rank, 1, 1)[rank]
        assert events == ["gather", "W", "wait", "reduce", "W", "wait"]
        assert waiting == 6 - 1 - 2  # one in the first microbatch: before its first collective nothing was pending
        uncovered_events, uncovered_waiting, expected = two_ranks.run(order_rank, 1, 0)[rank]
        assert "W" not in uncovered_events
        assert uncovered_waiting == 6
        assert all(torch.equal(a, b) for a, b in zip(covered, expected, strict=True))


def gather_rank(regather_inputs: bool, tokens: int) -> tuple[int, int, list[str], list[Tensor]]:
    """Bytes that autograd keeps of x between F and B, bytes that W hold, collectives of W, and the gradients. What was
    not kept has no second derivative."""
    import torch.distributed._functional_collectives as collectives

    model, part = sequence_linear(cpu_mesh())
    x, dy = torch.randn(2, 2, tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    queue, events = zbkern.WGradQueue(regather_inputs=regather_inputs), []
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = part(x).detach().clone().requires_grad_()
    for key in range(2):
        with queue.defer(key):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = model.mlp(model.norm(own))
            y.backward(part(dy))
        if key == 0:
            from_f_to_b, held = sum(kept.values()), queue.bytes
    with pytest.MonkeyPatch.context() as patch:
        original = getattr(collectives, GATHER)
        patch.setattr(collectives, GATHER, lambda *a, **k: (events.append("gather"), original(*a, **k))[1])
        queue.run()
    if regather_inputs:
        with queue.defer(), pytest.raises(RuntimeError, match="regather_inputs=False"):
            torch.autograd.grad(model.mlp(model.norm(own)).sum(), own, create_graph=True)
    return from_f_to_b, held, events, [own.grad, *(whole(p.grad) for p in model.parameters())]


@pytest.mark.dist
@pytest.mark.parametrize("tokens", [4, 6])
def test_w_gathers_its_input_again(two_ranks: Any, tokens: int) -> None:
    kept, again = (two_ranks.run(gather_rank, choice, tokens) for choice in (False, True))
    saved = 2 * tokens * WIDTH * 8 // 2  # of float64: the other rank's half, shared by gate and up
    for (f_kept, w_kept, none, expected), (f_again, w_again, gathers, found) in zip(kept, again, strict=True):
        assert f_kept - f_again == saved
        assert w_kept - w_again == saved
        assert not none
        assert gathers == ["gather"] * 4  # gate and up of two microbatches
        for a, b in zip(found, expected, strict=True):
            assert float((a - b).abs().max()) <= 1e-12 * float(b.abs().max())
