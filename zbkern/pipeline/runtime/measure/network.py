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

    def begun(self) -> Any:
        return self._recorder.now()

    def ended(self, begin: Any) -> None:
        self._waits.append((begin, self._recorder.now()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A step."""
        self._waits, thread.watch = [], self
        try:
            yield
        finally:
            thread.watch = None
        if self._is_warm:
            self._count()
        self._is_warm = True

    def milliseconds(self, kind: str, chunk: int) -> float:
        return 1e3 * median(seconds for seconds, _ in self._passes.get((kind, chunk), [(0.0, 0)]))

    def count(self, chunk: int) -> float:
        """Of an F or a B, whichever has more."""
        return max(median(waits for _, waits in self._passes.get((kind, chunk), [(0.0, 0)])) for kind in "FB")

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
