"""`Schedule`: an ordered list of actions for every rank, and where the chunks are.

It can be printed, parsed, validated, simulated, drawn and run; each is a module.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zbkern.schedules import csv, grid
from zbkern.schedules.actions import KINDS, Action, Ranges, ScheduleData, ScheduleError
from zbkern.schedules.slices import Unit, units_of
from zbkern.schedules.validation import validate


@dataclass(frozen=True)
class Schedule(ScheduleData):
    """The ordered actions of every rank, and the rank of every chunk in model order.

    actions[rank] is what that rank does, in order; placement[chunk] is the rank that holds the chunk; microbatches is
    how many each step has; name is what tables and titles call it. slices: where the sequences of every microbatch are
    cut, the lengths of the slices from first to last, in any unit; own_slices: for each microbatch its own lengths, in
    tokens, where they are not the same for all. An action then moves one slice, a unit: `units` says of which
    microbatch. Without slices, units are microbatches. beside: for each rank, which neighbours in its row run beside
    each other, as ranges of places such as (3, 5); () where none do.
    """

    def __repr__(self) -> str:
        chunks = f"{self.chunks} chunk{'s' if self.chunks > 1 else ''} each"
        cut = f", {len(self.slices)} slices of a sequence each" if len(self.slices) > 1 else ""
        cut = f" in {len(self.units)} slices" if self.own_slices else cut
        return f"<Schedule {self.name}: {self.ranks} ranks, {chunks}, {self.microbatches} microbatches{cut}>"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def chunks(self) -> int:
        """Chunks per rank."""
        return len(self.placement) // self.ranks

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """What actions move, by the number in them: each is a slice of a microbatch, or all of one."""
        return units_of(self.microbatches, self.slices, self.own_slices)

    @property
    def is_sliced(self) -> bool:
        """Whether any sequence is cut."""
        return len(self.slices) > 1 or any(len(each) > 1 for each in self.own_slices)

    def slices_of(self, microbatch: int) -> tuple[int, ...]:
        """The lengths of a microbatch's slices."""
        return self.own_slices[microbatch] if self.own_slices else self.slices

    @cached_property
    def checksum(self) -> int:
        """Equal for equal actions, places and slices, in every process; whatever the name."""
        numbers = [number for row in self.actions for action in row for number in _numbers(action)]
        numbers += [number for each in self.own_slices for number in (len(each), *each)]
        numbers += [number for ranges in self.beside for each in (*ranges, (-1,)) for number in each]
        return zlib.crc32(array("q", [*self.placement, *self.slices, len(self.actions), *numbers]))

    def chunks_of(self, rank: int) -> list[int]:
        """The chunks that `rank` holds, in model order. Raises ScheduleError for a rank that the schedule has not."""
        if rank not in range(self.ranks):
            raise ScheduleError(
                f"Schedule {self.name}: chunks_of: rank must be from 0 to {self.ranks - 1}; got {rank!r}"
            )
        return [chunk for chunk, owner in enumerate(self.placement) if owner == rank]

    @classmethod
    def build(
        cls,
        actions: Iterable[Iterable[Action]],
        placement: Sequence[int],
        microbatches: int,
        name: str = "custom",
        slices: Sequence[int] = (1,),
        own_slices: Iterable[Sequence[int]] = (),
        beside: Iterable[Iterable[Sequence[int]]] = (),
    ) -> Schedule:
        """A validated schedule from any iterables."""
        rows, own = tuple(tuple(row) for row in actions), tuple(tuple(each) for each in own_slices)
        ranges: tuple[Ranges, ...] = tuple(tuple((first, end) for first, end in each) for each in beside)
        ranges = ranges if any(ranges) else ()
        schedule = cls(rows, tuple(placement), microbatches, name, tuple(slices), own, ranges)
        schedule.validate()
        return schedule

    def _proven(self) -> Schedule:
        """This one, which its maker knows to be valid: validating takes longer than some searches do."""
        object.__setattr__(self, "_valid", True)
        return self

    def validate(self) -> None:
        """Proves that the schedule can run: complete, in place, in order, and free of deadlock.

        Every microbatch passes every chunk once: F, then BW, or B and later W, on the chunk's rank; R, O and L stand
        where `actions.py` says; slices of a sequence pass each chunk forward from
        the first and backward from the last; nothing needs what it runs beside; and the ranks, each in its order, can
        run to the end. Raises ScheduleError naming the first action that offends, with the part of the grid around it
        and the action marked. A schedule never changes, so that a second call costs nothing.
        """
        if "_valid" not in self.__dict__:
            validate(self)
            object.__setattr__(self, "_valid", True)

    def to_text(self) -> str:
        """A grid for a terminal: a row per rank, a column per unit of time when every action takes one (BW two).

        A + stands between actions that run beside each other.
        """
        return grid.grid(self)

    def to_csv(self, *, header: bool = True) -> str:
        """A line per rank, its actions separated by commas, with torch's letters: I is our B, and B our BW.

        header: begins with a comment line that has the name; without it torch.distributed.pipelining loads the text.
        What runs beside each other is torch's OVERLAP_F_B. Raises ScheduleError without a header for what torch has no
        word for: slices, R, O and L, and others beside each other than an F and a backward.
        """
        return csv.write(self, header)

    @classmethod
    def from_csv(cls, text: str, name: str | None = None) -> Schedule:
        """The schedule that `to_csv` or torch wrote, validated; placement and microbatches follow from the actions.

        name: instead of the one in the header. Of torch's actions it takes those that compute. Raises ScheduleError for
        text that is not a valid schedule.
        """
        written = vars(csv.read(text))
        return cls.build(**{**written, "name": name or written["name"]})


def _numbers(action: Action) -> tuple[int, int]:
    return KINDS.index(action.kind), action.chunk << 32 | action.unit
