"""Stock schedules of torch.distributed.pipelining with our stage; and what fails or is silently wrong without it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

import zbkern
from tests.support.tied import Block
from zbkern import testing

pytestmark = pytest.mark.dist

WIDTH = 6  # of a Block
MICROBATCHES = 4


class EndsInView(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(x.shape)


class Reuses(nn.Module):
    """One weight twice with a trainable operation between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.scale(self.linear(x)).sin())


class Own(nn.Module):
    """Not a layer that is known: W of its product is seen in the forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix).sin()


def make(kind: str, stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    block: Callable[[], nn.Module] = {"view": EndsInView, "reuse": Reuses, "own": Own}.get(kind, Block)
    modules = [block() for _ in range(stages)]
    if kind == "frozen":
        modules[0].requires_grad_(False)
    return modules


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target)


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(2 * MICROBATCHES, WIDTH, generator=generator) for _ in range(2))


def plain(modules: Iterable[nn.Module], step: int) -> None:
    x, target = data(step)
    for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        y = part
        for module in modules:
            y = module(y)
        (loss_fn(y, wanted) / MICROBATCHES).backward()


def tripled(state, bucket):  # unannotated: DDP wants the types themselves, not their names
    done = torch.futures.Future()
    done.set_result(bucket.buffer() * 3)
    return done


def run_schedule(name: str, kind: str, stock: bool, data_parallel: bool = False, steps: int = 2) -> int:
    """Holds this rank's gradients of several steps against a plain loop; returns how many W were deferred."""
    from torch.distributed.pipelining import PipelineStage, schedules

    from zbkern.pipeline.torch_pipelining import PipelineStage as OurStage

    rank = dist.get_rank()
    per_rank = 1 if name == "one stage" else 2
    stages = 2 * per_rank
    places = {"one stage": [[0], [1]], "ScheduleInterleavedZeroBubble": [[0, 2], [1, 3]]}.get(name, [[0, 3], [1, 2]])
    modules = make(kind, stages)
    expected = nn.ModuleList(copy.deepcopy(modules))
    device = torch.device("cpu")
    queue = zbkern.WGradQueue()
    ran: list[int] = []
    queue.listeners.append(lambda tasks: ran.append(len(tasks)))
    mine = []
    groups = [dist.new_group([r]) for r in range(2)]
    for index in places[rank]:
        module = modules[index] if stock else zbkern.convert(modules[index])
        if data_parallel:
            module = nn.parallel.DistributedDataParallel(module, process_group=groups[rank])
            module.register_comm_hook(None, tripled)  # visible in the gradient: reduced once, never, or twice
        stage = PipelineStage if stock else OurStage
        options = {} if stock else {"queue": queue}
        mine.append(stage(module, index, stages, device, **options))
    if name == "one stage":
        schedule = schedules.ScheduleInterleavedZeroBubble(mine, MICROBATCHES, loss_fn=loss_fn)
    else:
        schedule = getattr(schedules, name)(mine, MICROBATCHES, loss_fn=loss_fn)
    for step in range(steps):
        x, target = data(step)
        arguments = (x,) if 0 in places[rank] else ()
        options = {"target": target} if stages - 1 in places[rank] else {}
        schedule.step(*arguments, **options)
        assert queue.pending() == 0
        assert queue.bytes == 0
        plain(expected, step)
        if data_parallel:
            for parameter in expected.parameters():
                parameter.grad *= 3
        for index in places[rank]:
            testing.assert_same_gradients(modules[index], expected[index])
        for module in [*modules, *expected]:
            module.zero_grad()
        if not stock and not data_parallel and hasattr(schedule, "eval"):
            # without gradients and after a step: torch 2.11 changes both
            outputs = schedule.eval(*arguments, **options)
            if stages - 1 in places[rank]:
                testing.assert_close(outputs, functools.reduce(lambda y, module: module(y), expected, x), "outputs")
    return len(ran)


SCHEDULES = ["one stage", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


@pytest.fixture(scope="module")
def stock_runs_v(two_ranks: Any) -> bool:
    """Whether torch's own stages run a V over gloo: in 2.11 a rank begins by sending to itself, which gloo cannot."""
    try:
        two_ranks.run(run_schedule, "ScheduleZBVZeroBubble", "block", True, False, 1)
    except AssertionError as error:
        if "Pair is not connected" in str(error):
            return False
        raise
    return True


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    if "V" in request.param and not request.getfixturevalue("stock_runs_v"):
        pytest.skip("this version of torch cannot run schedules in a V over gloo")
    return request.param


@pytest.mark.parametrize("name", SCHEDULES, indirect=True)
def test_stock_schedules_with_our_stage(two_ranks: Any, name: str) -> None:
    deferred = two_ranks.run(run_schedule, name, "block", False)
    assert sum(deferred) > 0


@pytest.mark.parametrize("name", ["ScheduleInterleavedZeroBubble"], indirect=True)
def test_w_of_a_module_of_ones_own_waits(two_ranks: Any, name: str) -> None:
    assert min(two_ranks.run(run_schedule, name, "own", False)) > 0


@pytest.mark.parametrize("name", ["one stage", "ScheduleZBVZeroBubble"], indirect=True)
@pytest.mark.parametrize("kind", ["frozen", "view", "reuse"])
def test_ours_is_right_where_stock_is_not(two_ranks: Any, name: str, kind: str) -> None:
    try:
        two_ranks.run(run_schedule, name, kind, False)
    except AssertionError as error:
        refused = "expecting to send gradients to stage"
        if kind != "frozen" or refused not in str(error):
            raise
        with pytest.raises(AssertionError, match=refused):  # by torch's engine, whatever the stages
            two_ranks.run(run_schedule, name, kind, True)
        pytest.skip("the engine of this version of torch runs no stage behind a frozen one")


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble"], indirect=True)
def test_data_parallel_stages_are_reduced_once(two_ranks: Any, name: str) -> None:
    two_ranks.run(run_schedule, name, "block", False, True)


stock = pytest.mark.skipif(
    Version(torch.__version__).release[:2] != (2, 13), reason="describes the split of torch 2.13; others may differ"
)


@stock
def test_stock_does_not_reduce_data_parallel_stages(two_ranks: Any) -> None:
    with pytest.raises(AssertionError, match="gradient of"):
        two_ranks.run(run_schedule, "ScheduleZBVZeroBubble", "block", True, True)


def stock_split(module: nn.Module, x: Tensor) -> None:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    y = module(x)
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], iter(module.parameters()))
    stage_backward_weight(iter(module.parameters()), groups)


@stock
def test_stock_fails_where_a_stage_ends_in_a_view_or_reuses_a_weight() -> None:
    x = torch.randn(2, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="Failed to run stage backward input"):
        stock_split(make("view", 1)[0], x)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        stock_split(make("reuse", 1)[0], x)


@stock
def test_stock_cannot_evaluate_where_neighbouring_chunks_share_a_rank() -> None:
    """`eval` runs the backward's actions, too: the stage hands on gradients that do not exist."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    stage = SimpleNamespace(has_backward=False, is_first=False, is_last=False)
    with pytest.raises(AssertionError, match="doesn't have backward"):
        _PipelineStageBase.get_local_bwd_output(stage, 0)
    with pytest.raises(AssertionError, match="doesn't have backward"):
        _PipelineStageBase.set_local_bwd_input(stage, (), 0)


@stock
def test_stock_loses_gradients_after_a_frozen_stage_silently() -> None:
    (module,) = make("block", 1)
    stock_split(module, torch.randn(2, WIDTH))  # what a frozen stage sends requires no gradient
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_dw_builder_is_refused() -> None:
    from zbkern.pipeline.torch_pipelining import PipelineStage

    with pytest.raises(TypeError, match="dw_builder is taken by the queue"):
        PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), dw_builder=lambda: None)
