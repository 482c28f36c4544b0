"""Recorder: when this rank's actions ran in the last step, and what its W queue held meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch

from zbkern.pipeline.runtime.measure.clock import EventClock
from zbkern.pipeline.runtime.memory.host_copies import Copy
from zbkern.planning.simulation.timeline import Event, Sample, Timeline, measured
from zbkern.schedules.actions import Action
from zbkern.schedules.schedule import Schedule
from zbkern.wgrad import WGradQueue

_NOTHING = contextlib.nullcontext()


class Recorded(NamedTuple):
    """What a rank knows of its last step."""

    events: Sequence[Event] = ()
    samples: Sequence[Sample] = ()
    copies: Sequence[Event] = ()
    peak_bytes: int = 0


def timeline_of(schedule: Schedule, ranks: Sequence[Recorded]) -> Timeline:
    """A step of all ranks, in their order."""
    events, samples, copies, peaks = zip(*ranks, strict=True)
    return measured(schedule, events, *(each if any(each) else () for each in (samples, copies, peaks)))


class Recorder:
    """Marks are taken without waiting for the device; events and samples are worked out when somebody asks."""

    def __init__(self, rank: int, device: torch.device, queue: WGradQueue, sample: bool) -> None:
        self.rank = rank
        self.device = device
        self.queue = queue
        self.paused = False  # in calls that are no step
        self._sample = sample
        self._holders: Sequence[Any] = ()
        self._clock = EventClock(device)
        self.now, self.seconds = self._clock.now, self._clock.seconds
        self.clear()

    def clear(self) -> None:
        """Forgets the last step."""
        self.peak_bytes = 0  # that what `watch` was given held at once
        self._copies: list[tuple[Action, list[Copy]]] = []
        self._marks: list[tuple[tuple[Action, ...], Any, Any]] = []
        self._samples: list[tuple[Any, int, int, int]] = []
        self._clock.renew()

    def done(self, actions: tuple[Action, ...], start: Any) -> None:
        """These actions ran as one launch from `start` until now."""
        if self.paused:
            return
        end = self.now()
        self._marks.append((actions, start, end))
        self.held()
        if self._sample:
            allocated = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
            self._samples.append((end, self.queue.pending(), self.queue.bytes, allocated))

    def watch(self, holders: Sequence[Any]) -> None:
        """Sets what holds the memory of units: `peak_bytes` is the most that the sum of its `nbytes` has been."""
        self._holders = holders

    def held(self) -> None:
        """Updates `peak_bytes`, when memory has been taken or freed."""
        if self._holders:
            self.peak_bytes = max(self.peak_bytes, sum(holder.nbytes for holder in self._holders))

    def copying(self, action: Action) -> Callable[[Copy], None]:
        """A function to call with each copy of an O or L, as it begins."""
        self._copies.append((action, []))
        return partial(self._copy_begins, self._copies[-1][1])

    def _copy_begins(self, copies: list[Copy], copy: Copy) -> None:
        copies.append(copy)
        self.held()  # what a forward holds before it waits for a copy

    def copies(self) -> list[Event]:
        """An event for every O and L, which ends when its last transfer ends and is as long as all of them took
        together; waits for the last. None for what has failed."""
        events = []
        for action, transfers in self._copies:
            marks = [copy.marks() for copy in transfers]
            times = [(self._clock.seconds(mark[0]), self._clock.seconds(mark[1])) for mark in marks if mark is not None]
            if not times or len(times) < len(marks):
                continue
            end = max(ended for _, ended in times)
            events.append(Event(self.rank, action, end - sum(ended - begun for begun, ended in times), end))
        return events

    def catch_up(self) -> None:
        """Waits until the device has begun the action that was launched last, so that little is ahead of the host."""
        if self._marks:
            self._clock.wait(self._marks[-1][1])

    def label(self, action: object) -> AbstractContextManager[Any]:
        """A range with the action's name, such as 2B5, where torch's profiler (or its NVTX form) is on."""
        if torch.autograd._profiler_enabled():
            return torch.profiler.record_function(str(action))
        return _NOTHING

    def events(self) -> list[Event]:
        """The marks as events, in the order of their starts; actions that ran as one launch share its time equally."""
        events = []
        for actions, start, end in self._marks:
            begin, finish = self._clock.seconds(start), self._clock.seconds(end)
            share = (finish - begin) / len(actions)
            events += [Event(self.rank, a, begin + i * share, begin + (i + 1) * share) for i, a in enumerate(actions)]
        return sorted(events, key=lambda event: event.start)  # those beside each other end in any order

    def recorded(self) -> Recorded:
        """The last step, for the other ranks."""
        return Recorded(self.events(), self.samples(), self.copies(), self.peak_bytes)

    def samples(self) -> list[Sample]:
        """What the queue held after every action; empty unless recording."""
        return [Sample(self._clock.seconds(end), *sizes) for end, *sizes in self._samples]
