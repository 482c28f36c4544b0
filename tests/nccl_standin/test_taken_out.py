"""The transport's safeguards, each taken out: the stand-in then finds something stuck, wrong or unsafe."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.nccl_standin.faults import TIMEOUT, Fault, run_with
from tests.nccl_standin.ranks import Run
from tests.nccl_standin.scheduler import Modules, Stuck
from tests.nccl_standin.training import Case, in_one_process, train
from zbkern.pipeline import PipelineError, schedules
from zbkern.pipeline.transport import distributed, gpu
from zbkern.pipeline.transport.gpu import GpuTransport

VEE = Case((schedules.zb_v(4, 8),))
LOOP = Case((schedules.interleaved(3, 6),))
TENSORS = Case((schedules.zb_h1(3, 6),), dtypes=(torch.int16, torch.complex64))


def found_in_training(case: Case, queues: int = 32, seeds: int = 3) -> str:
    """What is stuck, wrong or unsafe, if anything."""
    whole = in_one_process(case)
    for seed in range(seeds):
        run = Run(case.schedules[0].ranks, queues, seed)
        try:
            worst = max(outcome.worst for outcome in train(case, run, whole))
        except (Stuck, PipelineError) as error:
            return str(error)
        if not worst < 2e-4:
            return f"wrong by {worst}"
        if run.errors():
            return run.errors()[0]
    return ""


def found_after(fault: Fault, seeds: int = 4) -> str:
    for seed in range(seeds):
        try:
            _, told = run_with(fault, seed)
        except Stuck:
            return "stuck"
        late = [each for each in told if each and each.after > TIMEOUT + 5]
        wrong = [each for each in told if each and f"rank {fault.victim}" not in each.text]
        if late or wrong:
            return str([*late, *wrong])
    return ""


def replaced(name: str, function: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(GpuTransport, name, function)


def in_module(module: ModuleType, name: str, value: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(module, name, value)


class NoLock:
    def __init__(self, scheduler: Any = None) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


@contextlib.contextmanager
def without_locks() -> Iterator[None]:
    real = Modules.__init__

    def init(self: Modules, scheduler: Any) -> None:
        real(self, scheduler)
        self.threading.Lock = NoLock

    with mock.patch.object(Modules, "__init__", init), replaced("connect", lambda self, pairs: None):
        yield


def connect_in_an_order_of_its_own(self: GpuTransport, pairs: Any) -> None:
    own = {self.rank, (self.rank + 1) % self.size}
    for pair in sorted({(min(pair), max(pair)) for pair in pairs}, key=lambda pair: {*pair} != own):
        _connect(self, [pair])


_connect = GpuTransport.connect


def as_it_is(tensors: list[Tensor]) -> Tensor | None:
    """A message of one tensor, in its own dtype."""
    return tensors[-1].detach().contiguous() if tensors else None


KILLED, FROZEN = Fault("kill", "connected send", 3, 1), Fault("freeze", "connected send", 2, 0)
SAFEGUARDS: dict[str, tuple[AbstractContextManager[Any], Callable[[], str]]] = {
    "messages under way are aborted": (replaced("_abort", lambda self: None), lambda: found_after(KILLED)),
    "what the GPU waits for has a time-out": (replaced("_watch", lambda self, *_: None), lambda: found_after(FROZEN)),
    "a receiver's own error is its rank's": (
        in_module(distributed, "ConnectionLost", Exception),
        lambda: found_after(Fault("memory", "recv", 3, 1)),
    ),
    "pairs are connected first": (
        replaced("connect", lambda self, pairs: None),
        lambda: found_in_training(VEE),
    ),
    "all ranks connect in one order": (
        replaced("connect", connect_in_an_order_of_its_own),
        lambda: found_in_training(LOOP, seeds=1),
    ),
    "one call at a time": (without_locks(), lambda: found_in_training(VEE)),
    "a stream waits for what it reads": (
        replaced("_settle", lambda self, message, works: None),
        lambda: found_in_training(VEE),
    ),
    "memory is of its readers, too": (in_module(gpu, "tensors_in", lambda tree: []), lambda: found_in_training(VEE)),
    "NCCL sends bytes": (in_module(gpu, "pack", as_it_is), lambda: found_in_training(TENSORS)),
}


@pytest.mark.parametrize("safeguard", [*SAFEGUARDS])
def test_without_a_safeguard_the_stand_in_finds_a_fault(safeguard: str) -> None:
    taken_out, find = SAFEGUARDS[safeguard]
    assert not find()
    with taken_out:
        assert find()


@pytest.mark.parametrize("queues", [1, 2])
def test_few_hardware_queues_stop_a_pipeline_and_are_refused(queues: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "awaited" in found_in_training(VEE, queues)
    monkeypatch.setitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", str(queues))
    run = Run(2, queues)
    for rank, error in enumerate(run.run(lambda transport: None)):
        assert isinstance(error, (ValueError, PipelineError)), rank
        assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in str(error)
    assert not run.communicators
