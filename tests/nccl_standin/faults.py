"""A rank that fails while it trains over the stand-in: where, how, and what every other rank says."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

import zbkern
from tests.nccl_standin.ranks import Run
from tests.nccl_standin.scheduler import Ended
from zbkern.pipeline import Optimizer, Pipeline, PipelineError, schedules

TIMEOUT = 5.0
STEP = 2  # that the fault is in
WIDTH = 4


class Fault(NamedTuple):
    """kind: "kill", "freeze", "raise", "interrupt" or "memory". place: "F", "send" (after a header, before its tensor),
    "recv" (before a receive is posted), "connect", "optimizer" (before its step)."""

    kind: str
    place: str
    size: int
    victim: int


class Told(NamedTuple):
    """What a rank has come to know. after: seconds from the fault. goes_on: whether it has trained on then."""

    text: str
    after: float
    goes_on: bool
    loss: float | None


class Layer(nn.Module):
    def __init__(self, before: Any) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(WIDTH, WIDTH), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        return self.linear(x)


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(4 * size, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def run_with(fault: Fault, seed: int, queues: int = 32) -> tuple[Run, list[Told | None]]:
    """Trains until the fault and, where that is possible, on; by rank what it was told, None of one that is gone."""
    step, since = dict.fromkeys(range(fault.size), -1), 0.0
    happened = False

    def at(rank: int, place: str) -> None:
        nonlocal happened, since
        late = place == "connect" or step[rank] == STEP
        if happened or (rank, place) != (fault.victim, fault.place) or not late:
            return
        happened, since = True, run.scheduler.now
        if fault.kind == "kill":
            run.kill(rank)
        elif fault.kind == "freeze":
            run.freeze(rank)
        elif fault.kind == "interrupt":
            raise KeyboardInterrupt
        else:
            raise ArithmeticError("the cause") if fault.kind == "raise" else MemoryError("the cause")

    def on_call(rank: int, what: str) -> None:
        at(rank, what if step[rank] >= 0 else "connect" if what == "send" else "")

    run = Run(fault.size, queues, seed, on_call=on_call)

    def rank(transport: Any) -> Told:
        number, text, after = transport.rank, "", 0.0
        chunk = zbkern.convert(Layer(lambda: at(number, "F")))
        schedule = schedules.zb_h1(fault.size, 2 * fault.size)
        try:
            pipe = Pipeline([chunk], schedule, nn.functional.mse_loss, transport, timeout=TIMEOUT)
        except (PipelineError, ArithmeticError) as error:
            told = Told(str(error), run.scheduler.now - since, False, None)
            transport.close()  # as a Pipeline does with one of its own
            return told
        optimizer = Optimizer(torch.optim.SGD(chunk.parameters(), lr=0.1), pipe)
        loss, done = None, 0
        try:
            while done < STEP + 3:
                step[number] = done
                try:
                    optimizer.zero_grad()
                    loss = pipe.step(*batch(done, fault.size))
                    loss = None if loss is None else loss.item()
                    at(number, "optimizer")
                    optimizer.step()
                except Ended:
                    raise
                except BaseException as error:
                    if text:  # it was told: ranks cannot go on
                        return Told(text, after, False, None)
                    text, after = str(error) or type(error).__name__, run.scheduler.now - since
                    continue
                done += 1
            return Told(text, after, True, loss)
        finally:
            try:
                pipe.close()
            except PipelineError as error:
                if not text:
                    text, after = str(error), run.scheduler.now - since

    results = run.run(rank)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return run, results
