"""What all transports share: their protocol, the error of a failed rank, the tags of messages, time-outs."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from zbkern.pipeline.transport.activity import Activity

LONGEST_TIMEOUT = 365 * 86400  # seconds; waits for a lock end in an OverflowError from some 300 years on


class PipelineError(RuntimeError):
    """A step failed, here or on another rank; the message names the rank, the action and the cause."""


class Transport(Protocol):
    """What the engine needs of a transport."""

    rank: int
    size: int
    activity: Activity

    @property
    def failure(self) -> str | None:
        """Why every call raises, None while no rank has failed."""

    def begin(self, call: str) -> None:
        """Begins this rank's next call, such as a step. Raises PipelineError when a rank has failed.

        Messages carry the call that they are sent in: where another rank makes a different one, both fail.
        """

    def send(self, peer: int, tag: Any, message: Any) -> None:
        """Starts sending a pytree of tensors to `peer` and returns; the tensors must stay as they are.

        Raises PipelineError when the peer is gone.
        """

    def deliver(self, tag: Any, message: Any) -> None:
        """Files a message of this rank for itself: neighbouring chunks on one rank hand tensors over directly."""

    def ready(self, tag: Any) -> bool:
        """True when `receive` would return at once."""

    def receive(self, peer: int, tag: Any, timeout: float) -> Any:
        """The message from `peer`. Raises PipelineError when a rank has failed, or is stuck for `timeout` seconds."""

    def forget(self, step: int) -> None:
        """Drops messages to this rank of steps before `step`, arrived or not: nobody will ask for them."""

    def fail(self, reason: str) -> None:
        """Tells every rank that this one has failed; the first reason that a rank hears or tells stays."""

    def reopen(self) -> None:
        """Makes a transport that has failed usable again, without the messages that were under way; collective.

        Raises PipelineError when a rank was lost: only a restart brings it back.
        """

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """One picklable value of every rank, by rank; collective.

        Raises PipelineError as `receive` does. timeout: None for as long as ranks wait for each other to start.
        """

    def close(self) -> None:
        """Ends the transport; collective."""


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
