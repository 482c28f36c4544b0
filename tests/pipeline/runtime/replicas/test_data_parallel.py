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

from tests.support.pages import blocks
from tests.support.two_by_two import (
    KINDS,
    MICROBATCHES,
    WIDTH,
    Setup,
    backward_of_both,
    batch,
    make_model,
    mean_square,
    mesh,
    whole,
    wrap,
)
from zbkern.pipeline import Pipeline, PipelineError, schedules
from zbkern.pipeline.runtime.replicas import data_parallel

pytestmark = pytest.mark.dist

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


def record(kind: str, name: str) -> list[tuple[str, set[int]]]:
    """What happened in the second step, with the parameters that it was about: "B" done, "W", "reduce" begun."""
    setup = Setup(kind, name)
    events: list[tuple[str, set[int]]] = []
    with setup.pipe() as pipe, pytest.MonkeyPatch.context() as patch:
        if kind == "ddp":

            def hook(state, bucket):  # unannotated: DDP wants the types themselves, not their names
                events.append(("reduce", {id(p) for p in bucket.parameters()}))
                work = dist.all_reduce(bucket.buffer().div_(2), group=state, async_op=True)
                return work.get_future().then(lambda future: future.value()[0])

            for module in setup.modules:
                module.register_comm_hook(mesh().get_group("replica"), hook)
        else:
            from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

            reduce = groups.foreach_reduce

            def recorded(parts: Any, *arguments: Any, **options: Any) -> Any:
                events.append(("reduce", {id(part._unsharded_param) for part in parts}))
                return reduce(parts, *arguments, **options)

            patch.setattr(groups, "foreach_reduce", recorded)
        done = pipe._replicas.backward_done
        patch.setattr(pipe._replicas, "backward_done", lambda chunk: (events.append(("B", set())), done(chunk)))
        finished = lambda tasks: events.append(("W", {id(p) for task in tasks for p in task.parameters}))  # noqa: E731
        pipe.queue.listeners.insert(0, finished)
        for _ in range(2):  # DDP settles its buckets in the first, FSDP2 makes its parameters
            events.clear()
            pipe.step(*setup.data(0))
    return events


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h2", "zb_v"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reduction_starts_after_its_last_w_and_under_the_others(four_ranks: Any, kind: str, name: str) -> None:
    chunks = 2 if name == "zb_v" else 1
    for events in four_ranks.run(record, kind, name):
        reductions = [index for index, (what, _) in enumerate(events) if what == "reduce"]
        reduced = [parameter for index in reductions for parameter in events[index][1]]
        assert len(reduced) == len(set(reduced)) == chunks * 10, "not every gradient is reduced once a step"
        assert len(reductions) >= 2 * chunks
        for index in reductions:
            later = set().union(*(parameters for what, parameters in events[index:] if what == "W"))
            assert not events[index][1] & later, "reduced before its last W"
        first = reductions[0]
        assert [what for what, _ in events[:first]].count("B") >= MICROBATCHES
        assert events[first - 1][0] == "W"
        assert events[first - 1][1] & events[first][1], "not reduced as soon as its last W had run"
        assert "W" in {what for what, _ in events[first:]}, "no W is left to cover it"


def refuse() -> list[str]:
    from torch.nn.parallel.distributed import _MixedPrecision

    messages = []
    module = make_model(1)[0]
    setup = Setup("ddp", "zb_h1", static_graph=True)
    attempts = [setup.modules[0], wrap("ddp", module, find_unused_parameters=True)]
    attempts.append(nn.Sequential(wrap("ddp", make_model(1)[0])))
    mixed: Any = wrap("ddp", make_model(1)[0])
    mixed.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)  # as an argument it wants a stream on a GPU
    attempts.append(mixed)
    for attempt in attempts:
        with pytest.raises(ValueError, match="Pipeline: the module of chunk") as caught:
            Pipeline(attempt, setup.schedule, mean_square, mesh().get_group("stage"))
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
    for wrapped in nn.parallel.DistributedDataParallel(make_model(1)[0]), fully_shard(make_model(1)[0]):
        with pytest.raises(
            ValueError, match=rf"chunk \d are shared with ranks \[{other}\], which hold other chunks of"
        ):
            Pipeline(wrapped, schedules.zb_h1(2, 2), mean_square, stage)


def test_the_default_group_of_the_wrappers_has_other_stages(four_ranks: Any) -> None:
    """Where chunks are alike it would average gradients of different layers, and gather them in vain."""
    four_ranks.run(share_with_other_stages)


def change_after_wrapping() -> None:
    for change in (lambda p: p.requires_grad_(False), lambda p: setattr(p, "main_grad", torch.zeros_like(p))):
        setup = Setup("ddp", "zb_h1")
        with setup.pipe() as pipe:
            change(setup.plain[0][0].gain)
            with pytest.raises(PipelineError, match=r"cannot reduce a parameter of shape \[1\]"):
                pipe.step(*setup.data(0))
    setup = Setup("ddp", "zb_h1")
    setup.plain[0][0].gain.main_grad = None  # as a framework leaves it that has none yet
    with setup.pipe() as pipe:
        pipe.step(*setup.data(0))
    setup = Setup("ddp", "zb_h1")
    setup.plain[0][0].gain.requires_grad_(False)
    with pytest.raises(ValueError, match=r"has 9 parameters that take gradients .* reduces 10: some were frozen"):
        setup.pipe()


def test_what_came_after_wrapping_is_refused(four_ranks: Any) -> None:
    four_ranks.run(change_after_wrapping)


def train_in_part() -> None:
    """Of every block a parameter is frozen, and another one nobody's to reduce."""
    replica, stage = divmod(dist.get_rank(), 2)
    plain, model = make_model(2), make_model(2)
    for module in [*plain, *model]:
        module[0].gain.requires_grad_(False)
    expected: dict[str, Tensor] = {}
    for other in (1 - replica, replica):
        nn.Sequential(*plain).zero_grad()
        inputs, targets = batch(0, other)
        mean_square(nn.Sequential(*plain)(inputs), targets).backward()
        for name, p in plain[stage].named_parameters():
            if p.requires_grad:
                expected[name] = expected.get(name, 0) + p.grad / 2
    expected["1.linear.bias"] = plain[stage][1].linear.bias.grad  # of this replica
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model[stage], ["1.linear.bias"])
    wrapped = wrap("ddp", model[stage])
    schedule = schedules.zb_h1(2, MICROBATCHES)
    with Pipeline(wrapped, schedule, mean_square, mesh().get_group("stage"), timeout=30) as pipe:
        pipe.step(*batch(0, replica))
    found = {name: p.grad for name, p in model[stage].named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected)


def test_parameters_that_are_not_reduced(four_ranks: Any) -> None:
    four_ranks.run(train_in_part)


def accumulate(kind: str, sync: bool) -> None:
    """Two steps add up: each reduces, or the second reduces both."""
    setup = Setup(kind, "zb_h1")
    expected = plain_gradients(2)
    with setup.pipe() as pipe:
        with contextlib.nullcontext() if sync else setup.modules[0].no_sync():
            pipe.step(*setup.data(0))
        pipe.step(*setup.data(1))
    both = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    found = setup.named(lambda p: p.grad)
    torch.testing.assert_close(found, {name: both[name] for name in found})


def plain_gradients(steps: int) -> list[dict[str, Tensor]]:
    """Those of steps with the same weights."""
    model = make_model(2)
    found = []
    for step in range(steps):
        backward_of_both(model, step)
        found.append({f"{c}.{n}": p.grad.clone() for c, m in enumerate(model) for n, p in m.named_parameters()})
        nn.Sequential(*model).zero_grad()
    return found


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
    module = Counting(1 + dist.get_rank() // 2)
    wrapped = wrap("ddp", module)
    found = []
    with Pipeline(
        wrapped, schedules.zb_h1(2, 2), nn.functional.mse_loss, mesh().get_group("stage"), timeout=30
    ) as pipe:
        for _ in range(2):
            pipe.step(*torch.ones(2, 2, WIDTH))
            found.append(module.seen.item())
        pipe.evaluate(*torch.ones(2, 2, WIDTH))
        return [*found, module.seen.item()]


def test_buffers_are_those_of_the_first_replica_after_every_step(four_ranks: Any) -> None:
    first, _, second, _ = four_ranks.run(count_forwards)
    assert first == second == [2, 4, 4]
