"""What all transports share: the error that a failed rank means on every rank, the tags of messages, time-outs."""

from __future__ import annotations

from typing import NamedTuple

LONGEST_TIMEOUT = 365 * 86400  # seconds; waits for a lock end in an OverflowError from some 300 years on


class PipelineError(RuntimeError):
    """A step failed, here or on another rank; the message names the rank, the action and the cause."""


class Tag(NamedTuple):
    """What a message is: the input of `chunk` (kind F) or the gradient of its output (kind B), of one microbatch."""

    step: int
    kind: str
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        what = "input" if self.kind == "F" else "output gradient"
        return f"the {what} of chunk {self.chunk}, microbatch {self.microbatch}"


class Call(NamedTuple):
    """What a rank does, by its turn: 0 to connect, then every step, evaluation and gather. All ranks do the same."""

    turn: int
    name: str


class Values(NamedTuple):
    """A tag: what ranks have given to the n-th gather, those before the receiver or all of them."""

    number: int
    whole: bool

    def __str__(self) -> str:
        return f"what {'all' if self.whole else 'earlier'} ranks give to gather {self.number}"


def check_timeout(function: str, timeout: float) -> float:
    """`timeout`, seconds to wait for one message. Raises TypeError for what is no number, ValueError out of range.

    function: what the caller is called in errors. There is no "for ever": a rank that is stuck would never be named.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"{function}: timeout must be a number of seconds above 0; got {timeout!r}")
    if not 0 < timeout <= LONGEST_TIMEOUT:  # False for NaN, too
        raise ValueError(
            f"{function}: timeout must be a number of seconds above 0 and at most {LONGEST_TIMEOUT} (a year); "
            f"got {timeout!r}"
        )
    return timeout
