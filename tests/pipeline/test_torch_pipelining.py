"""Stock schedules of torch.distributed.pipelining with our stage, also where torch's own stage is wrong."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as stock_schedules

import zbkern
from tests.support.tied import Block
from zbkern import testing

pytestmark = pytest.mark.dist

WIDTH = 6  # of a Block
MICROBATCHES = 4
SINGLE, LOOP, V = [[0], [1]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]
CHUNKS = {  # of each rank; a class that a later torch brings fails until it stands here
    "one stage": SINGLE,  # ScheduleInterleavedZeroBubble
    "ScheduleGPipe": SINGLE,
    "Schedule1F1B": SINGLE,
    "ScheduleLoopedBFS": LOOP,
    "ScheduleInterleaved1F1B": LOOP,
    "ScheduleInterleavedZeroBubble": LOOP,
    "ScheduleZBVZeroBubble": V,
    "ScheduleDualPipeV": V,
}
SPLIT = {"one stage", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"}  # B and W apart
STOCK = sorted(
    name
    for name, value in vars(stock_schedules).items()
    if name.startswith("Schedule") and isinstance(value, type) and issubclass(value, stock_schedules._PipelineSchedule)
)


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


def stock_schedule(name: str, stages: list[Any]) -> Any:
    kind = getattr(stock_schedules, "ScheduleInterleavedZeroBubble" if name == "one stage" else name)
    single = issubclass(kind, stock_schedules.PipelineScheduleSingle)
    return kind(stages[0] if single else stages, MICROBATCHES, loss_fn=loss_fn)


def run_schedule(name: str, kind: str, stock: bool, data_parallel: bool = False, steps: int = 2) -> int:
    """Holds this rank's gradients of several steps against a plain loop; returns how many W were deferred."""
    from torch.distributed.pipelining import PipelineStage

    from zbkern.pipeline.torch_pipelining import PipelineStage as OurStage

    rank, places = dist.get_rank(), CHUNKS[name]
    stages = sum(map(len, places))
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
    schedule = stock_schedule(name, mine)
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


@pytest.mark.parametrize("name", ["one stage", *STOCK], indirect=True)
def test_stock_schedules_with_our_stage(two_ranks: Any, name: str) -> None:
    deferred = two_ranks.run(run_schedule, name, "block", False)
    assert (sum(deferred) > 0) == (name in SPLIT)


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


def test_a_dw_builder_is_refused() -> None:
    from zbkern.pipeline.torch_pipelining import PipelineStage

    with pytest.raises(TypeError, match="dw_builder is taken by the queue"):
        PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), dw_builder=lambda: None)
