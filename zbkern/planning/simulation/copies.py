"""Copies of one rank between device and host: when they run, what waits for them, and how they slow passes down.

There is one lane per direction, which copies one thing after the other. Activations go in transfers of `copy_size`: out
as soon as an F has left so much, and back in the order in which a B or BW needs them, which waits for a transfer where
it comes to it; F and B leave and need them evenly over their time. What W needs goes when its B has ended, and comes
back for W in the same way. A copy back begins where its L stands, and the rank waits
at O for the end of the copy out.

Where an O directly follows its F, the F itself waits for transfers: it holds no more than the one that it fills and the
one that is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.simulation.timeline import Event
from zbkern.schedules.actions import Action
from zbkern.schedules.program import offloaded_after, streamed

_Key = tuple[int, int]  # chunk, unit
_ENDS_LOAD = ("B", "BW", "W")  # what needs what a load brings


class Copies:
    """The copies of one rank whose row has an O or L; `events` are those that were begun, in that order.

    An event is as long as its transfers together, up to the end of the last. Calls come in the order of the row:
    `start` and `run` of every pass, `reach` of every O and L. Raises ValueError where the costs have no bandwidths.
    """

    def __init__(self, rank: int, row: Sequence[Action], flat: FlatCosts) -> None:
        costs = flat.given
        if costs.offload_bandwidth is None or costs.reload_bandwidth is None:
            raise ValueError(
                "Costs: offload_bandwidth and reload_bandwidth must be given for a schedule that offloads: the memory "
                "per time that a rank copies to its host and back"
            )
        self.events: list[Event] = []
        self._rank = rank
        self._bandwidth = {"O": costs.offload_bandwidth, "L": costs.reload_bandwidth}
        self._slowdown = costs.copy_slowdown
        self._flat = flat
        self._size = costs.copy_size
        self._free = {"O": 0.0, "L": 0.0}  # when each lane has copied what it was given
        self._offloads, self._streamed = offloaded_after(row), streamed(row)
        self._out: dict[_Key, float] = {}  # when copies out end
        self._back: dict[_Key, tuple[float, float]] = {}  # when the first transfer back ends, and the last
        self._held_up = 0.0  # until when the rank waits at an O
        self._running: list[Event] = []  # copies that may run beside the next pass

    def start(self, action: Action, earliest: float) -> float:
        """When a pass starts that could start at `earliest` if there were no copies."""
        loaded, _ = self._back.get(action[1:], (0.0, 0.0)) if action.kind in _ENDS_LOAD else (0.0, 0.0)
        return max(earliest, self._held_up, loaded)

    def run(self, action: Action, start: float, length: float) -> float:
        """When a pass ends that takes `length` without copies beside it; the copy out of what it leaves begins."""
        end, key = self._beside(start, length), (action.chunk, action.unit)
        if action.kind in _ENDS_LOAD and key in self._back:
            _, last = self._back.pop(key)
            needed = self._flat.of_unit(key[1]).held if action.kind == "W" else self._flat.of_unit(key[1]).activation
            end = max(end, last + self._first(needed[action.chunk]) * (end - start))
        if action in self._offloads:
            if action.kind == "F":
                return self._run_forward(key, start, end)
            self._out[key] = self._copy("O", key, end, self._flat.of_unit(key[1]).held[action.chunk])
        return end

    def reach(self, action: Action, time: float, amount: float) -> None:
        """The rank is at an O or L at `time`. amount: the memory to copy back."""
        key = action.chunk, action.unit
        time = max(time, self._held_up)
        if action.kind == "O":
            self._held_up = max(time, self._out[key])
        else:
            last = self._copy("L", key, time, amount)
            rest = 1.0 - self._first(amount)
            self._back[key] = last - rest * amount / self._bandwidth["L"], last

    def _run_forward(self, key: _Key, start: float, end: float) -> float:
        """The same for an F that would end at `end` without its own copies."""
        activation = self._flat.of_unit(key[1]).activation[key[0]]
        first = self._first(activation)
        part, whole = first * (end - start), activation / self._bandwidth["O"]
        begin = max(start + part, self._free["O"])
        beside = min((1.0 - first) * whole / (1.0 + self._slowdown), max(0.0, end - begin))
        end += self._slowdown * beside
        if key in self._streamed and first < 0.5:  # with room for two transfers, the third is the first that waits
            end = max(end, begin + (1.0 - 2.0 * first) * whole + part)
        # the lane is never idle from the first transfer on, or waits for the F to leave the last one
        self._out[key] = self._copy("O", key, max(begin, end - (1.0 - first) * whole), activation)
        return end

    def _first(self, amount: float) -> float:
        """The share of so much memory that its first transfer moves."""
        return 1.0 if self._size is None or self._size >= amount else self._size / amount

    def _copy(self, kind: str, key: _Key, time: float, amount: float) -> float:
        start = max(time, self._free[kind])
        end = self._free[kind] = start + amount / self._bandwidth[kind]
        event = Event(self._rank, Action(kind, *key), start, end)
        self.events.append(event)
        self._running.append(event)
        return end

    def _beside(self, start: float, length: float) -> float:
        """When a pass ends beside copies that have begun."""
        if self._slowdown == 0.0:
            return start + length
        self._running = [copy for copy in self._running if copy.end > start]
        moments = sorted({time for copy in self._running for time in (copy.start, copy.end) if time > start})
        now, left = start, length
        while True:
            pace = 1.0 + self._slowdown * sum(copy.start <= now < copy.end for copy in self._running)
            if not moments or now + left * pace <= moments[0]:
                return now + left * pace
            left -= (moments[0] - now) / pace
            now = moments.pop(0)
