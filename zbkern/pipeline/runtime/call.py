"""A call of a Pipeline: checked here, announced to all ranks, run, and then ended or failed on all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from zbkern.pipeline.optimizer.step_boundary import StepBoundary
from zbkern.pipeline.runtime.arguments import check_hooks
from zbkern.pipeline.runtime.batch import (
    UnitArguments,
    check_same_batch,
    identity,
    name_with_side,
    rows_of,
    split_batch,
    warn_of_single_targets,
)
from zbkern.pipeline.runtime.failure import check_same_step, input_of, oom_hint
from zbkern.pipeline.runtime.forward_state import evaluation_mode
from zbkern.pipeline.runtime.loop import Loop
from zbkern.pipeline.runtime.measure.recorder import Recorder
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.replicas.data_parallel import Replicas
from zbkern.pipeline.runtime.slices.probe import kind_of_probes
from zbkern.pipeline.runtime.slices.sliced_batch import LossFn, check_sliceable
from zbkern.pipeline.runtime.stage import Stage
from zbkern.pipeline.runtime.step_schedules import StepSchedules
from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.failing_together import failing_together
from zbkern.pipeline.transport.mailbox import PipelineError, described
from zbkern.schedules.actions import Action
from zbkern.schedules.program import forwards
from zbkern.schedules.schedule import Schedule


class Calls:
    """The calls of a Pipeline, one after another, over one connection, and the loop that runs them.

    state: of the last call: "ended", also before the first; "running"; "failed", until ranks have connected anew; or
    "closed" for good. completed: how many calls have ended, which ranks compare after a failure.

    modules: this rank's, by chunk. The other arguments are those of the Pipeline, whose schedules are `schedules`.
    """

    transport: Transport  # these two once ranks are connected
    boundary: StepBoundary

    def __init__(
        self,
        modules: Mapping[int, torch.nn.Module],
        schedules: StepSchedules,
        loss_fn: LossFn | None,
        recorder: Recorder,
        options: StepOptions,
        fill: str,
        timeout: float,
    ) -> None:
        self.state, self.completed, self._steps = "ended", 0, 0
        self._given: tuple[Any, Any, Any] | None = None  # arguments of a step that are to be compared
        self._told: set[str] = set()
        self.timeout = timeout
        self.replicas = Replicas(modules, recorder.queue)
        losses = {len(schedules.first.placement) - 1: loss_fn}
        self.modules = self.replicas.modules
        stages = {chunk: Stage(part, chunk, recorder.queue, losses.get(chunk)) for chunk, part in self.modules.items()}
        self.loop = Loop(stages, self.replicas, recorder, options, fill, timeout)
        self.loop.use(schedules.first)
        self._schedules, self._loss_fn, self._fill = schedules, loss_fn, fill
        # hooks of these are checked in the first step; DDP has some of its own
        self._unchecked = [each for each in modules.values() if not isinstance(each, DistributedDataParallel)]
        self._process = os.getpid()

    def connect(self, transport: Transport, boundary: StepBoundary) -> None:
        """Before the first call: what it takes to the other ranks, and shares with an optimizer and other Pipelines."""
        self.transport = self.loop.transport = transport
        boundary.join(self)
        self.boundary = boundary

    # ---- a call, from its checks to its end

    def begin(self, call: str, arguments: tuple[Any, Any, Any], schedule: Schedule | None) -> None:
        """Begins a call on all ranks, or raises on all: they compare what they are about to do."""
        self._check_idle(call)
        self.boundary.release_reads()
        batch: Sequence[UnitArguments] = ()
        announced, wrong = call, None
        try:
            batch, announced = self._checked(call, arguments, schedule)
        except Exception as error:  # the other ranks will have begun: they are told why this one has not
            wrong = error
        if self.state == "failed":
            self._recover(announced if wrong is None else None)
        elif self.boundary.state == "broken":  # since another Pipeline of these chunks has failed
            with self.running():
                self.boundary.recover(self.transport, self.timeout)
        is_compared = call == "step" and self.transport.size > 1 and not self._steps & (self._steps + 1)  # 1, 2, 4, ...
        self._given = arguments if is_compared else None
        if is_compared and self.completed == 0:
            with self.running():
                self.compare_batches()
        if wrong is not None:
            self.fail(wrong)
            raise wrong
        try:
            self.transport.begin(announced)
        except PipelineError:  # a rank has failed that this one's last call needed nothing from
            self.fail()
            raise
        if call == "step":
            self.loop.recorder.clear()
        self.loop.begin(batch, self.loop.step + 1, call == "forward")
        self._steps += call == "step"
        self.boundary.calls = self
        if self.replicas.agreement:
            with self.running():
                pairs = zip(self.loop.schedule.units, batch, strict=True)  # the first of a kind has more passes
                kinds = [kind_of_probes(unit.slices > 1, each.inputs, each.side, each.tokens) for unit, each in pairs]
                passes = self.loop.passes, kinds
                self.replicas.agreement.check(call, passes, len(batch), self.transport, self.timeout)

    def compare_batches(self) -> None:
        """Has rank 0 warn where ranks were given other batches, in the first step and some later ones, as ranks that
        draw their batches may begin alike; collective. The first call begins with it, later ones end with it, for it
        waits for all ranks and for the GPU."""
        if self._given is None:
            return
        arguments, self._given = self._given, None
        given = tuple(map(identity, arguments)), (rows_of(arguments[0]), rows_of(arguments[1]))
        batches = self.transport.gather(given, self.timeout, "step")
        if self.transport.rank == 0:
            self._told |= check_same_batch([given for given, _ in batches], self._told)
            if self._steps < 2:
                schedule = self.loop.schedule
                inputs, targets = (batches[schedule.placement[end]][1][end] for end in (0, -1))
                warn_of_single_targets(inputs, targets, schedule.microbatches)

    @contextmanager
    def running(self) -> Iterator[None]:
        """What raises inside is a PipelineError on all ranks."""
        before, self.state = self.state, "running"
        try:
            with failing_together(self.transport, self.fail, self._where):
                yield
                self.transport.begin_action("none")
                self.transport.end()
        finally:
            if self.state == "running":
                self.state = before

    def run_forwards(self, call: str, arguments: tuple[Any, Any, Any], schedule: Schedule | None) -> None:
        """A call of forwards alone, in evaluation mode. Timelines and samples stay those of the last step."""
        loop, last = self.loop, self.loop.schedule
        loop.recorder.paused = True
        try:
            self.begin(call, arguments, schedule)
            with self.running():
                self.boundary.validate()
                with torch.no_grad(), evaluation_mode(self.modules.values()):
                    loop.run([(action,) for action in forwards(loop.stages, len(loop.schedule.units))])
        finally:
            loop.recorder.paused = False
            loop.use(last)
            self.replicas.discard()

    def end(self) -> list[Any]:
        """After the last action: what the last chunk has left."""
        self.completed += 1
        return self.loop.end()

    def fail(self, error: BaseException | None = None) -> None:
        """Drops what was begun; the next call connects ranks anew. error: one of this rank that others are to hear."""
        self.state = "closed" if self.state == "closed" else "failed"
        self.boundary.fail()
        self.loop.reset()
        for stage in self.loop.stages.values():
            stage.reruns = None  # not all ranks may have had a first backward; all have the next one
        if error is not None:
            known = isinstance(error, PipelineError)
            self.transport.fail(str(error) if known else f"rank {self.transport.rank}: {described(error)}")

    def close(self) -> None:
        """Ends the connection, once the optimizer's last step is validated. Raises as `Pipeline.close`."""
        if os.getpid() != self._process:  # of a forked child: nothing of this is its own
            return
        before, self.state = self.state, "closed"
        try:
            if before not in ("failed", "closed"):
                self.transport.begin("close")
                if self.boundary.pending is not None:  # ranks that still wait for this one hear that it closes
                    self.transport.announce()
                self.boundary.validate()
        finally:
            if before != "closed":
                self.boundary.leave(self)
            self.state = "closed"
            self.transport.close()
            self.loop.use_ledger(None)
        if before not in ("failed", "closed") and self.transport.failure is not None:
            raise PipelineError(self.transport.failure)

    # ---- what ranks tell each other besides

    def gather(self, value: Any) -> list[Any]:
        """As `Pipeline.gather`."""
        self._check_open("gather")
        with self.running():
            return self.transport.gather(value, self.timeout)

    def broadcast(self, source: int, make: Callable[[], Any]) -> Any:
        """What `make` returns on the rank `source`, a pytree of tensors, on every rank; collective.

        When it returns all ranks have it. Raises PipelineError as a step does, also where `make` raises.
        """
        self._check_open("broadcast")
        with self.running():
            made = make() if self.transport.rank == source else None
            received = self.transport.broadcast(source, made, self.timeout)
            if (device := self.loop.recorder.device).type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            self.transport.gather(None, self.timeout)
            return received

    def on_any_replica(self, flag: bool) -> bool:
        """Whether the flag is true in this pipeline, on all its ranks, or in a replica of it; collective."""
        with self.running():
            return self.replicas.agreement.any(flag, self.transport, self.timeout)

    # ---- checks before a call, and what follows a failure

    def _check_open(self, call: str) -> None:
        if self.state == "closed":
            raise RuntimeError(f"Pipeline.{call}: this pipeline was closed; construct another, on every rank")

    def _check_idle(self, call: str) -> None:
        """Raises RuntimeError or ValueError where no step can begin on this rank, whatever it is given."""
        self._check_open(call)
        queue = self.loop.queue
        if self.state == "running":
            raise RuntimeError(
                f"Pipeline.{call}: a call of this pipeline is running; make one at a time: none in another thread, in "
                "loss_fn or in a module"
            )
        if queue.pending():
            raise RuntimeError(
                f"Pipeline.{call}: {queue.pending()} W of an earlier step are still pending ({queue}); "
                "run or discard pipe.queue first"
            )
        if self._fill == "eager" and queue.regather_inputs:
            raise ValueError(
                f'Pipeline.{call}: with fill="eager" ranks run W in different orders, and with queue.regather_inputs '
                'W communicates; use fill="planned", or set pipe.queue.regather_inputs = False'
            )

    def _checked(
        self, call: str, arguments: tuple[Any, Any, Any], schedule: Schedule | None
    ) -> tuple[Sequence[UnitArguments], str]:
        """The batch of a call, in units, and what ranks compare: the call, its schedule and side inputs.

        From now on the loop has the schedule. Raises for arguments that do not fit.
        """
        if call == "step":
            check_hooks(self._unchecked)
            self._unchecked = []
        chosen = self._schedules.choose(call, schedule, arguments)
        if chosen.is_sliced and not self.loop.schedule.is_sliced:
            check_sliceable(self.modules.values())
        batch = split_batch(call, arguments, chosen, self.modules, self._loss_fn)
        count = "elements" if chosen.is_sliced else "rows"
        sides = [unit.side for unit in batch]
        announced = name_with_side(call + self._schedules.name(chosen), sides, count)
        self.loop.use(chosen)
        self.boundary.check_others(call)
        return batch, announced

    def _recover(self, call: str | None) -> None:
        """Connects anew after a failure, with all ranks about to make the same call; collective."""
        if self.replicas:  # reductions of the failed step are under way, and other replicas know nothing
            raise PipelineError("a pipeline with data-parallel stages cannot go on after a failure: restart all")
        self.transport.reopen()
        with self.running():  # what is wrong now is what all ranks hear of until they connect anew
            self.boundary.recover(self.transport, self.timeout)
            calls = self.transport.gather((call, self.completed), self.timeout)
            self.completed = max(completed for _, completed in calls)
            check_same_step(calls)
        self.state, self.loop.step, self._steps = "ended", 0, 0  # every rank counts messages anew

    def _where(self, error: BaseException) -> tuple[str, str]:
        """What the message of an error says before and after its own text."""
        action, loop = self.transport.action, self.loop
        unit = loop.schedule.units[action.unit] if isinstance(action, Action) else None
        slice_of = f" ({unit})" if unit is not None and unit.slices > 1 else ""
        hint = oom_hint(error, loop.max_in_flight, loop.in_flight, loop.queue, loop.recorder.device)
        return f"action {action}{slice_of}", hint or input_of(
            error, action, loop.schedule.placement, loop.forward_input
        )
