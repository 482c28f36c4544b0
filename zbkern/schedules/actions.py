"""What a pipeline does, as data: `Action`, one pass of one unit through one chunk of the model.

There are four kinds of pass that every schedule is made of, with the letters of the papers, and three that trade memory
for time. Each says what must have run before it, on which rank, and what it leaves behind:

F   The forward of a chunk.
    Needs:   the output of F of the chunk before, same unit, from the rank that holds it; the first chunk takes
             the batch.
    Gives:   the chunk's output, to the next chunk; of the last chunk, the loss.
    Memory:  keeps the unit's activations until its B or BW.

B   The gradient of a chunk's input (the input gradient, or dgrad).
    Needs:   its own F, and the input gradient from B or BW of the chunk after it; the last chunk begins with the loss.
    Gives:   the gradient of the chunk's input, to the chunk before.
    Memory:  frees the activations, and keeps what W needs: the inputs and output gradients of the chunk's layers.

W   The gradients of a chunk's parameters (the weight gradient, or wgrad).
    Needs:   its own B, and nothing of any other rank: it can run at any time after B, which is what fills bubbles.
    Gives:   the unit's share of the parameters' gradients, and nothing to any other rank.
    Memory:  frees what B kept.

BW  A fused backward: B and W in one pass.
    Needs, gives and frees what B and W together do. A unit has either BW, or B and W.

R   Recompute: the forward again, for its activations alone, or that of named parts of the chunk. A unit that has
    an R keeps from its F only what the chunk (or each of the parts) was given, so F looks ahead for it.
    Needs:   its own F, and runs before its B or BW; nothing of any other rank.
    Gives:   nothing to any other rank.
    Memory:  takes the activations that F did not keep.

O   Offload: from here on a unit's tensors are in the host's memory: its activations, where O stands before its B,
    and what its W needs, where O stands after its B. The copies begin while the F runs that leaves the tensors, or as
    soon as the B has ended, after earlier copies of the rank; O is where the rank waits for their end, so that it
    belongs where the memory is needed. Where it directly follows its F, the F itself waits for copies and gives memory
    back as it goes.
    Needs:   its own F, or its own B.
    Gives:   nothing to any other rank.
    Memory:  frees the tensors.

L   Load: the copy of offloaded tensors back to the device begins here, after earlier loads of the rank. The B, BW or W
    that needs them waits for each where it comes to it.
    Needs:   its own O.
    Gives:   nothing to any other rank.
    Memory:  takes the tensors again, as soon as the copy begins.

O and L are copies: they run beside the passes, one at a time in each direction. Before one B, O and R exclude each
other.

A schedule is one list of actions per rank. Every rank runs its own in order and waits where an input has not arrived;
nothing else orders the ranks. `Schedule.validate` proves that such lists can run to their end.

Neighbours in a list may run beside each other (`Schedule.beside`): F, B, BW, W and R, of other chunks or other
units. They begin once the inputs of all have arrived, and take turns: each runs until a collective of its own is
in flight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("F", "B", "W", "BW", "R", "O", "L")
COPIES = ("O", "L")  # which run beside the passes

_ACTION = re.compile(r"(\d{1,18})(F|BW|B|W|R|O|L)(\d{1,18})")


class ScheduleError(ValueError):
    """A schedule that cannot be built, is not valid, or does not fit a limit; the message names the cell."""


def check_count(what: str, count: object, least: int = 1, error: type[ValueError] = ValueError) -> None:
    """Raises TypeError for what is no whole number, and `error` for one that is too small."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{what} must be an int; got {type(count).__name__} {count!r}")
    if count < least:
        raise error(f"{what} must be at least {least}; got {count}")


class Action(NamedTuple):
    """One pass of one unit, a microbatch or a slice of one, through one chunk.

    kind: one of `KINDS`, as the top of this module says. chunk: the part of the model, numbered from 0 in model order
    over the whole pipeline; `Schedule.placement[chunk]` is the only rank that may run it. unit: numbered from 0 in
    each step: a microbatch's number where they have no slices; `Schedule.units` says which slice of which microbatch it
    is.

    >>> str(Action("B", chunk=2, unit=7))
    '2B7'
    >>> Action.parse("2W7")
    Action(kind='W', chunk=2, unit=7)
    """

    kind: str
    chunk: int
    unit: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.unit}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action written as `str` writes it. Raises ScheduleError for any other text."""
        match = _ACTION.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(
                f"Action.parse: expected chunk, kind and unit such as '0F3' or '2BW7'; got {text!r:.60}"
            )
        chunk, kind, unit = match.groups()
        return cls(kind, int(chunk), int(unit))


class Beside(NamedTuple):
    """Passes of a rank that run beside each other: one entry of a program, where others are an `Action`."""

    passes: tuple[Action, ...]
    kind: str = "+"

    def __str__(self) -> str:
        return "+".join(map(str, self.passes))


Ranges = tuple[tuple[int, int], ...]
"""Of places in a row: from the first to the one behind the last, as in a Python slice."""


@dataclass(frozen=True)
class ScheduleData:
    """What a `Schedule` is made of, which says what each is: for those who check, draw and write it."""

    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int
    name: str = "custom"
    slices: tuple[int, ...] = (1,)
    own_slices: tuple[tuple[int, ...], ...] = ()
    beside: tuple[Ranges, ...] = ()

    def beside_of(self, rank: int) -> Ranges:
        """Where in a rank's row actions run beside each other."""
        return self.beside[rank] if self.beside else ()


class Event(NamedTuple):
    """One action on one rank, from start to end, in the unit of the costs (seconds when measured)."""

    rank: int
    action: Action
    start: float
    end: float
