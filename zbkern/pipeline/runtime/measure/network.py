"""How long the passes of a rank wait for collectives, which passes beside them could hide."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from zbkern.pipeline.runtime.measure.recorder import Recorder
from zbkern.wgrad.queue import thread


class NetworkWatch:
    """Of steps in which passes run one after the other: the waits that `in_flight` calls, by the pass they are in.

    The first step, which warms up, does not count.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waits: list[tuple[Any, Any]] = []  # marks
        self._passes: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)  # seconds and waits of each
        self._is_warm = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A step."""
        self._waits, thread.watch = [], self._waiting
        try:
            yield
        finally:
            thread.watch = None
        if self._is_warm:
            self._count()
        self._is_warm = True

    def medians(self, kind: str, chunk: int) -> tuple[float, float]:
        """Milliseconds and number of the waits of such a pass."""
        seconds, waits = map(median, zip(*self._passes.get((kind, chunk), [(0.0, 0)]), strict=True))
        return 1e3 * seconds, waits

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = self._recorder.now()
        try:
            yield
        finally:
            self._waits.append((begin, self._recorder.now()))

    def _count(self) -> None:
        events = self._recorder.events()
        starts, seconds = [event.start for event in events], self._recorder.seconds
        found = [(0.0, 0)] * len(events)
        for begin, end in self._waits:
            at = bisect_right(starts, seconds(begin)) - 1
            if at >= 0:
                found[at] = found[at][0] + seconds(end) - seconds(begin), found[at][1] + 1
        for event, each in zip(events, found, strict=True):
            self._passes[event.action[:2]].append(each)
