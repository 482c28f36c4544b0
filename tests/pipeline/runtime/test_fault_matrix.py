"""One rank fails: in every place, in every way. All others end in time, name that rank, and leave nothing open.

The ranks of a case are processes of its own, forked from one that has imported everything; the test hosts their store,
as torchrun would. Cases after which all ranks are there have the same ones, one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import zbkern
from tests.support.chunks import make_data, make_model
from tests.support.patience import patiently
from tests.support.ranks import PRELOAD
from tests.support.schedules import with_neighbours_beside
from zbkern.pipeline import Optimizer, Pipeline, Schedule, checkpoint, schedules
from zbkern.pipeline.checkpoint import dcp_format
from zbkern.pipeline.runtime import engine
from zbkern.pipeline.transport import base, connect, distributed, rank_exchange
from zbkern.wgrad.queue import thread

TIMEOUT = 1.0  # seconds, of a Pipeline one of whose ranks is stopped
LONG_TIMEOUT = 5.0  # where the fault is known without one: a rank of a busy machine may be late
MEETING = 3.0  # seconds, of init_process_group where a rank fails before all have connected
LONG_MEETING = 20.0  # where none does: on a busy machine some come late
CHECKPOINT_TIMEOUT = 3.0  # seconds
TOGETHER = 1.0  # seconds in which the threads of a closed pipeline end, where one rank is stopped and they never do
BOUND = 25.0  # seconds in which every survivor has ended, on a busy machine
STEP, MICROBATCH = 2, 1  # where a fault within a step happens

ACTIONS = ("F", "B", "W", "BW", "forward hook", "gradient hook")
CHECKPOINT = ("checkpoint save", "checkpoint load")
DISK = {  # the function of the format that works on files, and what others wait for
    "checkpoint write": ("write_tensors", "checkpoint.save", "tensors written"),
    "checkpoint read": ("read", "checkpoint.load", "checkpoint verified"),
}
BESIDE = {"F beside B": "F", "B beside F": "B"}  # in the midst of a pass, when one beside it has begun
PLACES = ("before connecting", "constructor", *ACTIONS, "between calls", "optimizer", "evaluate", *CHECKPOINT, "close")
FAULTS = ("kill", "stop", "raise", "memory", "interrupt")


class Case(NamedTuple):
    """`fault` happens on rank `victim` of `size` at `place`; hosts: whether rank 0 hosts the store itself."""

    place: str
    fault: str
    size: int
    victim: int
    hosts: bool = False
    usual_close: bool = False  # in all the time that the threads of a pipeline have to end
    scale: float = 1.0  # of all seconds

    @property
    def is_survived(self) -> bool:
        """Whether the rank that fails goes on, as a process."""
        return self.fault not in ("kill", "stop")


def do(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise ArithmeticError("the cause")
    elif fault == "memory":
        raise MemoryError("the cause")
    else:
        signal.raise_signal(signal.SIGINT)


class Faulty(nn.Module):
    """A chunk; `fault()` is called in the forward, or in the backward of its first output, of one microbatch."""

    def __init__(self, chunk: nn.Module, place: str, fault: Callable[[], None]) -> None:
        super().__init__()
        self.chunk, self.place, self.fault, self.calls = chunk, place, fault, 0

    def forward(self, *inputs: torch.Tensor) -> Any:
        self.calls += 1
        chosen = self.calls == 4 * (STEP - 1) + MICROBATCH + 1
        if chosen and self.place == "F":
            self.fault()
        self.give_way("F")
        outputs = self.chunk(*inputs)
        first = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        if first.requires_grad:
            first.register_hook(lambda _: self.give_way("B"))
        if chosen and self.place in ("B", "BW"):
            first.register_hook(lambda _: self.fault())
        return outputs

    def give_way(self, kind: str) -> None:
        """As a collective in flight would."""
        beside = thread.give_way is not None and self.calls > 4 * (STEP - 1)
        zbkern.in_flight()
        if beside and BESIDE.get(self.place) == kind:
            self.fault()


def prepared(case: Case, chunk: nn.Module, fault: Callable[[], None], rank: int) -> nn.Module:
    """The rank's module, in which the victim's fault waits where it is within an action."""
    module = Faulty(zbkern.convert(chunk), case.place if rank == case.victim else "", fault)
    if rank != case.victim:
        return module
    seen: list[int] = []

    def later(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 4 * (STEP - 1) + MICROBATCH + 1:
            fault()

    if case.place == "forward hook":
        module.register_forward_hook(later)
    elif case.place in ("W", "gradient hook"):
        parameter = chunk.linear.weight if case.place == "W" else chunk.linear.bias
        parameter.register_post_accumulate_grad_hook(later)
    elif case.place == "constructor":
        engine.check_same_plan = lambda *given: (fault(), connect.check_same_plan(*given))  # type: ignore[attr-defined]
    return module


@functools.cache
def pairs(size: int, microbatches: int) -> Schedule:
    """A schedule in which every rank has F and B beside each other."""
    for number in itertools.count():
        found = with_neighbours_beside(random.Random(number), schedules.zb_h1(size, microbatches))
        groups = [[row[first:end] for first, end in found.beside_of(rank)] for rank, row in enumerate(found.actions)]
        if all(any({"F", "B"} <= {each.kind for each in group} for group in of_rank) for of_rank in groups):
            return found
    raise AssertionError


def numbered(chunk: int, key: str) -> str:
    return f"{chunk}.{key}"


def run_case(case: Case, rank: int, folder: str) -> None:
    """Steps, an optimizer's steps, an evaluation and a checkpoint, in which the victim fails somewhere."""
    at = lambda place: do(case.fault) if (rank, place) == (case.victim, case.place) else None  # noqa: E731
    build: Any = schedules.one_f_one_b if case.place == "BW" else schedules.zb_h1
    build = pairs if case.place in BESIDE else build
    module = prepared(case, make_model(case.size)[rank], lambda: do(case.fault), rank)
    inputs, targets = make_data(4)
    at("before connecting")
    timeout = case.scale * (TIMEOUT if case.fault == "stop" else LONG_TIMEOUT)
    checkpoint_timeout = case.scale * CHECKPOINT_TIMEOUT
    if case.fault == "stop" and not case.usual_close:
        distributed._TOGETHER = TOGETHER * case.scale
    with Pipeline(module, build(case.size, 4), nn.functional.mse_loss, timeout=timeout) as pipe:
        optimizer = Optimizer(torch.optim.SGD(module.parameters(), 0.1), pipe)
        for step in (1, 2, 3):
            optimizer.zero_grad()
            pipe.step(inputs, targets)
            if step == 2:
                at("between calls")
                optimizer.optimizer.register_step_pre_hook(lambda *_: at("optimizer"))
            optimizer.step()
        at("evaluate")
        pipe.evaluate(inputs, targets)
        pipe.gather(rank)
        if (rank, case.place in DISK) == (case.victim, True):  # the last case of these ranks
            name = DISK[case.place][0]
            real = getattr(dcp_format, name)
            setattr(dcp_format, name, lambda *given, **more: (at(case.place), real(*given, **more))[1])
        if case.place in (*CHECKPOINT, *DISK):
            for call in CHECKPOINT:
                hook = module.register_state_dict_pre_hook(lambda *_, call=call: at(call))
                if call == "checkpoint save":
                    checkpoint.save(folder, 1, pipe, optimizer, rename=numbered, timeout=checkpoint_timeout)
                else:
                    checkpoint.load(folder, pipe, optimizer, rename=numbered, timeout=checkpoint_timeout)
                hook.remove()
        at("close")


def opened() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


Answer = tuple[str | None, tuple[int, int], tuple[int, int]]


def rank_main(cases: Sequence[Case], rank: int, port: int, folder: str, end: Any) -> None:
    """Of each case in turn, sends the error that this rank ended with, and what is open before and after."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    size, is_early = cases[0].size, cases[0].place in ("before connecting", "constructor")
    scale = cases[0].scale
    usual = timedelta(seconds=scale * (MEETING if is_early and not cases[0].is_survived else LONG_MEETING))
    for module in (base, rank_exchange):  # in which others answer
        module._GRACE *= scale
    distributed._TOGETHER *= scale
    is_master = cases[0].hosts and rank == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=usual)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=usual)
    with Pipeline(make_model(size)[rank], schedules.zb_h1(size, 4), nn.functional.mse_loss) as pipe:
        pipe.step(*make_data(4))
    pipe = None  # type: ignore[assignment]
    for number, case in enumerate(cases):
        before, error = opened(), None
        try:
            run_case(case, rank, f"{folder}/{number}")
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
        engine.check_same_plan = connect.check_same_plan  # type: ignore[attr-defined]
        end.send((error, before, opened()))
        end.recv()  # alive until all have answered: what an exit closes must not help


def run_ranks(cases: Sequence[Case]) -> Iterator[tuple[Case, dict[int, Answer]]]:
    """Of each case in turn, what every surviving rank sent; fails where one did not in time."""
    context, size = mp.get_context("forkserver"), cases[0].size
    context.set_forkserver_preload(PRELOAD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = None if cases[0].hosts else dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    pipes, ends = zip(*(context.Pipe() for _ in range(size)), strict=True)
    folder = tempfile.TemporaryDirectory()
    processes = [
        context.Process(target=rank_main, args=(cases, rank, port, folder.name, end), daemon=True)
        for rank, end in enumerate(ends)
    ]
    try:
        for process, end in zip(processes, ends, strict=True):
            process.start()
            end.close()
        for case in cases:
            deadline, found = time.monotonic() + BOUND * case.scale, {}
            for rank, pipe in enumerate(pipes):
                if rank != case.victim or case.is_survived:
                    assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} hangs: {case}"
                    found[rank] = pipe.recv()
            yield case, found
            for rank in found:
                pipes[rank].send(None)
    finally:
        del store
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # a stopped one, too
            process.join()
        folder.cleanup()


def expected(case: Case) -> str:
    """A pattern of the message that every survivor ends with."""
    victim = case.victim
    if case.place == "before connecting":
        return f"rank {victim} did not come to 'connect'"
    if case.place in DISK:
        _, call, stage = DISK[case.place]
        return f"{call}: rank {victim} did not come to '{stage}' in {CHECKPOINT_TIMEOUT * case.scale:g} s"
    if case.place in CHECKPOINT and case.fault == "kill":
        return f"{case.place.replace(' ', '.')}: rank {victim} (did not come to|exited unexpectedly)"
    if case.place in CHECKPOINT and case.fault == "stop":
        seconds = f"{CHECKPOINT_TIMEOUT * case.scale:g}"
        return f"{case.place.replace(' ', '.')}: rank {victim} did not come to 'arguments checked' in {seconds} s"
    if case.fault == "kill":
        return f"rank {victim} exited unexpectedly"
    if case.fault == "stop":
        return f"rank {victim} did not send|for rank {victim}, which does not answer"
    if case.place in BESIDE and case.fault != "interrupt":
        return f"rank {victim}, action {victim}{BESIDE[case.place]}[0-3]: "
    name = {"raise": "ArithmeticError", "memory": "MemoryError", "interrupt": "KeyboardInterrupt"}[case.fault]
    if case.place in CHECKPOINT:  # a rank that comes to the checkpoint later hears it from the pipeline
        return f"({case.place.replace(' ', '.')}: )?rank {victim}: {name}"
    place = "[,:]"
    if case.place in ACTIONS:
        kind = {"forward hook": "F", "gradient hook": "[BW]"}.get(case.place, case.place)
        place = (
            f", action {victim}{kind}{MICROBATCH}"
            if case.place in ("F", "forward hook")
            else f", action {victim}{kind}"
        )
    return f"rank {victim}{place}.*{name}"


def check(cases: Sequence[Case], scale: float) -> None:
    for case, found in run_ranks([case._replace(scale=scale) for case in cases]):
        for rank, (error, before, after) in found.items():
            if rank == case.victim:
                assert error is not None, f"the rank that fails raises: {case}"
            elif error is None:  # it was done before the other one failed
                assert case.place == "close", f"rank {rank} did not raise: {case}"
            else:
                assert error.startswith("PipelineError: "), f"{error}\n{case}"
                assert re.search(expected(case), error), f"rank {rank}: {error}\n{case}"
            if case.fault != "stop":  # threads wait for a frozen rank as long as it is there
                assert after <= before, f"rank {rank} left something open: {before}, {after}: {case}"


def fits(place: str, fault: str) -> bool:
    """Before connecting a rank that raises is gone for the others, without a message of its own; a lack of memory is an
    exception as others but within an action, where it has a hint."""
    return fault in ("kill", "stop") or (place != "before connecting" and (fault != "memory" or place in ACTIONS))


SAMPLE = [
    Case("F", "kill", 4, 3),
    Case("between calls", "kill", 3, 1),
    Case("checkpoint load", "kill", 2, 0),
    Case("optimizer", "kill", 3, 2),
    Case("F", "stop", 3, 1, usual_close=True),
    Case("B", "interrupt", 3, 2),
    Case("checkpoint save", "raise", 3, 2),
    Case("B beside F", "raise", 3, 1),
]
# Which call of a pass a killed or stopped rank is in, no other one can tell
ALIKE = {(place, fault) for place in ("forward hook", "gradient hook") for fault in ("kill", "stop")}
ALIKE |= {("F beside B", "kill"), ("B beside F", "stop")}
ALIKE |= {(case.place, case.fault) for case in SAMPLE if not case.is_survived}
# Every fault at every place; and every place, and every fault, with two, three and four ranks
SIZES = {(place, fault): 2 + (i + j) % 3 for i, place in enumerate(PLACES) for j, fault in enumerate(FAULTS)}
SIZES |= {(place, fault): 2 + (i + j) % 3 for i, place in enumerate(BESIDE) for j, fault in enumerate(FAULTS)}
EVERY = [
    Case(place, fault, size, random.Random(f"{place}{fault}{size}").randrange(size))
    for (place, fault), size in SIZES.items()
    if (fits(place, fault) or place in BESIDE) and (place, fault) not in ALIKE
]
EVERY += [Case("checkpoint write", "stop", 3, 1), Case("checkpoint read", "stop", 2, 0)]
EVERY += [Case(place, "stop", 3, 0, hosts=True) for place in ("F", "between calls")]
EVERY += [Case("F", "kill", 4, 3)] * 3  # which rank hears of it first, and from which other, is a race
EVERY += [Case("F", "raise", 4, 3)] * 4


def with_same_ranks(cases: Sequence[Case]) -> list[list[Case]]:
    alone = [[case] for case in cases if not case.is_survived]
    together = ([case for case in cases if case.is_survived and case.size == size] for size in (2, 3, 4))
    return [*alone, *(part for part in together if part)]


def named(cases: Sequence[Case]) -> str:
    case = cases[0]
    if case.is_survived:
        return f"errors-{case.size}"
    return f"{case.place}-{case.fault}-{case.victim} of {case.size}{' host' * case.hosts}".replace(" ", "_")


@pytest.mark.dist
@pytest.mark.parametrize("cases", with_same_ranks(SAMPLE), ids=named)
def test_a_fault_is_known_to_all(cases: Sequence[Case]) -> None:
    patiently(partial(check, cases))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("cases", with_same_ranks(EVERY), ids=named)
def test_every_fault_is_known_to_all(cases: Sequence[Case]) -> None:
    patiently(partial(check, cases))
