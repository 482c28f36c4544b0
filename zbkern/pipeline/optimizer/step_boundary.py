"""StepBoundary: whether the last optimizer step of some chunks is over, for all who read or write their weights.

validated --begin, hold--> open: the step waits for the norm over all ranks, or
                           early: this rank has done it before it knew that norm, and may have to take it back
open, early --conclude--> validated: its weights are final
any --fail--> broken: a failure may have left it unfinished, until ranks `recover`, or weights are loaded (`forget`)
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zbkern.pipeline.optimizer import weight_reads
from zbkern.pipeline.optimizer.norm_chain import NormChain
from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.failing_together import failing_together
from zbkern.pipeline.transport.mailbox import PipelineError
from zbkern.schedules.warmup import rank_order

logger = logging.getLogger("zbkern")

_BOUNDARIES = WeakIdKeyDictionary()  # by module or parameter; Pipelines and Optimizers keep the boundaries alive


class StepBoundary:
    """What the Pipelines of some chunks and the Optimizer of their parameters share.

    joint: False for that of an Optimizer that was made without a Pipeline: Pipelines of its parameters only look
    whether a step is pending.
    """

    def __init__(self, joint: bool = True) -> None:
        self.joint = joint
        self.optimizer: Any = None  # the zbkern.pipeline.Optimizer
        self.chain: NormChain | None = None  # along which that optimizer's norms are added up
        self.calls: Any = None  # those of the Pipeline that ran last, whose connection the optimizer's messages take
        self.open_pipes = 0
        self.order: list[int] = []  # the ranks in the order of the model
        self.others: weakref.WeakSet[StepBoundary] = weakref.WeakSet()  # not joint, of some of the same parameters
        self.steps = 0  # optimizer steps that were called, as many on all ranks
        self.pending: Any = None  # a PendingStep
        self.changed = False  # whether the last step was clipped or skipped, and forwards that ran before are void
        self._is_broken = False
        self._concluded = 0  # the last step that was
        self._total: Tensor | None = None  # its sum of squares over all ranks
        self._has_told = False  # the log that steps wait for the norm

    def mark(self, things: Iterable[Any]) -> None:
        """Makes this a boundary of these modules and parameters."""
        for thing in things:
            boundaries = _BOUNDARIES.setdefault(thing, weakref.WeakSet())
            for other in boundaries:
                if self.joint is not other.joint:
                    joint, alone = (self, other) if self.joint else (other, self)
                    joint.others.add(alone)
            boundaries.add(self)

    @property
    def state(self) -> str:
        if self._is_broken:
            return "broken"
        if self.pending is None:
            return "validated"
        return "early" if self.pending.has_stepped else "open"

    def join(self, calls: Any) -> None:
        """Adds a Pipeline, by its calls; it will `leave`.

        Raises ValueError where open Pipelines have another order of ranks: the partial norms travel along it.
        """
        order = rank_order(calls.loop.schedule)
        if self.open_pipes and self.order != order:
            raise ValueError(
                f"Pipeline: the ranks of these chunks are in the order {self.order} in an open Pipeline; got {order}; "
                "close it first"
            )
        self.order = order
        self.open_pipes += 1
        self.calls = self.calls or calls

    def take(self, optimizer: Any, chain: NormChain, parameters: Iterable[Tensor]) -> None:
        """Has this optimizer conclude the steps of these parameters from now on."""
        self.optimizer, self.chain = optimizer, chain
        self.mark(parameters)

    def free(self) -> None:
        """Parts from the optimizer, if there is one, which goes on without a Pipeline."""
        if self.optimizer is not None:
            self.optimizer._boundary = StepBoundary(joint=False)
            self.optimizer._boundary.take(self.optimizer, self.chain, self.optimizer.weights())
        self.optimizer = self.chain = self.pending = None
        self.steps = self._concluded = 0

    def check_open(self) -> None:
        """Raises RuntimeError where a step of the optimizer would have no connection to take."""
        if self.joint and not self.open_pipes and self.chain is not None and self.chain.transport.size > 1:
            raise RuntimeError(
                "Optimizer.step: all Pipelines of this Optimizer were closed; call pipe.attach(optimizer) of another "
                "Pipeline of these chunks, on every rank, or make an Optimizer with that one"
            )

    def begin(self) -> int:
        """Begins the optimizer's next step, and returns its number. Ranks in another call then hear of this one."""
        assert self.chain is not None
        if self.calls is not None:
            self.chain.transport = self.calls.transport
        self.chain.transport.begin(f"optimizer step {self.steps + 1}")
        self.steps += 1
        return self.steps

    def hold(self, step: Any, total: Tensor) -> None:
        """The step that was begun waits for the sum over all ranks. total: the sum up to this rank; where it is that of
        all, the others hear of it, and the step is concluded at once.
        """
        assert self.chain is not None
        self.pending = step
        if self.chain.ends_here:
            self.chain.send_total(self.steps, total)
            self.conclude(total)

    def watch_reads(self) -> None:
        """Until a Pipeline's next call, torch functions of this thread that take weights of the step validate it."""
        if self.pending is not None and not weight_reads.watch(self):
            if not self._has_told:
                logger.info(
                    "Optimizer.step waits for the norm over all ranks, because a torch function mode is on: what reads "
                    "weights after it would read ones that may be taken back"
                )
            self._has_told = True
            self.validate()

    def release_reads(self) -> None:
        """Ends `watch_reads`: a call of a Pipeline has begun, which knows that weights may not be final."""
        weight_reads.release(self)

    def validate(self) -> None:
        """Waits for the norm over all ranks, and concludes the last step; no-op where it is validated."""
        weight_reads.release(self)
        if self.pending is not None:
            assert self.chain is not None
            with self.failing_together():
                total = self.chain.receive_total(self.steps)  # where the chain ends, the step is concluded at once
                self.pending.check_values()
                self.conclude(total)

    def try_validate(self) -> bool:
        """Validates if that is possible without waiting; True when no step is pending."""
        if self.pending is not None and self.chain is not None and self.chain.total_is_here(self.steps):
            self.validate()
        return self.pending is None

    def conclude(self, total: Tensor) -> None:
        """Ends the pending step, given the sum of squares of all ranks."""
        step, self.pending, self._total = self.pending, None, total
        self.changed = self.optimizer._conclude(step, total)
        self._concluded = self.steps

    def forget(self) -> None:
        """Drops the pending step, on all ranks, because weights and states are about to be loaded."""
        weight_reads.release(self)
        self.pending, self._concluded = None, self.steps
        self.changed = self._is_broken = False

    def fail(self) -> None:
        """A failure may have left the last step unfinished."""
        self._is_broken = True

    def recover(self, transport: Transport, timeout: float) -> None:
        """Concludes the last step after a failure, over a transport that works; collective.

        Raises PipelineError on all ranks if that is impossible: some have stepped, and others did not get that far.
        """
        if self.chain is not None:
            self.chain.transport = transport
            state = None if self._concluded == self.steps else "pending" if self.pending is not None else "broken"
            total = None if self._total is None else self._total.tolist()
            ranks = transport.gather((self.steps, state, total), timeout)
            newest = max(steps for steps, _, _ in ranks)
            known = [total for steps, state, total in ranks if (steps, state) == (newest, None)]
            if not known or "broken" in {state for _, state, _ in ranks}:  # nobody knows it before all have begun it
                raise PipelineError(
                    f"optimizer step {newest} may have been done on some ranks only when a rank failed; load a "
                    "checkpoint, or start again where there is none yet"
                )
            if self.pending is not None:
                self.conclude(torch.tensor(known[0], dtype=torch.float64, device=self.optimizer._device))
            self.steps = self._concluded = newest
        self._is_broken = False

    def failing_together(self) -> AbstractContextManager[None]:
        """What raises inside is a PipelineError on all ranks."""
        assert self.chain is not None
        return failing_together(self.chain.transport, self._fail_call, lambda _: (f"optimizer step {self.steps}", ""))

    def _fail_call(self) -> None:
        self.fail()
        if self.calls is not None:
            self.calls.fail()

    def check_others(self, call: str) -> None:
        """Raises RuntimeError where a step is pending that this boundary cannot conclude."""
        if any(other.pending is not None for other in self.others):
            raise RuntimeError(
                f"Pipeline.{call}: an Optimizer that was made without this Pipeline has a step of these parameters "
                "that is not validated; make it with the Pipeline, or call Optimizer.validate() first, on every rank"
            )

    def reload_states(self) -> None:
        """Brings back what `Optimizer.offload_states` has moved, before gradients are added to it."""
        for boundary in (self, *self.others):
            if boundary.optimizer is not None:
                boundary.optimizer.reload_states()

    def leave(self, calls: Any) -> None:
        """Removes a Pipeline that has ended."""
        weight_reads.release(self)
        self.open_pipes -= 1
        if self.calls is calls:
            self.calls = None
        if not self.open_pipes and self._concluded != self.steps:
            logger.warning(
                "a Pipeline was closed after a failure, and optimizer step %d was not validated: some ranks may have "
                "done it, and others not; load a checkpoint before these weights are used",
                self.steps,
            )


def boundary_of(modules: Iterable[nn.Module]) -> StepBoundary:
    """The boundary of open Pipelines that have these chunks already, or a new one.

    Raises ValueError where several boundaries have some of these chunks each: gradients have one norm.
    """
    modules = [*modules]
    used = [boundary for boundary in boundaries_of(modules) if boundary.open_pipes]
    if len(used) > 1:
        raise ValueError(
            f"Pipeline: {len(used)} other Pipelines have some of these chunks each, and gradients have one norm; close "
            "them first, or make the Pipeline of all these chunks first"
        )
    joint = used[0] if used else StepBoundary()
    joint.mark(_things_of(modules))
    return joint


def boundaries_of(modules: Iterable[nn.Module]) -> list[StepBoundary]:
    """All boundaries of these modules and their parameters, also those that are not joint."""
    return [*{boundary: None for thing in _things_of(modules) for boundary in _BOUNDARIES.get(thing, ())}]


def _things_of(modules: Iterable[nn.Module]) -> list[Any]:
    modules = [*modules]
    return [*modules, *(parameter for module in modules for parameter in module.parameters())]
