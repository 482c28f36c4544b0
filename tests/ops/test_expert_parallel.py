"""Experts spread over ranks: equal to one process with all experts; W covers the all-to-alls of B."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.expert_parallel import block
from tests.support.needs import OLD_TORCH
from tests.support.ranks import cpu_mesh

WIDTH, HIDDEN, EXPERTS, TOP_K = 8, 12, 4, 2
TOKENS = {"even": [6] * 4, "uneven": [5, 9, 1, 3], "none on rank 0": [0, 7, 4, 2], "none at all": [0] * 4}


def tokens(case: str, ranks: int) -> list[Tensor]:
    """Those of every rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, count, WIDTH, dtype=torch.float64, generator=generator) for count in TOKENS[case][:ranks]]


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 2, WIDTH, dtype=torch.float64)).square().sum()


def one_group() -> Any:
    """A group of this process alone."""
    rank = torch.distributed.get_rank()
    return [torch.distributed.new_group([each]) for each in range(torch.distributed.get_world_size())][rank]


def block_rank(case: str) -> tuple[int, list[float], list[float]]:
    """W that waited, largest differences of outputs, of gradients and of a penalty's, and the largest values."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    alone, own = block(1, 0, one_group()), block(ranks, rank)
    xs = [x.requires_grad_() for x in tokens(case, ranks)]
    x = xs[rank].detach().clone().requires_grad_()
    expected = [alone(each) for each in xs]
    for y in expected:
        loss_of(y).backward()
    queue = zbkern.WGradQueue()
    with queue.defer():
        y = own(x)
        loss_of(y).backward()
    waiting = queue.pending()
    assert all(p.grad is None for p in own.experts.parameters())
    queue.run()
    for parameter in own.router.parameters():
        torch.distributed.all_reduce(parameter.grad)  # as under data parallelism
    share = EXPERTS // ranks
    mine = slice(rank * share, (rank + 1) * share)
    pairs = [(y, expected[rank]), (x.grad, xs[rank].grad), (own.router.weight.grad, alone.router.weight.grad)]
    experts = zip(own.experts.parameters(), alone.experts.parameters(), strict=True)
    pairs += [(ours.grad, theirs.grad[mine]) for ours, theirs in experts]
    for module, inputs in ((own, [x]), (alone, xs)):
        module.zero_grad()
        for each in inputs:
            (slope,) = torch.autograd.grad(loss_of(module(each)), each, create_graph=True)
            each.grad = None
            slope.square().sum().backward()
    pairs.append((x.grad, xs[rank].grad))
    return (
        waiting,
        [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs],
        [float(b.abs().max()) if b.numel() else 0.0 for _, b in pairs],
    )


def check(answers: list[Any]) -> None:
    for waiting, found, largest in answers:
        assert waiting >= 2  # experts and router
        assert len(found) == 8
        assert all(a <= 1e-10 * max(b, 1.0) for a, b in zip(found, largest, strict=True)), found


@pytest.mark.dist
@pytest.mark.parametrize("case", TOKENS)
def test_two_ranks_equal_one_process(two_ranks: Any, case: str) -> None:
    check(two_ranks.run(block_rank, case))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("case", TOKENS)
def test_four_ranks_equal_one_process(four_ranks: Any, case: str) -> None:
    check(four_ranks.run(block_rank, case))


def order_rank(wgrads_per_collective: int) -> tuple[list[str], list[Tensor]]:
    """What happened in F and B of the last of two layers' microbatches, and the gradients in the end."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = nn.Sequential(block(ranks, rank), block(ranks, rank))
    x, events = tokens("uneven", ranks)[rank].requires_grad_(), []
    queue = zbkern.WGradQueue(merge=False)
    queue.listeners.append(lambda tasks: events.append("W"))
    original = dist.all_to_all_single

    class Recorded:
        def __init__(self, work: Any) -> None:
            self.wait, self.is_completed = lambda: (events.append("wait"), work.wait()), work.is_completed

    def recorded(*args: Any, **kwargs: Any) -> Any:
        events.append("start")
        return Recorded(original(*args, **kwargs))

    for key in range(4):
        queue.wgrads_per_collective = wgrads_per_collective if key == 3 else 0
        with queue.defer(key), pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", recorded)
            events.clear()
            loss_of(layers(x * (key + 1))).backward()
    found = list(events)
    queue.run()
    return found, [p.grad for p in layers.parameters()]


@pytest.mark.dist
def test_w_runs_between_the_start_of_an_all_to_all_and_the_wait(two_ranks: Any) -> None:
    covered, plain = (two_ranks.run(order_rank, count) for count in (1, 0))
    for (events, gradients), (uncovered, expected) in zip(covered, plain, strict=True):
        assert events == ["start", "W", "wait"] * 10  # F exchanges counts, too
        assert uncovered == ["start", "wait"] * 10
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_one_process_and_given_routing() -> None:
    own = block(1, 0)
    x = tokens("even", 1)[0]
    scores, chosen = own.router(x).topk(TOP_K)
    given = zbkern.nn.ExpertParallel(own.experts)
    torch.testing.assert_close(given(x, (chosen, scores.softmax(-1))), own(x), rtol=0, atol=0)
    expected = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate_up = x @ own.experts.gate_up_proj[expert].T + own.experts.gate_up_proj_bias[expert]
        gate, up = gate_up.chunk(2, -1)
        y = (nn.functional.silu(gate) * up) @ own.experts.down_proj[expert].T + own.experts.down_proj_bias[expert]
        expected += ((chosen == expert) * scores.softmax(-1)).sum(-1, keepdim=True) * y
    torch.testing.assert_close(own(x), expected, rtol=1e-12, atol=1e-12)


class GroupedExperts(nn.Module):
    """As torchtitan has them: three parameters, cut by experts as DTensors, taken by to_local() in the forward."""

    def __init__(self, way: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH, dtype=dtype))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN, dtype=dtype))
        self.w3 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH, dtype=dtype))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        w1, w2, w3 = (w.to_local() if hasattr(w, "to_local") else w for w in (self.w1, self.w2, self.w3))
        if self.way == "grouped":
            ends = counts.cumsum(0, dtype=torch.int32)
            h = nn.functional.silu(torch._grouped_mm(x, w1.transpose(-2, -1), offs=ends))
            h = h * torch._grouped_mm(x, w3.transpose(-2, -1), offs=ends)
            return torch._grouped_mm(h, w2.transpose(-2, -1), offs=ends)
        found = []
        for expert, rows in enumerate(x.split(counts.tolist())):
            h = nn.functional.silu(torch.matmul(rows, w1[expert].transpose(-2, -1)))
            h = h * torch.matmul(rows, w3[expert].transpose(-2, -1))
            found.append(torch.matmul(h, w2[expert].transpose(-2, -1)))
        return torch.cat(found)


def own_experts(way: str) -> nn.Module:
    """Those of torchtitan, in a loop or grouped, or of this library."""
    if way in ("loop", "grouped"):
        return GroupedExperts(way, torch.float32 if way == "grouped" else torch.float64)
    torch.manual_seed(0)
    transposed = way == "library, transposed"
    return zbkern.nn.Experts(WIDTH, HIDDEN, EXPERTS, bias=True, dtype=torch.float64, transposed=transposed)


def sharded_experts_rank(way: str, parallelize_first: bool, deferred: bool) -> tuple[int, bool, list[float]]:
    """W that waited, whether gradients are cut by experts, and their largest differences, relative: of two
    microbatches, and of a gradient penalty."""
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh, share = cpu_mesh(), EXPERTS // ranks
    alone, own = own_experts(way), own_experts(way)
    counts, dtype = torch.tensor([3, 0, 2, 4]), next(own.parameters()).dtype
    mine = slice(rank * share, (rank + 1) * share)
    x = torch.randn(int(counts.sum()), WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rows = torch.cat(x.detach().split(counts.tolist())[mine]).requires_grad_()
    own = own if parallelize_first else zbkern.convert(own)
    for name, parameter in list(own.named_parameters()):
        setattr(own, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    own, queue = zbkern.convert(own), zbkern.WGradQueue()
    for key in range(2):
        alone(x, counts).square().sum().backward()
        with queue.defer(key) if deferred else contextlib.nullcontext():
            own(rows, counts[mine]).square().sum().backward()
    assert not deferred or all(p.grad is None for p in own.parameters())
    waiting = queue.pending()
    queue.run()
    for module, given, numbers in ((alone, x, counts), (own, rows, counts[mine])):
        (slope,) = torch.autograd.grad(module(given, numbers).square().sum(), given, create_graph=True)
        slope.square().sum().backward()
    pairs = [(p.grad.to_local(), q.grad[mine]) for p, q in zip(own.parameters(), alone.parameters(), strict=True)]
    far = [float((p - q).abs().max() / q.abs().max().clamp(1e-30)) for p, q in pairs]
    return waiting, all(place.is_shard(0) for p in own.parameters() for place in p.grad.placements), far


needs_grouped_mm = pytest.mark.skipif(OLD_TORCH, reason="this torch has _grouped_mm for GPUs alone")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("way", "parallelize_first", "deferred", "waits"),
    [
        ("loop", False, True, 2 * 3 * EXPERTS // 2),
        ("loop", True, True, 2 * 3 * EXPERTS // 2),
        pytest.param("grouped", False, True, 2 * 3, marks=needs_grouped_mm),
        pytest.param("grouped", True, True, 2 * 3, marks=needs_grouped_mm),
        ("library", True, True, 2 * 2),
        ("library, transposed", True, True, 2 * 2),
        ("library", True, False, 0),
    ],
)
def test_experts_that_are_dtensors(
    two_ranks: Any, way: str, parallelize_first: bool, deferred: bool, waits: int
) -> None:
    for waiting, cut, found in two_ranks.run(sharded_experts_rank, way, parallelize_first, deferred):
        assert (waiting, cut) == (waits, True)
        assert max(found) < (1e-4 if way == "grouped" else 1e-10)


def other_cuts_rank() -> list[str]:
    """Messages for weights that are whole on every rank, as a DTensor and plain, beside some that are cut."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    experts, found = own_experts("library"), []
    first = distribute_tensor(experts.gate_up_proj.detach(), cpu_mesh(), [Shard(0)])
    for wrong in (distribute_tensor(experts.down_proj.detach(), cpu_mesh(), [Replicate()]), experts.down_proj):
        with pytest.raises(ValueError, match="grouped_mlp: weights and biases") as caught:
            zbkern.functional.grouped_mlp(torch.zeros(0, WIDTH).double(), first, wrong, [0] * (EXPERTS // 2))
        found.append(str(caught.value))
    return found


@pytest.mark.dist
def test_experts_that_are_cut_in_other_ways_are_refused(two_ranks: Any) -> None:
    for messages in two_ranks.run(other_cuts_rank):
        assert all("placement Shard(0)" in message for message in messages)
        assert "plain tensor" in messages[1]


def collective_rank() -> tuple[bool, bool]:
    """Whether a Pipeline takes forwards of these for collective: over all ranks, and over this one alone."""
    from zbkern.pipeline.runtime.replicas.data_parallel import Replicas

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    blocks = nn.Sequential(block(ranks, rank)), nn.Sequential(block(1, 0, one_group()))
    both = [bool(Replicas({0: each}, zbkern.WGradQueue()).agreement) for each in blocks]
    return both[0], both[1]


@pytest.mark.dist
def test_all_ranks_of_a_group_run_the_same_forwards_ahead_of_validation(two_ranks: Any) -> None:
    """Its experts' parameters are plain tensors: only the block itself says that its forward is collective."""
    assert two_ranks.run(collective_rank) == [(True, False)] * 2
