"""Pipeline: what users call. A call is checked, begun on all ranks, run by the `Loop`, and ends or fails on all."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zbkern.pipeline.runtime.arguments import (
    Microbatch,
    check,
    check_place,
    check_same_batch,
    device_of,
    identity,
    module_list,
    name_with_side,
    split_batch,
)
from zbkern.pipeline.runtime.failure import check_same_step, failing_together, input_of, oom_hint
from zbkern.pipeline.runtime.forward_state import ForwardState, evaluation_mode
from zbkern.pipeline.runtime.loop import Loop
from zbkern.pipeline.runtime.measure.recorder import Recorded, Recorder, timeline_of
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.replicas.agreement import number_of
from zbkern.pipeline.runtime.replicas.data_parallel import Replicas, check_apart
from zbkern.pipeline.runtime.replicas.tied_weights import TiedWeights, all_ties
from zbkern.pipeline.runtime.slices.sliced_batch import LossFn, check_sliceable, tells_ends
from zbkern.pipeline.runtime.stage import Stage
from zbkern.pipeline.runtime.step_boundary import StepBoundary, boundary_of
from zbkern.pipeline.runtime.step_schedules import StepSchedules
from zbkern.pipeline.transport.base import PipelineError, Transport, total_tag
from zbkern.pipeline.transport.connect import (
    check_same_plan,
    closing_on_error,
    connect,
    place,
    telling_on_error,
)
from zbkern.pipeline.transport.mailbox import described
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.simulation.drift import Drift, compare, in_seconds
from zbkern.planning.simulation.timeline import Sample, Timeline
from zbkern.schedules.program import forwards
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.warmup import rank_order
from zbkern.wgrad import WGradQueue


class Pipeline:
    """This rank's part of a pipeline: its chunks of the model, driven by a schedule.

    Args:
        modules: this rank's chunks in model order; convert them (`zbkern.convert`) so that their W can wait. They may
            then be wrapped in DistributedDataParallel or sharded by `fully_shard`, over ranks that hold the same chunks
            of other pipelines: gradients are reduced once a step, under W (docs/data_parallel.md).
        schedule: of all steps that are given no other one; or a function that makes it for a number of microbatches,
            such as `lambda n: zb_v(4, n)`.
        loss_fn: called as loss_fn(output, target) for one microbatch on the last chunk's rank, None will do elsewhere.
        group: the pipeline's ranks, None for all; or a Transport.
        fill: "planned" or "eager".
        tied: {name: parameter} of weights that several ranks hold: those that give the same name get the sum of their
            gradients; a module may declare its own in an attribute `tied_parameters`, as those of `cut` do.
        timeout: seconds to wait for one message before the step fails; to connect, ranks wait as long as
            init_process_group was given.
        options: what else a step does (`StepOptions`).

    Raises ScheduleError or ValueError when modules, schedule and group do not fit together, PipelineError when a rank
    does not come.

    A step that fails raises PipelineError on every rank, with one message. Gradients are then undefined: zero them, and
    call `step` again on every rank, unless a process was lost.
    """

    def __init__(
        self,
        modules: torch.nn.Module | Iterable[torch.nn.Module],
        schedule: Schedule | Callable[[int], Schedule],
        loss_fn: LossFn | None,
        group: dist.ProcessGroup | Transport | None = None,
        device: torch.device | str | None = None,
        *,
        fill: str = "planned",
        tied: Mapping[str, Tensor] | None = None,
        timeout: float = 1800.0,
        options: StepOptions | None = None,
    ) -> None:
        with telling_on_error(group):
            modules = module_list("Pipeline", modules)
            options = StepOptions() if options is None else options
            check(fill, tied, timeout)
            rank, size = place(group)
            self._schedules = StepSchedules(schedule, size, fill, options)
            schedule = self._schedules.first
            check_place(schedule, rank, size, modules, loss_fn)
            self.fill = fill
            self.timeout = timeout
            self._checked_steps = math.inf if options.check_values else 2  # to come
            self.device = device_of(device, modules)
            self.queue = WGradQueue(max_bytes=options.max_wgrad_bytes)
            by_chunk = dict(zip(schedule.chunks_of(rank), modules, strict=True))
            check_apart(by_chunk, group)
            self._replicas = Replicas(by_chunk, self.queue)
            self._loss_fn = loss_fn
            self.recorder = Recorder(rank, self.device, self.queue, options.record)
            losses = {len(schedule.placement) - 1: loss_fn}
            parts = self._replicas.modules.items()
            self.stages = {chunk: Stage(part, chunk, self.queue, losses.get(chunk)) for chunk, part in parts}
            self.loop = Loop(self.stages, self._replicas, self.recorder, options, fill, timeout)
            self.loop.use(schedule)
            self.rank = rank
            copies = all_ties(modules, tied)
            self.tied = {name: parameters[0] for name, parameters in copies.items()}
        self._transport = self.loop.transport = connect(group, self.device)
        with closing_on_error(self._transport, self._transport is not group, "its Pipeline"):
            check_same_plan(schedule, self._transport)
            self.boundary = boundary_of(self.modules.values())
            if not self.boundary.broken:
                self.boundary.validate()  # before weights are compared
            self._tied = TiedWeights(copies, self._transport, self.modules)
            self.boundary.join(self, rank_order(schedule))
        self._calls = 0  # of step and evaluate, since ranks were connected
        self.completed = 0  # calls of step and evaluate, for ranks to compare after a failure
        self._failed = self._closed = self._running = False
        self._process = os.getpid()

    def step(
        self, inputs: Any = None, targets: Any = None, side: Any = None, schedule: Schedule | None = None
    ) -> Tensor | None:
        """One step: forward and backward of all microbatches; gradients are then in `.grad` as after `backward()`.

        inputs: needed on the first chunk's rank; targets: on the last chunk's: pytrees of tensors that are split along
        dimension 0 into `schedule.microbatches` equal parts, or lists of as many parts already split. side: what every
        chunk needs from the batch besides, positions and masks, say: {name: tensor}, or a list of them, on every rank;
        each chunk gets its microbatch's as keyword arguments, and no rank sends them. With it `inputs` may be None,
        None, for no other argument. schedule: of this step alone, any of the same chunks in the same places, the same
        on every rank. Returns the mean loss over microbatches on the last chunk's rank, None elsewhere. Gradients add
        up over steps, as they do over calls of `backward()`. With slices, all tensors whose dimension 1 is as long as
        the sequence are cut along it, and the loss is that of whole sequences (docs/long_context.md).
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("Pipeline.step: gradients are off (torch.no_grad); call evaluate for the loss alone")
        self.boundary.reload_states()
        self._begin("step", (inputs, targets, side), schedule)
        self.queue.check_values = self._checked_steps > 0
        self._checked_steps -= 1
        self._replicas.begin(len(self.schedule.units))
        with self._failing_together():
            begun = self._run_ahead()  # before which, and after, an optimizer writes weights
            self._tied.begin()
            # layers may keep what they make of weights, but where FSDP2 frees these and gathers them anew
            self.queue.weight_copies = None if self._replicas.frees_weights else WeakIdKeyDictionary()
            try:
                self.loop.run(self.loop.program[begun:])
            finally:
                self.queue.weight_copies = None
            self._transport.begin_action("reduction over replicas")
            self._replicas.finish()
            self._transport.begin_action("sum over tied weights")
            self._tied.sum_gradients(self.loop.step, self.timeout)
        return self._loss()

    def evaluate(
        self, inputs: Any = None, targets: Any = None, side: Any = None, schedule: Schedule | None = None
    ) -> Tensor | None:
        """The mean loss of the same arguments, forward only, with the modules in evaluation mode meanwhile.

        Timelines and samples stay those of the last step.
        """
        self._run_forwards("evaluate", (inputs, targets, side), schedule)
        return self._loss()

    def forward(
        self, inputs: Any = None, targets: Any = None, side: Any = None, schedule: Schedule | None = None
    ) -> list[Any] | None:
        """What the last chunk returns for each microbatch, in the caller's order, or with targets what loss_fn does.

        Forward only and in evaluation mode, with the arguments of `step`. loss_fn may return anything then, such as the
        log-probability of every token. A list on the last chunk's rank, None elsewhere.
        """
        self._run_forwards("forward", (inputs, targets, side), schedule)
        self.completed += 1
        results = self.loop.end()
        return results if len(self.schedule.placement) - 1 in self.stages else None

    def _run_forwards(self, call: str, arguments: tuple[Any, Any, Any], schedule: Schedule | None) -> None:
        last, self.recorder.paused = self.schedule, True
        try:
            self._begin(call, arguments, schedule)
            with self._failing_together():
                self.boundary.validate()
                with torch.no_grad(), evaluation_mode(self.modules.values()):
                    self.loop.run([(action,) for action in forwards(self.stages, len(self.schedule.units))])
        finally:
            self.recorder.paused = False
            self.loop.use(last)
            self._replicas.discard()

    @property
    def schedule(self) -> Schedule:
        """The schedule of the last step."""
        return self.loop.schedule

    @property
    def modules(self) -> dict[int, torch.nn.Module]:
        """This rank's modules by the number of their chunk."""
        return {chunk: stage.module for chunk, stage in self.stages.items()}

    @property
    def transport(self) -> Transport:
        """The connection to the other ranks."""
        return self._transport

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The Optimizer of these modules, of all their Pipelines; None where there is none."""
        return self.boundary.optimizer

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Has steps of this Pipeline wait for those of an Optimizer that was made with a process group; on every rank.

        One that was made with a Pipeline belongs to all Pipelines of the same modules already. Raises ValueError where
        these modules have another one, TypeError for what is none.
        """
        boundary = getattr(optimizer, "boundary", None)
        if not isinstance(boundary, StepBoundary):
            raise TypeError(
                f"Pipeline.attach: optimizer must be a zbkern.pipeline.Optimizer; got {type(optimizer).__name__}"
            )
        if self.optimizer not in (None, optimizer):
            raise ValueError(
                "Pipeline.attach: this Pipeline has another Optimizer already, and gradients have one norm: give it "
                "all torch optimizers in a list; call pipe.detach() on every rank to replace it"
            )
        if boundary is not self.boundary:
            self.boundary.leave(self)
            self.boundary = boundary
            boundary.join(self, rank_order(self.schedule))

    def detach(self) -> None:
        """Frees the modules of their optimizer, once its last step is validated; on every rank. No-op without one."""
        if not self._failed:
            self.boundary.validate()
        self.boundary.free()

    @property
    def last_timeline(self) -> Timeline:
        """When this rank's actions of the last step ran, in seconds since its first; other ranks' rows are empty."""
        ranks = [Recorded() for _ in range(self.schedule.ranks)]
        ranks[self.rank] = Recorded(self.recorder.events(), copies=self.recorder.copies())
        return timeline_of(self.schedule, ranks)

    def gather(self, value: Any) -> list[Any]:
        """One value of every rank, by rank: numbers, strings, containers and NamedTuples of them; collective.

        Raises PipelineError as a step does.
        """
        self._check_open("gather")
        with self._failing_together():
            return self._transport.gather(value, self.timeout)

    def on_any_replica(self, flag: bool) -> bool:
        """Whether the flag is true in this pipeline, on all its ranks, or in a replica of it; collective."""
        with self._failing_together():
            return self._replicas.agreement.any(flag, self._transport, self.timeout)

    def broadcast(self, source: int, make: Callable[[], Any]) -> Any:
        """What `make` returns on the rank `source`, a pytree of tensors, on every rank; collective.

        When it returns all ranks have it. Raises PipelineError as a step does, also where `make` raises.
        """
        self._check_open("broadcast")
        with self._failing_together():
            made = make() if self.rank == source else None
            received = self._transport.broadcast(source, made, self.timeout)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            self._transport.gather(None, self.timeout)
            return received

    def auxiliary_losses(self) -> dict[str, float]:
        """What modules have added to the loss of the last step, or evaluation, with `add_loss`: {name: value}, over all
        ranks; collective. They are not in what `step` and `evaluate` return.
        """
        totals: dict[str, float] = {}
        for of_stage in itertools.chain(*self.gather([stage.losses.totals() for stage in self.stages.values()])):
            totals.update({name: totals.get(name, 0.0) + value for name, value in of_stage.items()})
        return totals

    def gather_timeline(self) -> Timeline:
        """The last step of all ranks on one clock (the ranks of one machine share it), in seconds; collective.

        Where the schedule has R, O or L, `peak_memory` is what microbatches held at most on each rank that has them, in
        bytes.
        """
        return timeline_of(self.schedule, self.gather(self.recorder.recorded()))

    @property
    def samples(self) -> list[Sample]:
        """With record=True: after every action of the last step, what the queue and the device's memory held."""
        return self.recorder.samples()

    def abandon(self) -> None:
        """Drops what was begun, after a failure; the next step opens the connections anew."""
        self._failed = self.boundary.broken = True
        self.loop.reset()

    def close(self) -> None:
        """Validates the optimizer's last step, and ends the connections; on every rank, or as a context manager.

        Raises PipelineError where another rank has failed since this one's last call.
        """
        if os.getpid() != self._process:  # of a forked child: nothing of this is its own
            return
        try:
            if not self._failed and not self._closed:
                self._transport.begin("close")
                if self.boundary.pending is not None:  # ranks that still wait for this one hear that it closes
                    self._transport.announce()
                self.boundary.validate()
        except PipelineError:
            self._failed = True
            raise
        finally:
            if not self._closed:
                self.boundary.leave(self)
            self._closed = True
            self._transport.close()
            self.loop.use_ledger(None)
        if not self._failed and self._transport.failure is not None:
            self._failed = True
            raise PipelineError(self._transport.failure)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._failed = self.boundary.broken = True
            known = isinstance(error, PipelineError)
            self._transport.fail(str(error) if known else f"rank {self.rank}: {described(error)}")
        self.close()

    def drift(self, costs: Costs | None = None, planned: Timeline | None = None) -> Drift:
        """The last step of all ranks next to its plan: where the time went; collective.

        costs: what was planned with, in milliseconds, as `profile` gives them; the step's own medians when None.
        planned: for a step of packs, its plan's timeline; a simulation would take a pack for one sequence.
        """
        return compare(self.gather_timeline(), None if costs is None else in_seconds(costs), planned)

    # ---- a call, from its checks to its end

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"Pipeline.{call}: this pipeline was closed; construct another, on every rank")

    def _check_idle(self, call: str) -> None:
        """Raises RuntimeError or ValueError where no step can begin on this rank, whatever it is given."""
        self._check_open(call)
        if self._running:
            raise RuntimeError(
                f"Pipeline.{call}: a call of this pipeline is running; make one at a time: none in another thread, in "
                "loss_fn or in a module"
            )
        if self.queue.pending():
            raise RuntimeError(
                f"Pipeline.{call}: {self.queue.pending()} W of an earlier step are still pending ({self.queue}); "
                "run or discard pipe.queue first"
            )
        if self.fill == "eager" and self.queue.regather_inputs:
            raise ValueError(
                f'Pipeline.{call}: with fill="eager" ranks run W in different orders, and with queue.regather_inputs '
                'W communicates; use fill="planned", or set pipe.queue.regather_inputs = False'
            )

    def _prepare(
        self, call: str, arguments: tuple[Any, Any, Any], schedule: Schedule | None
    ) -> tuple[Sequence[Microbatch], str]:
        """The batch of a call, in microbatches, and what ranks compare: the call, its schedule and side inputs.

        From now on the loop has the schedule. Raises for arguments that do not fit.
        """
        chosen = self._schedules.choose(call, schedule, arguments)
        if chosen.is_sliced and not self.schedule.is_sliced:
            check_sliceable(self.modules.values())
        batch = split_batch(call, arguments, chosen, self.modules, self._loss_fn)
        count = "elements" if chosen.is_sliced else "rows"
        sides = [microbatch.side for microbatch in batch]
        announced = name_with_side(call + self._schedules.name(chosen), sides, count)
        self.loop.use(chosen)
        self.boundary.check_others(call)
        return batch, announced

    def _begin(self, call: str, arguments: tuple[Any, Any, Any], schedule: Schedule | None) -> None:
        """Begins a call on all ranks, or raises on all: ranks compare what they are about to do."""
        self._check_idle(call)
        self.boundary.release_reads()
        batch: Sequence[Microbatch] = ()
        announced, wrong = call, None
        try:
            batch, announced = self._prepare(call, arguments, schedule)
        except Exception as error:  # the other ranks will have begun: they are told why this one has not
            wrong = error
        if self._failed:
            self._recover(announced if wrong is None else None)
        elif self.boundary.broken:  # since another Pipeline of these chunks has failed
            self.boundary.recover(self._transport, self.timeout)
        if call == "step" and self._calls == 0 and self.schedule.ranks > 1:
            batches = self.gather((identity(arguments[0]), identity(arguments[1])))
            if self.rank == 0:
                check_same_batch(batches)
        if wrong is not None:
            self.abandon()
            self._transport.fail(f"rank {self.rank}: {described(wrong)}")
            raise wrong
        try:
            self._transport.begin(announced)
        except PipelineError:  # a rank has failed that this one's last call needed nothing from
            self.abandon()
            raise
        if call == "step":
            self.recorder.clear()
        self._calls += 1
        self.loop.begin(batch, 2 * self._calls, call == "forward")
        self.boundary.pipe = self
        if self._replicas.agreement:
            with self._failing_together():
                pairs = zip(self.schedule.units, batch, strict=True)  # a first slice or pack has more forwards
                kinds = [(unit.slices > 1, tells_ends(each.side)) for unit, each in pairs]
                passes = number_of((self.loop.passes, kinds))
                self._replicas.agreement.check(call, passes, len(self.schedule.units), self._transport, self.timeout)

    def _recover(self, call: str | None) -> None:
        """Connects anew after a failure, with all ranks about to make the same call; collective."""
        if self._replicas:  # reductions of the failed step are under way, and other replicas know nothing
            raise PipelineError("a pipeline with data-parallel stages cannot go on after a failure: restart all")
        self._transport.reopen()
        self.boundary.recover(self._transport, self.timeout)
        calls = self.gather((call, self.completed))
        self.completed = max(completed for _, completed in calls)
        check_same_step(calls)
        self._failed, self._calls = False, 0  # every rank counts anew

    def _run_ahead(self) -> int:
        """Runs forwards until the last optimizer step is validated; how many of them count.

        All ranks hear of the same total. Where it changes the weights, all start over, with other tags.
        """
        before, begun, boundary = None, 0, self.boundary
        while begun < self.loop.max_ahead and boundary.state == "early":
            forward = self.loop.program[begun]
            if not self._replicas.agreement:  # else some pipelines would run fewer forwards, which hear sooner
                # a rank that hears of the total before this one may start over, and never send what this one waits for
                self.loop.wait_for_input(forward[0], total_tag(boundary.steps))
                if boundary.try_validate():
                    break
            before = before or ForwardState([*self.modules.values()], self.device)
            self.loop.run([forward])
            begun += 1
        boundary.validate()
        if not boundary.changed:
            return begun
        self.loop.step += 1  # messages of forwards before, sent or to come, have the old number
        self._transport.forget(self.loop.step)
        if before is not None:
            before.restore()
            torch.clear_autocast_cache()  # casts of weights that have changed
            self.loop.reset()
            self.recorder.clear()
        return 0

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        transport, outer, self._running = self._transport, self._running, True

        def where(error: BaseException) -> tuple[str, str]:
            hint = oom_hint(error, self.loop.max_in_flight, self.loop.in_flight, self.queue, self.device)
            hint = hint or input_of(error, transport.action, self.schedule.placement, self.loop.forward_input)
            return f"action {transport.action}", hint

        try:
            with failing_together(transport, self.abandon, where):
                yield
                transport.begin_action("none")
        finally:
            self._running = outer

    def _loss(self) -> Tensor | None:
        self.completed += 1
        losses = self.loop.end()
        return torch.stack(losses).sum() if losses else None
