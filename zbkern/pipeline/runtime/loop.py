"""The loop over a rank's actions: each runs by the handler of its kind, and waits are filled with W.

A gradient is sent as soon as its B is done, before any W. With fill="planned" W runs where the schedule says, and
neighbouring W of one chunk as one launch per weight. With fill="eager" only the order of F and B is the schedule's: W
runs task by task whenever the rank would otherwise wait, or when it must make room for the next F.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.batch import UnitArguments
from zbkern.pipeline.runtime.measure.recorder import Recorder
from zbkern.pipeline.runtime.memory.ledger import Ledger
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.overlap.passes import Passes
from zbkern.pipeline.runtime.overlap.reruns import Reruns
from zbkern.pipeline.runtime.replicas.agreement import number_of
from zbkern.pipeline.runtime.replicas.data_parallel import Replicas
from zbkern.pipeline.runtime.slices.sequence_loss import put_together
from zbkern.pipeline.runtime.stage import Stage
from zbkern.pipeline.transport.base import Tag, Transport
from zbkern.schedules.actions import Action, Beside
from zbkern.schedules.dependencies import producer
from zbkern.schedules.program import Program, fused, offloads_or_recomputes, peak_units, program_of
from zbkern.schedules.schedule import Schedule
from zbkern.schedules.warmup import speculative_forwards
from zbkern.wgrad.accumulation import has_hooks
from zbkern.wgrad.queue import thread


class Loop:
    """Runs the actions of a rank on its stages, by chunk. options, fill and timeout are those of its Pipeline.

    `use` sets the schedule, `begin` the batch; then come `run`, and `end` or `reset`.
    """

    schedule: Schedule
    transport: Transport  # once ranks are connected

    def __init__(
        self,
        stages: Mapping[int, Stage],
        replicas: Replicas,
        recorder: Recorder,
        options: StepOptions,
        fill: str,
        timeout: float,
    ) -> None:
        self.stages, self.recorder, self.queue = stages, recorder, recorder.queue
        self.program: Program = ()  # of the schedule
        self.step = 0  # in the tags of its messages: another one for forwards that run again
        self.in_flight = 0  # units that were begun, and are not through their B
        self.forward_input: Any = None  # the input of the forward that runs
        self.results: list[Any] = []  # of the last chunk: losses, or, numbered, what `forward` returns
        self._replicas, self._options = replicas, options
        self._passes = Passes(recorder.device)
        self._handlers: dict[str, Callable[..., None]] = {}  # while a program runs, by kind
        self._arrived: dict[Action, Any] = {}  # inputs of passes beside each other, before these begin
        self._hooked: dict[int, frozenset[int]] = {}  # in a step: weights of a chunk with hooks, by identity
        self._fill, self._timeout = fill, timeout
        self._ledger: Ledger | None = None
        self._batch: Sequence[UnitArguments] = ()
        self._parts: list[tuple[int, Any]] = []  # of a sequence in slices to be returned: tokens and outputs of each
        self._returns_outputs = False

    def use(self, schedule: Schedule) -> None:
        """From the next step on this schedule, valid and of the same chunks in the same places."""
        if self.program and schedule is self.schedule:
            return
        row, ledger = schedule.actions[self.recorder.rank], self._ledger
        program = program_of(row, schedule.beside_of(self.recorder.rank))
        self._replicas.check_beside(program)
        if ledger is None and offloads_or_recomputes(row):
            modules = {chunk: stage.module for chunk, stage in self.stages.items()}
            ledger = Ledger(modules, self.recorder, self._options)
        if ledger is not None:
            ledger.use(row, self._at_once(row))  # raises before anything has changed
        self.schedule, self._last = schedule, len(schedule.placement) - 1
        if ledger is not self._ledger:
            self.use_ledger(ledger)
        self.program = program
        self.passes = number_of([action for action in row if action.kind != "W"]) if self._replicas.agreement else 0
        self.max_in_flight = peak_units(row)
        self.max_ahead = speculative_forwards(schedule)[self.recorder.rank]
        for stage in self.stages.values():
            stage.use(schedule, self._at_once(row))

    def use_ledger(self, ledger: Ledger | None) -> None:
        """Between steps: from now on this one holds what microbatches need between passes; None: autograd itself."""
        if self._ledger is not None:
            self._ledger.close()
        self._ledger = ledger
        for stage in self.stages.values():
            stage.ledger = ledger
        self.recorder.watch([] if ledger is None else [ledger, *self.stages.values()])
        if ledger is not None:
            row = self.schedule.actions[self.recorder.rank]
            ledger.use(row, self._at_once(row))

    def _at_once(self, row: Sequence[Action]) -> Collection[tuple[int, int]]:
        """(chunk, unit) of those of which no W waits: none with replicas, which reduce gradients while W run."""
        return () if self._replicas else fused(row)

    def begin(self, batch: Sequence[UnitArguments], step: int, returns_outputs: bool) -> None:
        """Before the first action of a step or evaluation, or of a forward that returns what the last chunk does."""
        self._batch, self.step, self._returns_outputs = batch, step, returns_outputs
        self.results, self._parts, self.in_flight = [], [], 0
        self._hooked.clear()
        for stage in self.stages.values():
            stage.begin(returns_outputs)

    def end(self) -> list[Any]:
        """After the last action: what the last chunk has left, for whoever wants it."""
        self._batch, results, self.results = (), self.results, []
        return [value for _, value in sorted(results, key=itemgetter(0))] if self._returns_outputs else results

    def run(self, program: Iterable[tuple[Action | Beside, ...]]) -> None:
        transport, recorder = self.transport, self.recorder
        handlers = self._handlers = {"F": self._forward, "B": self._backward, "W": self._weight, "BW": self._backward}
        handlers["+"] = self._beside
        if self._ledger is not None:
            handlers.update(self._ledger.handlers)
        try:
            for group in program:
                action = group[0]
                transport.begin_action(action)
                with recorder.label(action):
                    handlers[action.kind](*group)
        finally:
            self._passes.close()
            self._handlers = {}  # which refer to this: a closed Pipeline is freed at once
        while self.queue.pending():  # eager: W that ran in no wait
            self._run_oldest()
        self.queue.join()
        transport.begin_action("none")

    def reset(self) -> None:
        """Drops what was begun."""
        self.forward_input, self.in_flight = None, 0
        self._arrived.clear()
        self.queue.discard()
        self._replicas.discard()
        for stage in self.stages.values():
            stage.reset()
        if self._ledger is not None:
            self._ledger.reset()

    # ---- handlers; those of R, O and L are the ledger's

    def _beside(self, beside: Beside) -> None:
        """Passes that take turns, once all inputs have arrived: a pass that waited for one would hold up the others.
        They run one after the other where two would use one gradient, or one chunk's modules, at once."""
        self._arrived = {action: self._input(action) for action in beside.passes}
        ready = [partial(self._take_part, action) for action in beside.passes]
        backwards = [action.chunk for action in beside.passes if action.kind in ("B", "BW")]
        weights = [action.chunk for action in beside.passes if action.kind == "W"]
        reruns = [self._reruns(each.chunk) for each in beside.passes if each.kind == "F" and each.chunk in backwards]
        if self._share_hooks([*backwards, *weights]) or any(each.found is not False for each in reruns):
            for each in ready:
                each()
            return
        kinds = [action.kind for action in beside.passes]
        self._passes.run(ready, [index for index, kind in enumerate(kinds) if kind == "F"], of_python="R" in kinds)

    def _reruns(self, chunk: int) -> Reruns:
        stage = self.stages[chunk]
        stage.reruns = stage.reruns or Reruns(chunk)
        return stage.reruns

    def _share_hooks(self, chunks: Sequence[int]) -> bool:
        """Whether backwards or W of these chunks add to one weight that has hooks."""
        if len(chunks) < 2:
            return False
        for chunk in {*chunks} - self._hooked.keys():
            parameters = self.stages[chunk].module.parameters()
            self._hooked[chunk] = frozenset(id(parameter) for parameter in parameters if has_hooks(parameter))
        weights = [weight for chunk in chunks for weight in self._hooked[chunk]]
        return len({*weights}) < len(weights)

    def _take_part(self, action: Action) -> None:
        """A pass beside others, in a thread of its own."""
        try:
            with self.recorder.label(action):
                self._handlers[action.kind](action)
        except Exception:
            if self._passes.error is None:  # the others then end, which is no failure of theirs
                self.transport.begin_action(action)
            raise

    def _input(self, action: Action) -> Any:
        """What an action is given by another chunk, or by the batch; waits for it."""
        if action in self._arrived:
            return self._arrived.pop(action)
        kind, chunk, unit = action
        if kind == "F":
            if self._fill == "eager":
                self._free_memory_for_forward()
            return self._batch[unit].inputs if chunk == 0 else self._await("F", action)
        return None if chunk == self._last or kind in ("W", "R") else self._await("B", action)

    def _forward(self, action: Action) -> None:
        _, chunk, unit = action
        inputs = self._input(action)
        stage, given = self.stages[chunk], self._batch[unit]
        self.forward_input = inputs
        start = self.recorder.now()
        target = given.target if chunk == self._last else None
        side = given.checked_side(self.schedule.units[unit])
        if carry := stage.carries.begin(unit, given.tokens, inputs, given.length):
            side = {**side, **carry}
        try:
            outputs = stage.forward(unit, inputs, target, side)
        except Exception as error:
            if self._passes.error is None:
                stage.probes.explain(error, stage.call, inputs, side)
            raise
        self.in_flight += 1
        if chunk < self._last:
            self._send(chunk + 1, "F", unit, outputs)
        elif self._returns_outputs:
            self.results += self._returned(unit, outputs, side)
        elif outputs is not None:  # the loss; with slices of whole sequences, behind the last
            self.results.append(outputs)
        self.recorder.done((action,), start)
        stage.probes.check(stage.call, inputs, side)  # while the next rank has its input, and is probed, too
        self.forward_input = None

    def _returned(self, unit: int, outputs: Any, side: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """What `forward` returns for a microbatch, behind its last slice, or for each sequence of a pack; numbered."""
        if "carry" in side:
            self._parts.append((side["carry"].end - side["carry"].start, outputs))
            if not self.schedule.units[unit].is_last:
                return []
            leaves, structure = put_together(self._parts)
            outputs = pytree.tree_unflatten([leaf for leaf, _ in leaves], structure)
            if self.stages[self._last].adds_up and hasattr(outputs, "_in_slices"):  # as the loss of each slice has them
                outputs = outputs._in_slices([length for length, _ in self._parts])
            self._parts = []
        target = self._batch[unit].target
        if target is None:
            return [(unit, outputs)]
        loss_fn = self.stages[self._last].loss_fn
        assert loss_fn is not None
        of_each = getattr(loss_fn, "_of_each", None)  # of the sequences of a pack
        return [(unit, loss_fn(outputs, target.value))] if of_each is None else of_each(outputs, target.value)

    def _backward(self, action: Action) -> None:
        kind, chunk, unit = action
        gradients = self._input(action)
        self.stages[chunk].prepare(unit)
        start = self.recorder.now()
        outputs = self.stages[chunk].backward_input(unit, gradients)
        if kind == "BW":
            self._replicas.backward_done(chunk)
            self.stages[chunk].weight(unit)
        self.in_flight -= 1
        if chunk > 0:
            self._send(chunk - 1, "B", unit, outputs)
        if kind == "B":
            self._replicas.backward_done(chunk)
        self.recorder.done((action,), start)

    def _weight(self, *actions: Action) -> None:
        chunk = actions[0].chunk
        if self.stages[chunk].splits is False:
            self.stages[chunk].warn_of_fused_backward()
        if self._fill == "eager":
            return
        units = [action.unit for action in actions]
        self.stages[chunk].prepare(*units)
        start = self.recorder.now()
        self.stages[chunk].weight(*units, in_turns=thread.give_way is not None)
        self.recorder.done(actions, start)

    # ---- waiting, sending, filling

    def _await(self, kind: str, action: Action) -> Any:
        tag = Tag(self.step, kind, action.chunk, action.unit)
        if self._fill == "eager":
            while self.queue.pending() and not self._ready(tag):
                self._run_oldest()
        return self.transport.receive(self._sender(action), tag, self._timeout)

    def _sender(self, action: Action) -> int:
        """The rank of the message that an action waits for."""
        needed = producer(action, len(self.schedule.placement))
        assert needed is not None  # the first chunk's inputs and the last one's gradients are not awaited
        return self.schedule.placement[needed[1]]

    def wait_for_input(self, action: Action | Beside, instead: Any) -> None:
        """Returns once an F, which runs alone, has its input, or the message with the tag `instead` is there."""
        assert isinstance(action, Action)
        if action.chunk > 0:
            tag = Tag(self.step, "F", action.chunk, action.unit)
            self.transport.wait_for(self._sender(action), tag, self._timeout, instead)

    def _ready(self, tag: Tag) -> bool:
        """Whether the message is there by the time the device wants it, and not the host, which may be far ahead."""
        self.recorder.catch_up()
        return self.transport.ready(tag)

    def _send(self, chunk: int, kind: str, unit: int, message: Any) -> None:
        tag = Tag(self.step, kind, chunk, unit)
        self.transport.send(self.schedule.placement[chunk], tag, message)

    def _free_memory_for_forward(self) -> None:
        """Runs W until the next F holds no more units, begun or waiting for W, than the plan's own peak."""
        while self.queue.pending() and self.in_flight + len(self.queue.keys()) >= self.max_in_flight:
            self._run_oldest(self.queue.keys()[0])

    def _run_oldest(self, key: Any = None) -> None:
        chunk, unit = self.queue.keys()[0]
        action = Action("W", chunk, unit)
        start = self.recorder.now()
        with self.recorder.label(action):
            self.queue.run_one(key)
        self.recorder.done((action,), start)
