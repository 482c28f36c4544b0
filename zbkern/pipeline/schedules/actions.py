"""What a pipeline does, as data: `Action`, one pass of one microbatch through one chunk.

Letters are the papers': F is a forward, B the gradient of a chunk's input, W the gradient of its weights, and BW a
fused backward that does both. Chunks are numbered in model order over the whole pipeline.
"""

from __future__ import annotations

import re
from typing import NamedTuple

KINDS = ("F", "B", "W", "BW")

_ACTION = re.compile(r"(\d+)(F|BW|B|W)(\d+)(?::(\d+)/(\d+))?")


class ScheduleError(ValueError):
    """A schedule that cannot be built, is not valid, or does not fit a limit; the message names the cell."""


class Action(NamedTuple):
    """One pass of one microbatch through one chunk. `part=(i, n)` is slice i of n of a W.

    >>> str(Action("B", chunk=2, microbatch=7))
    '2B7'
    >>> Action.parse("2W7:0/4")
    Action(kind='W', chunk=2, microbatch=7, part=(0, 4))
    """

    kind: str
    chunk: int
    microbatch: int
    part: tuple[int, int] | None = None

    def __str__(self) -> str:
        part = "" if self.part is None else f":{self.part[0]}/{self.part[1]}"
        return f"{self.chunk}{self.kind}{self.microbatch}{part}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action written as `str` writes it. Raises ScheduleError for any other text."""
        match = _ACTION.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(
                f"Action.parse: expected chunk, kind and microbatch such as '0F3', '2BW7' or '2W7:0/4'; got {text!r}"
            )
        chunk, kind, microbatch, index, count = match.groups()
        part = None if index is None else (int(index), int(count))
        return cls(kind, int(chunk), int(microbatch), part)
