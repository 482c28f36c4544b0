"""Pipeline: what users call. Its calls are in call.py, the loop that runs their actions in loop.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zbkern.pipeline.optimizer.step_boundary import StepBoundary, boundary_of
from zbkern.pipeline.runtime.arguments import LossFn, check, check_place, device_of, module_list
from zbkern.pipeline.runtime.call import Calls
from zbkern.pipeline.runtime.last_step import LastStep
from zbkern.pipeline.runtime.measure.recorder import Recorder
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.replicas.data_parallel import check_apart
from zbkern.pipeline.runtime.replicas.tied_weights import TiedWeights, all_ties
from zbkern.pipeline.runtime.run_ahead import run_ahead
from zbkern.pipeline.runtime.same_bits import OwnSums
from zbkern.pipeline.runtime.step_schedules import StepSchedules
from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.connect import check_same_plan, closing_on_error, connect, place, telling_on_error
from zbkern.schedules.schedule import Schedule
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

    Attributes: `rank`; `device`; `queue`, where W wait; `tied`, this rank's tied weights by name; `last`, what one asks
    after a step (`LastStep`).
    """

    def __init__(
        self,
        modules: torch.nn.Module | Iterable[torch.nn.Module],
        schedule: Schedule | Callable[[int], Schedule],
        loss_fn: LossFn | None,
        group: torch.distributed.ProcessGroup | Transport | None = None,
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
            self.rank, size = place(group)
            schedules = StepSchedules(schedule, size, fill, options)
            check_place(schedules.first, self.rank, size, modules, loss_fn)
            self._checks_values = options.check_values
            self._checked: Counter[object] = Counter()  # steps in which values that W read were compared, by kind
            self.device = device_of(device, modules)
            self.queue = WGradQueue(max_bytes=options.max_wgrad_bytes, merge=not options.same_bits)
            by_chunk = dict(zip(schedules.first.chunks_of(self.rank), modules, strict=True))
            check_apart(by_chunk, group)
            self._own_sums = OwnSums(by_chunk.values() if options.same_bits else ())
            recorder = Recorder(self.rank, self.device, self.queue, options.record)
            self._calls = Calls(by_chunk, schedules, loss_fn, recorder, options, fill, timeout)
            copies = all_ties(modules, tied)
            self.tied = {name: parameters[0] for name, parameters in copies.items()}
        transport = connect(group, self.device)
        with closing_on_error(transport, transport is not group, "its Pipeline"):
            check_same_plan(schedules.first, transport)
            transport.connect(pairwise(schedules.first.placement))
            boundary = boundary_of(self.modules.values())
            if boundary.state != "broken":
                boundary.validate()  # before weights are compared
            self._tied = TiedWeights(copies, transport, self.modules)
            self._calls.connect(transport, boundary)
        self.last = LastStep(self._calls)

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
        calls, loop, replicas = self._calls, self._calls.loop, self._calls.replicas
        calls.boundary.reload_states()
        calls.begin("step", (inputs, targets, side), schedule)
        row, is_sliced = self.schedule.actions[self.rank], self.schedule.is_sliced
        kinds = {(action.chunk, action.kind, is_sliced) for action in row if action.kind in ("W", "BW")}
        self.queue.check_values = self._checks_values or any(self._checked[kind] < 2 for kind in kinds)
        self._checked.update(kinds)
        replicas.begin(len(self.schedule.units))
        with calls.running(), self._own_sums.during():
            begun = run_ahead(calls)  # before which, and after, an optimizer writes weights
            self._tied.begin()
            loop.run(loop.program[begun:])
            calls.transport.begin_action("reduction over replicas")
            replicas.finish()
            self._own_sums.add()
            calls.transport.begin_action("sum over tied weights")
            self._tied.sum_gradients(loop.step, calls.timeout)
            calls.transport.begin_action("comparison of batches")
            calls.compare_batches()
        return _mean(calls.end())

    def evaluate(
        self, inputs: Any = None, targets: Any = None, side: Any = None, schedule: Schedule | None = None
    ) -> Tensor | None:
        """The mean loss of the same arguments, forward only, with the modules in evaluation mode meanwhile.

        Timelines and samples stay those of the last step.
        """
        self._calls.run_forwards("evaluate", (inputs, targets, side), schedule)
        return _mean(self._calls.end())

    def forward(
        self, inputs: Any = None, targets: Any = None, side: Any = None, schedule: Schedule | None = None
    ) -> list[Any] | None:
        """What the last chunk returns for each microbatch, in the caller's order, or with targets what loss_fn does.

        Forward only and in evaluation mode, with the arguments of `step`. loss_fn may return anything then, such as the
        log-probability of every token, in the bits that a `step` with the same weights has. With `per_sequence` it is
        what its loss_fn returns for each sequence, in the order of their values. A list on the last chunk's rank, None
        elsewhere.
        """
        self._calls.run_forwards("forward", (inputs, targets, side), schedule)
        results = self._calls.end()
        return results if len(self.schedule.placement) - 1 in self.modules else None

    @property
    def schedule(self) -> Schedule:
        """The schedule of the last step."""
        return self._calls.loop.schedule

    @property
    def modules(self) -> dict[int, torch.nn.Module]:
        """This rank's modules by the number of their chunk."""
        return {**self._calls.modules}

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The Optimizer of these modules, of all their Pipelines; None where there is none."""
        return self._calls.boundary.optimizer

    def gather(self, value: Any) -> list[Any]:
        """One value of every rank, by rank: numbers, strings, containers and NamedTuples of them; collective.

        Raises PipelineError as a step does.
        """
        return self._calls.gather(value)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Has steps of this Pipeline wait for those of an Optimizer that was made with a process group; on every rank.

        One that was made with a Pipeline belongs to all Pipelines of the same modules already. Raises ValueError where
        these modules have another one, TypeError for what is none.
        """
        boundary = getattr(optimizer, "_boundary", None)
        if not isinstance(boundary, StepBoundary):
            raise TypeError(
                f"Pipeline.attach: optimizer must be a zbkern.pipeline.Optimizer; got {type(optimizer).__name__}"
            )
        if self.optimizer not in (None, optimizer):
            raise ValueError(
                "Pipeline.attach: this Pipeline has another Optimizer already, and gradients have one norm: give it "
                "all torch optimizers in a list; call pipe.detach() on every rank to replace it"
            )
        calls = self._calls
        if boundary is not calls.boundary:
            calls.boundary.leave(calls)
            calls.connect(calls.transport, boundary)

    def detach(self) -> None:
        """Frees the modules of their optimizer, once its last step is validated; on every rank. No-op without one."""
        boundary = self._calls.boundary
        if boundary.state != "broken":
            boundary.validate()
        boundary.free()

    def close(self) -> None:
        """Validates the optimizer's last step, and ends the connections; on every rank, or as a context manager.

        Raises PipelineError where another rank has failed since this one's last call.
        """
        self._calls.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._calls.fail(error)
        self.close()


def _mean(losses: list[Tensor]) -> Tensor | None:
    """Of shares of the mean loss, on the last chunk's rank."""
    return torch.stack(losses).sum() if losses else None
