"""Data-parallel stages in a Pipeline: when reductions start, what is refused or not reduced, buffers, and the page."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zbkern
from tests.support.parallel_stages import (
    MICROBATCHES,
    WIDTH,
    OneProcess,
    Stages,
    apart,
    batch,
    chunk,
    loss_fn,
    replicate,
    values,
    whole,
)
from tests.support.programs import blocks
from tests.support.ranks import named_mesh
from zbkern.pipeline import Pipeline, PipelineError, schedules
from zbkern.pipeline.runtime.replicas import data_parallel

pytestmark = pytest.mark.dist

KINDS, LAYOUT = ("ddp", "fsdp, gathered once"), (2, 2, "zb_h1")
PAGE = Path(__file__).parents[4] / "docs" / "data_parallel.md"


# ---- when reductions start


def test_what_is_announced_is_not_copied() -> None:
    parameters = [nn.Parameter(torch.ones(3, 2)) for _ in range(4)]
    for parameter in parameters[:3]:
        parameter.grad = torch.full((3, 2), 5.0)
    before = [parameter.grad.data_ptr() for parameter in parameters[:3]]
    seen = []
    parameters[0].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    parameters[1].register_hook(lambda gradient: 2 * gradient)  # it has been through that once
    data_parallel._announce(parameters)
    assert [parameter.grad.data_ptr() for parameter in parameters[:3]] == before
    assert [parameter.grad.sum().item() for parameter in parameters] == [30, 30, 30, 0]
    assert seen == [30]


def mesh() -> Any:
    """Of two stages, each of two replicas."""
    return named_mesh(stage=2, other=2)


def record(kind: str, name: str) -> tuple[list[tuple[str, set[int]]], int]:
    """What happened in the second step, with the parameters that it was about: "B" done, "W", "reduce" begun; and how
    many parameters there are."""
    ours = Stages(kind, (2, 2, name))
    events: list[tuple[str, set[int]]] = []
    with ours.pipe as pipe, pytest.MonkeyPatch.context() as patch:
        if kind == "ddp":

            def hook(state, bucket):  # unannotated: DDP wants the types themselves, not their names
                events.append(("reduce", {id(p) for p in bucket.parameters()}))
                work = dist.all_reduce(bucket.buffer().div_(2), group=state, async_op=True)
                return work.get_future().then(lambda future: future.value()[0])

            for module in ours.modules:
                module.register_comm_hook(mesh().get_group("other"), hook)
        else:
            from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

            reduce = groups.foreach_reduce

            def recorded(parts: Any, *arguments: Any, **options: Any) -> Any:
                events.append(("reduce", {id(part._unsharded_param) for part in parts}))
                return reduce(parts, *arguments, **options)

            patch.setattr(groups, "foreach_reduce", recorded)
        done = pipe._calls.replicas.backward_done
        patch.setattr(pipe._calls.replicas, "backward_done", lambda chunk: (events.append(("B", set())), done(chunk)))
        finished = lambda tasks: events.append(("W", {id(p) for task in tasks for p in task.parameters}))  # noqa: E731
        pipe.queue.listeners.insert(0, finished)
        for _ in range(2):  # DDP settles its buckets in the first, FSDP2 makes its parameters
            events.clear()
            pipe.step(*ours.batch(0))
    return events, len(ours.named())


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h2", "zb_v"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reduction_starts_after_its_last_w_and_under_the_others(four_ranks: Any, kind: str, name: str) -> None:
    for events, count in four_ranks.run(record, kind, name):
        reductions = [index for index, (what, _) in enumerate(events) if what == "reduce"]
        reduced = [parameter for index in reductions for parameter in events[index][1]]
        assert len(reduced) == len(set(reduced)) == count, "not every gradient is reduced once a step"
        assert len(reductions) >= 2
        for index in reductions:
            later = set().union(*(parameters for what, parameters in events[index:] if what == "W"))
            assert not events[index][1] & later, "reduced before its last W"
        first = reductions[0]
        assert [what for what, _ in events[:first]].count("B") >= MICROBATCHES
        assert events[first - 1][0] == "W"
        assert events[first - 1][1] & events[first][1], "not reduced as soon as its last W had run"
        assert "W" in {what for what, _ in events[first:]}, "no W is left to cover it"


def ddp(**options: Any) -> nn.Module:
    """A chunk of this rank's stage, with its replicas."""
    module = zbkern.convert(chunk(mesh()["stage"].get_local_rank(), 2))
    return nn.parallel.DistributedDataParallel(module, process_group=mesh().get_group("other"), **options)


def pipeline(module: nn.Module) -> Pipeline:
    return Pipeline(module, schedules.zb_h1(2, MICROBATCHES), loss_fn, mesh().get_group("stage"), timeout=60)


def refuse() -> list[str]:
    from torch.nn.parallel.distributed import _MixedPrecision

    mixed: Any = ddp()
    mixed.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)  # as an argument it wants a stream on a GPU
    messages = []
    for attempt in (ddp(static_graph=True), ddp(find_unused_parameters=True), nn.Sequential(ddp()), mixed):
        with pytest.raises(ValueError, match="Pipeline: the module of chunk") as caught:
            pipeline(attempt)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_is_refused(four_ranks: Any) -> None:
    for static, unused, inside, mixed in four_ranks.run(refuse):
        assert "static_graph=True, which is of no use here" in static
        assert "find_unused_parameters=True" in unused
        assert "has DistributedDataParallel inside; wrap the whole module in it" in inside
        assert "with mixed_precision, which works by hooks" in mixed


def share_with_other_stages() -> None:
    stage = mesh().get_group("stage")
    (other,) = {*dist.get_process_group_ranks(stage)} - {dist.get_rank()}
    for wrapped in nn.parallel.DistributedDataParallel(chunk(0, 2)), fully_shard(chunk(0, 2)):
        with pytest.raises(
            ValueError, match=rf"chunk \d are shared with ranks \[{other}\], which hold other chunks of"
        ):
            pipeline(wrapped)


def test_the_default_group_of_the_wrappers_has_other_stages(four_ranks: Any) -> None:
    """Where chunks are alike it would average gradients of different layers, and gather them in vain."""
    four_ranks.run(share_with_other_stages)


def change_after_wrapping() -> None:
    def changed(change: Any) -> Stages:
        ours = Stages("ddp", LAYOUT)
        change([*ours.named().values()][-1])
        return ours

    for change in (lambda p: p.requires_grad_(False), lambda p: setattr(p, "main_grad", torch.zeros_like(p))):
        ours = changed(change)
        with ours.pipe, pytest.raises(PipelineError, match=r"cannot reduce a parameter of shape"):
            ours.gradients(0)
    ours = changed(lambda p: setattr(p, "main_grad", None))  # as a framework leaves it that has none yet
    with ours.pipe:
        ours.gradients(0)
    module = ddp()
    next(module.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match=r"has \d+ parameters that take gradients .* reduces \d+: some were frozen"):
        pipeline(module)


def test_what_came_after_wrapping_is_refused(four_ranks: Any) -> None:
    four_ranks.run(change_after_wrapping)


def train_in_part() -> None:
    """A parameter of every stage is nobody's to reduce."""
    place, replica = mesh().get_coordinate()
    module, plain = chunk(place, 2), OneProcess()
    name = [name for name, _ in module.named_parameters()][-1]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [name])
    wrapped = replicate("ddp", zbkern.convert(module), mesh()["other"])
    inputs, targets = (part.chunk(2)[replica] for part in batch(0))
    with pipeline(wrapped) as pipe:
        pipe.step(inputs if place == 0 else None, targets if place == 1 else None)
    plain.gradients(0)
    expected = {key: p.grad for key, p in plain.named().items()}
    plain.model.zero_grad()
    loss_fn(plain.model(inputs), targets).backward()
    expected[name] = plain.named()[name].grad  # of this replica
    assert max(apart(values({key: p.grad for key, p in module.named_parameters()}), expected).values()) < 1e-12


def test_parameters_that_are_not_reduced(four_ranks: Any) -> None:
    four_ranks.run(train_in_part)


def accumulate(kind: str, sync: bool) -> None:
    """Two steps add up: each reduces, or the second reduces both."""
    ours, plain = Stages(kind, LAYOUT), OneProcess().model
    for step in range(2):
        loss_fn(plain(batch(step)[0]), batch(step)[1]).backward()
    with ours.pipe as pipe:
        with contextlib.nullcontext() if sync else ours.modules[0].no_sync():
            pipe.step(*ours.batch(0))
        pipe.step(*ours.batch(1))
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert max(apart(values({name: p.grad for name, p in ours.named().items()}), expected).values()) < 1e-12


@pytest.mark.parametrize(("kind", "sync"), [*((kind, True) for kind in KINDS), ("ddp", False)])
def test_gradients_of_several_steps_add_up(four_ranks: Any, kind: str, sync: bool) -> None:
    four_ranks.run(accumulate, kind, sync)


def run_page(shard: bool) -> list[Tensor]:
    """The example of the page; the weights that it comes to."""
    code = blocks(PAGE)[0]
    if shard:
        line = re.findall(r"`(fully_shard\(chunk.*?)`", PAGE.read_text(encoding="utf-8"))[0]
        wrapped = re.findall(r"chunk = nn.parallel.*", code)[0]
        code = code.replace(wrapped, f"from torch.distributed.fsdp import fully_shard\n{line}")
    found: dict[str, Any] = {}
    torch.manual_seed(dist.get_rank() % 2)  # replicas start alike
    exec(code, found)
    return [whole(parameter).detach() for parameter in found["chunk"].parameters()]


def test_the_page_of_the_documentation_runs(four_ranks: Any) -> None:
    replicated, sharded = four_ranks.run(run_page, False), four_ranks.run(run_page, True)
    for rank in range(4):
        for ours, theirs, other in zip(replicated[rank], sharded[rank], replicated[rank ^ 2], strict=True):
            assert torch.equal(ours, other), "replicas differ"
            torch.testing.assert_close(ours, theirs)
    assert not torch.equal(replicated[0][0], replicated[1][0])


# ---- buffers


class Counting(nn.Module):
    """A buffer that every training forward changes, on every replica by another number."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.by = by
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += self.by
        return self.linear(x)


def count_forwards() -> list[float]:
    module, found = Counting(1 + mesh()["other"].get_local_rank()), []
    wrapped = nn.parallel.DistributedDataParallel(zbkern.convert(module), process_group=mesh().get_group("other"))
    group = mesh().get_group("stage")
    with Pipeline(wrapped, schedules.zb_h1(2, 2), nn.functional.mse_loss, group, timeout=60) as pipe:
        for _ in range(2):
            pipe.step(*torch.ones(2, 2, WIDTH))
            found.append(module.seen.item())
        pipe.evaluate(*torch.ones(2, 2, WIDTH))
        return [*found, module.seen.item()]


def test_buffers_are_those_of_the_first_replica_after_every_step(four_ranks: Any) -> None:
    first, second, *_ = four_ranks.run(count_forwards)
    assert first == second == [2, 4, 4]
