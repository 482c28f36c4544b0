"""Copies of one rank between device and host: when they run, what waits for them, and how they slow passes down.

There is one lane per direction, which copies one thing after the other. A copy out begins when the F or B has ended
that leaves what an O will move, a copy back where its L stands. The rank waits at O for the end of the copy out, the
pass that needs the tensors for the end of the copy back.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.pipeline.schedules.actions import Action
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.timeline import Event

_Key = tuple[int, int]  # chunk, microbatch


class Copies:
    """The copies of one rank whose row has an O or L; `events` are those that were begun, in that order.

    Calls come in the order of the row: `start`, `end` and `ended` of every pass, `reach` of every O and L. Raises
    ValueError where the costs have no bandwidths.
    """

    def __init__(self, rank: int, row: Sequence[Action], costs: Costs) -> None:
        if costs.offload_bandwidth is None or costs.reload_bandwidth is None:
            raise ValueError(
                "Costs: offload_bandwidth and reload_bandwidth must be given for a schedule that offloads: the memory "
                "per time that a rank copies to its host and back"
            )
        self.events: list[Event] = []
        self._rank = rank
        self._bandwidth = {"O": costs.offload_bandwidth, "L": costs.reload_bandwidth}
        self._slowdown = costs.copy_slowdown
        self._free = {"O": 0.0, "L": 0.0}  # when each lane has copied what it was given
        self._offloads = _passes_before_offloads(row)
        self._out: dict[_Key, float] = {}  # when copies out end
        self._back: dict[_Key, float] = {}
        self._held_up = 0.0  # until when the rank waits at an O
        self._running: list[Event] = []  # copies that may run beside the next pass

    def start(self, action: Action, earliest: float) -> float:
        """When a pass starts that could start at `earliest` but for the copies."""
        loaded = 0.0
        if action.kind in ("B", "BW", "W"):
            loaded = self._back.get((action.chunk, action.microbatch), 0.0)
        return max(earliest, self._held_up, loaded)

    def end(self, start: float, length: float) -> float:
        """When a pass ends that takes `length` without copies beside it."""
        if self._slowdown == 0.0:
            return start + length
        self._running = [copy for copy in self._running if copy.end > start]
        now, left = start, length
        for moment in sorted({time for copy in self._running for time in (copy.start, copy.end) if time > start}):
            rate = self._rate(now)
            if (moment - now) * rate >= left:
                break
            left -= (moment - now) * rate
            now = moment
        return now + left / self._rate(now)

    def ended(self, action: Action, end: float, amount: float) -> None:
        """After a pass: the copy out of what it has left begins, if an O of it follows. amount: the memory to copy."""
        if action[:3] in self._offloads:
            offload = Action("O", action.chunk, action.microbatch)
            self._out[action.chunk, action.microbatch] = self._copy(offload, end, amount)

    def reach(self, action: Action, time: float, amount: float) -> None:
        """The rank is at an O or L at `time`. amount: the memory to copy back."""
        key = action.chunk, action.microbatch
        time = max(time, self._held_up)
        if action.kind == "O":
            self._held_up = max(time, self._out[key])
        else:
            self._back[key] = self._copy(action, time, amount)

    def _copy(self, action: Action, time: float, amount: float) -> float:
        start = max(time, self._free[action.kind])
        end = self._free[action.kind] = start + amount / self._bandwidth[action.kind]
        event = Event(self._rank, action, start, end)
        self.events.append(event)
        self._running.append(event)
        return end

    def _rate(self, now: float) -> float:
        beside = sum(copy.start <= now < copy.end for copy in self._running)
        return 1.0 / (1.0 + self._slowdown * beside)


def _passes_before_offloads(row: Sequence[Action]) -> set[tuple[str, int, int]]:
    """(kind, chunk, microbatch) of the passes that leave what the row's O move: F, or B where O stands after it."""
    waiting: set[_Key] = set()
    found: set[tuple[str, int, int]] = set()
    for kind, chunk, microbatch, _ in row:
        if kind == "B":
            waiting.add((chunk, microbatch))
        elif kind == "O":
            found.add(("B" if (chunk, microbatch) in waiting else "F", chunk, microbatch))
    return found
