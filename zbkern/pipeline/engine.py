"""Pipeline: runs a schedule, one loop over this rank's actions, and fills waits with W.

A gradient is sent as soon as its B is done, before any W. With fill="planned" W runs where the schedule says, and
neighbouring W of one chunk as one launch per weight. With fill="eager" only the order of F and B is the schedule's: W
runs task by task whenever the rank would otherwise wait, or when it must make room for the next F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.actions import Action, Schedule, ScheduleError
from zbkern.pipeline.clock import Clock
from zbkern.pipeline.stage import Stage
from zbkern.pipeline.timeline import Event, Timeline
from zbkern.pipeline.transport import DistributedTransport, PipelineError, Tag, Transport
from zbkern.pipeline.undo import ForwardState
from zbkern.pipeline.warmup import chain, forwards_ahead
from zbkern.wgrad import WGradQueue

FILLS = ("planned", "eager")


class Pipeline:
    """This rank's part of a pipeline: its chunks of the model, driven by a schedule.

    modules: this rank's chunks in model order; convert them (`zbkern.convert`) so that their W can wait. loss_fn:
    called as loss_fn(output, target) for one microbatch on the last chunk's rank. group: the pipeline's ranks, None for
    all; or a Transport. fill: "planned" or "eager". max_wgrad_bytes: bytes that waiting W may pin before the oldest run
    at once. tied: {name: parameter} of weights that several ranks hold: those that give the same name get the sum of
    their gradients. timeout: seconds to wait for one message before the step fails.
    Raises ScheduleError or ValueError when modules, schedule and group do not fit together.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        schedule: Schedule,
        loss_fn: Callable[[Any, Any], Tensor],
        group: dist.ProcessGroup | Transport | None = None,
        device: torch.device | str | None = None,
        fill: str = "planned",
        max_wgrad_bytes: int | None = None,
        tied: Mapping[str, Tensor] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        modules = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"Pipeline: schedule must be a zbkern.pipeline.Schedule; got {type(schedule).__name__}")
        if not callable(loss_fn):
            raise TypeError(f"Pipeline: loss_fn must be callable as loss_fn(output, target); got {loss_fn!r}")
        if fill not in FILLS:
            raise ValueError(f"Pipeline: fill must be one of {FILLS}; got {fill!r}")
        schedule.validate()
        rank, size = _place(group)
        if size != schedule.stages:
            raise ScheduleError(
                f"Pipeline: the schedule has {schedule.stages} stages and the group {size} ranks; "
                f"build the schedule with stages={size}"
            )
        chunks = schedule.chunks_of(rank)
        if len(modules) != len(chunks):
            raise ValueError(
                f"Pipeline: rank {rank} holds chunks {chunks} of this schedule and needs {len(chunks)} modules, "
                f"in model order; got {len(modules)}"
            )
        self.schedule = schedule
        self.fill = fill
        self.timeout = timeout
        self.device = _device(device, modules)
        self.queue = WGradQueue(max_bytes=max_wgrad_bytes)
        last = len(schedule.placement) - 1
        self._stages = {
            chunk: Stage(module, chunk, self.queue, loss_fn if chunk == last else None, schedule.microbatches)
            for chunk, module in zip(chunks, modules, strict=True)
        }
        self._last = last
        self._transport = group if _is_transport(group) else self._connect(group)
        self.rank = rank
        self.tied = dict(tied or {})
        self.optimizer: Any = None  # an Optimizer of this pipeline sets itself here
        self._tied = _tied_groups(self._transport, group, self.tied)
        self._handlers = {"F": self._forward, "B": self._backward, "W": self._weight, "BW": self._fused}
        self._program = list(_merge_neighbours(schedule.actions[rank]))
        self._room = _peak_microbatches(schedule.actions[rank])
        self._ahead = forwards_ahead(schedule)[rank]
        self._step = 0
        self._clock = Clock(self.device)
        self._marks: list[tuple[tuple[Action, ...], Any, Any]] = []

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor | None:
        """One step: forward and backward of all microbatches; gradients are then in `.grad` as after `backward()`.

        inputs: needed on the first chunk's rank; targets: on the last chunk's: pytrees of tensors that are split along
        dimension 0 into `schedule.microbatches` equal parts, or lists of that many parts already split. Returns
        the mean loss over microbatches on the last chunk's rank, None elsewhere.
        """
        self._begin(inputs, targets)
        begun = self._run_ahead() if self.optimizer is not None else 0
        self._run(self._program[begun:])
        for parameter, tied_group in self._tied:
            _sum_gradients(parameter, tied_group)
        return self._loss()

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor | None:
        """The mean loss of the same arguments, forward only, with the modules in evaluation mode meanwhile."""
        if self.optimizer is not None:
            self.optimizer.validate()
        self._begin(inputs, targets)
        forwards = [
            Action("F", chunk, microbatch) for chunk in self._stages for microbatch in range(self.schedule.microbatches)
        ]
        modules = [stage.module for stage in self._stages.values()]
        training = [module.training for module in modules]
        try:
            for module in modules:
                module.eval()
            with torch.no_grad():
                # by distance from the first input: an order in which every rank's forwards can be reached
                self._run([(action,) for action in sorted(forwards, key=lambda a: (a.chunk + a.microbatch, a.chunk))])
        finally:
            for module, mode in zip(modules, training, strict=True):
                module.train(mode)
        return self._loss()

    @property
    def modules(self) -> dict[int, torch.nn.Module]:
        """This rank's modules by the number of their chunk."""
        return {chunk: stage.module for chunk, stage in self._stages.items()}

    @property
    def transport(self) -> Transport:
        """The connection to the other ranks."""
        return self._transport

    @property
    def last_timeline(self) -> Timeline:
        """When this rank's actions of the last step ran, in seconds since its first; other ranks' rows are empty."""
        rows: list[list[Event]] = [[] for _ in range(self.schedule.stages)]
        rows[self.rank] = self._events()
        return _timeline(self.schedule, rows)

    def gather_timeline(self) -> Timeline:
        """The last step of all ranks on one clock (the ranks of one machine share it), in seconds; collective."""
        rows = self._transport.gather([(event.rank, tuple(event.action), *event[2:]) for event in self._events()])
        events = [[Event(rank, Action(*action), start, end) for rank, action, start, end in row] for row in rows]
        return _timeline(self.schedule, events)

    def close(self) -> None:
        """Ends the connections to the other ranks; call it on every rank, or use the pipeline as a context manager."""
        self._transport.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, PipelineError):
            self._transport.fail(f"rank {self.rank}: {kind.__name__ if kind else ''}: {error}")
        self.close()

    # ---- the loop

    def _begin(self, inputs: Any, targets: Any) -> None:
        if self.queue.pending():
            raise RuntimeError(
                f"Pipeline.step: {self.queue.pending()} W of an earlier step are still pending ({self.queue}); "
                "run or discard pipe.queue first"
            )
        count = self.schedule.microbatches
        self._inputs = _split("inputs", inputs, count, needed=0 in self._stages)
        self._targets = _split("targets", targets, count, needed=self._last in self._stages)
        self._losses: list[Tensor] = []
        self._marks = []
        self._in_flight = 0
        self._step += 1
        self._count_setbacks()

    def _run_ahead(self) -> int:
        """Runs forwards until the last optimizer step has its verdict; how many of them count.

        All ranks hear the same verdict. Where it changes the weights, all start over, with other tags.
        """
        begun, optimizer, before = 0, self.optimizer, None
        while not optimizer.poll():
            if begun == self._ahead or not optimizer.stepped:
                optimizer.validate()
                continue
            before = before or ForwardState([stage.module for stage in self._stages.values()], self.device)
            self._run([self._program[begun]])
            begun += 1
        if self._count_setbacks() and before is not None:
            before.restore()
            self._reset()
            self._marks, self._in_flight, begun = [], 0, 0
        return begun

    def _count_setbacks(self) -> bool:
        """True when forwards begun before are void; their messages, sent or still to come, have old tags from now."""
        new = 0 if self.optimizer is None else self.optimizer.take_setbacks()
        self._step += new
        if new:
            self._transport.forget(self._step)
        return new > 0

    def _run(self, program: Iterable[tuple[Action, ...]]) -> None:
        action = None
        try:
            for group in program:
                action = group[0]
                self._handlers[action.kind](*group)
            while self.queue.pending():  # eager: what no wait had room for
                self._run_oldest()
        except PipelineError:
            self._reset()
            raise
        except Exception as error:
            self._reset()
            reason = f"rank {self.rank}, action {action}: {type(error).__name__}: {error}"
            self._transport.fail(reason)
            raise PipelineError(reason) from error

    def _forward(self, action: Action) -> None:
        _, chunk, microbatch, _ = action
        if self.fill == "eager":
            self._make_room()
        inputs = self._inputs[microbatch] if chunk == 0 else self._await("F", action)
        start = self._clock.now()
        target = self._targets[microbatch] if chunk == self._last else None
        outputs = self._stages[chunk].forward(microbatch, inputs, target)
        self._in_flight += 1
        if chunk == self._last:
            self._losses.append(outputs.detach())
        else:
            self._send(chunk + 1, "F", microbatch, outputs)
        self._record((action,), start)

    def _backward(self, action: Action) -> None:
        _, chunk, microbatch, _ = action
        gradients = None if chunk == self._last else self._await("B", action)
        start = self._clock.now()
        outputs = self._stages[chunk].backward_input(microbatch, gradients)
        self._in_flight -= 1
        if chunk > 0:
            self._send(chunk - 1, "B", microbatch, outputs)
        self._record((action,), start)

    def _weight(self, *actions: Action) -> None:
        if self.fill == "eager":
            return
        start = self._clock.now()
        chunk, part = actions[0].chunk, actions[0].part
        if part is None:
            self._stages[chunk].weight(*(action.microbatch for action in actions))
        else:
            self._stages[chunk].weight_part(actions[0].microbatch, *part)
        self._record(actions, start)

    def _fused(self, action: Action) -> None:
        _, chunk, microbatch, _ = action
        gradients = None if chunk == self._last else self._await("B", action)
        start = self._clock.now()
        outputs = self._stages[chunk].backward_input(microbatch, gradients)
        self._stages[chunk].weight(microbatch)
        self._in_flight -= 1
        if chunk > 0:
            self._send(chunk - 1, "B", microbatch, outputs)
        self._record((action,), start)

    # ---- waiting, sending, filling

    def _await(self, kind: str, action: Action) -> Any:
        tag = Tag(self._step, kind, action.chunk, action.microbatch)
        if self.fill == "eager":
            while not self._transport.ready(tag) and self.queue.pending():
                self._run_oldest()
        neighbour = action.chunk - 1 if kind == "F" else action.chunk + 1
        return self._transport.receive(self.schedule.placement[neighbour], tag, self.timeout)

    def _send(self, chunk: int, kind: str, microbatch: int, message: Any) -> None:
        tag = Tag(self._step, kind, chunk, microbatch)
        peer = self.schedule.placement[chunk]
        if peer == self.rank:
            self._transport.deliver(tag, message)
        else:
            self._transport.send(peer, tag, message)

    def _make_room(self) -> None:
        """Runs W until the next F holds no more microbatches, begun or waiting for W, than the plan's own peak."""
        while self.queue.pending() and self._in_flight + len(self.queue.keys()) >= self._room:
            self._run_oldest(self.queue.keys()[0])

    def _run_oldest(self, key: Any = None) -> None:
        chunk, microbatch = self.queue.keys()[0]
        start = self._clock.now()
        self.queue.run_one(key)
        self._record((Action("W", chunk, microbatch),), start)

    def _record(self, actions: tuple[Action, ...], start: Any) -> None:
        self._marks.append((actions, start, self._clock.now()))

    def _events(self) -> list[Event]:
        """The marks as events; actions that ran as one launch share its time equally."""
        events = []
        for actions, start, end in self._marks:
            begin, finish = self._clock.seconds(start), self._clock.seconds(end)
            share = (finish - begin) / len(actions)
            events += [Event(self.rank, a, begin + i * share, begin + (i + 1) * share) for i, a in enumerate(actions)]
        return events

    def _loss(self) -> Tensor | None:
        return torch.stack(self._losses).sum() if self._losses else None

    def _reset(self) -> None:
        self.queue.discard()
        for stage in self._stages.values():
            stage.reset()

    def _connect(self, group: dist.ProcessGroup | None) -> Transport:
        placement = self.schedule.placement
        rank = dist.get_rank(group)
        edges = {*pairwise(placement), *pairwise(chain(self.schedule))}  # activations; the optimizer's norms
        peers = {b for edge in edges for a, b in (edge, edge[::-1]) if a == rank}
        return DistributedTransport(group, peers, self.device)


def _timeline(schedule: Schedule, rows: Sequence[Sequence[Event]]) -> Timeline:
    """A measured timeline that begins at zero."""
    first = min((row[0].start for row in rows if row), default=0.0)
    shifted = [tuple(e._replace(start=e.start - first, end=e.end - first) for e in row) for row in rows]
    return Timeline(schedule, tuple(shifted), unit="s")


def _is_transport(group: Any) -> bool:
    return hasattr(group, "deliver")


def _place(group: Any) -> tuple[int, int]:
    if _is_transport(group):
        return group.rank, group.size
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "Pipeline: torch.distributed is not initialised; call torch.distributed.init_process_group() "
            "in a script that torchrun starts"
        )
    return dist.get_rank(group), dist.get_world_size(group)


def _device(device: torch.device | str | None, modules: Sequence[torch.nn.Module]) -> torch.device:
    if device is not None:
        return torch.device(device)
    parameter = next((p for module in modules for p in module.parameters()), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _merge_neighbours(actions: Sequence[Action]) -> Iterable[tuple[Action, ...]]:
    """The program of a rank: whole W of one chunk that follow each other are one entry, everything else its own."""
    run: list[Action] = []
    for action in actions:
        if run and not (action.kind == "W" and action.part is None and action.chunk == run[0].chunk):
            yield tuple(run)
            run = []
        if action.kind == "W" and action.part is None:
            run.append(action)
        else:
            yield (action,)
    if run:
        yield tuple(run)


def _peak_microbatches(actions: Sequence[Action]) -> int:
    """The most microbatches that the plan holds at once on this rank, begun or waiting for their W."""
    held = peak = 0
    for kind, _, _, part in actions:
        if kind == "F":
            held += 1
            peak = max(peak, held)
        elif kind == "BW" or (kind == "W" and (part is None or part[0] == part[1] - 1)):
            held -= 1
    return peak


def _split(name: str, value: Any, count: int, needed: bool) -> list[Any]:
    if not needed:
        return []
    if value is None:
        raise ValueError(f"Pipeline.step: {name} must be given on this rank; got None")
    if isinstance(value, list):
        if len(value) != count:
            raise ValueError(
                f"Pipeline.step: {name} is a list of {len(value)} microbatches and the schedule has {count}; "
                "pass one entry per microbatch, or one tensor to be split"
            )
        return value
    leaves, spec = pytree.tree_flatten(value)
    parts: list[list[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            raise TypeError(f"Pipeline.step: {name} must hold tensors with a batch dimension; got {leaf!r}")
        if leaf.shape[0] % count:
            raise ValueError(
                f"Pipeline.step: dimension 0 of {name} must be a multiple of the {count} microbatches; got "
                f"{list(leaf.shape)}; change the batch size or pass a list of microbatches"
            )
        parts.append(list(leaf.split(leaf.shape[0] // count)) if leaf.shape[0] else [leaf] * count)
    return [pytree.tree_unflatten(list(part), spec) for part in zip(*parts, strict=True)]


def _tied_groups(transport: Transport, group: Any, tied: dict[str, Tensor]) -> list[tuple[Tensor, Any]]:
    """For each tied parameter of this rank: the group of ranks that share it, when there are several."""
    named = transport.gather(sorted(tied))
    found = []
    for name in sorted(tied):
        ranks = [rank for rank, names in enumerate(named) if name in names]
        if len(ranks) > 1:
            if _is_transport(group):
                raise ValueError("Pipeline: tied parameters across ranks need a torch.distributed group")
            everyone = dist.get_process_group_ranks(group or dist.group.WORLD)
            members = [everyone[rank] for rank in ranks]
            found.append((tied[name], dist.new_group(members, use_local_synchronization=True)))
    return found


def _sum_gradients(parameter: Tensor, group: dist.ProcessGroup) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    dist.all_reduce(parameter.grad, group=group)
