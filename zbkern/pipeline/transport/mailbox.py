"""Messages that have arrived, by their tags, until somebody asks for them; the error of a failed rank."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

_LONGEST_TEXT = 10_000  # characters of an error that other ranks are told


class PipelineError(RuntimeError):
    """A step failed, here or on another rank; the message names the rank, the action and the cause."""


def described(error: BaseException) -> str:
    """The kind and text of an error, short and in UTF-8, so that it can be sent."""
    try:
        text = f"{error}"[:_LONGEST_TEXT].encode(errors="backslashreplace").decode()
    except Exception:
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {text}"


class Tag(NamedTuple):
    """The tag of an input of `chunk` (kind F), or of a gradient of its output (kind B): what one of its actions needs.

    unit: the number in that action, of a microbatch or of a slice of one.
    """

    step: int
    kind: str
    chunk: int
    unit: int

    def __str__(self) -> str:
        what = "input" if self.kind == "F" else "output gradient"
        return f"the {what} of chunk {self.chunk}, action {self.chunk}{self.kind}{self.unit}"


class Note(NamedTuple):
    """The tag of any other message: words that tell what it is, and a number that differs each time."""

    number: int
    what: str

    def __str__(self) -> str:
        return self.what


class Values(Note):
    """The tag of what a rank gives to a gather or broadcast."""


class Call(NamedTuple):
    """What a rank does, by its turn: 0 to connect, then every step, optimizer step, evaluation, gather, and the close.

    All ranks do the same."""

    turn: int
    name: str


class Mailbox:
    """A rank's messages that have arrived and were not asked for yet, and what it knows of other ranks' calls.

    Thread-safe.
    """

    def __init__(self, rank: int) -> None:
        self.call = Call(0, "connecting")  # this rank's
        self._rank = rank
        self._ahead: dict[int, dict[str, int]] = {}  # by turn, the calls that others are in already, and who is
        self._messages: dict[Any, Any] = {}
        self._changed = threading.Condition()
        self._closed: set[int] = set()
        self._first_step = 0
        self.failure: str | None = None

    def begin(self, name: str) -> str | None:
        """This rank's next call. Returns what `put` does. Raises PipelineError when a rank has failed meanwhile."""
        with self._changed:
            if self.failure is not None:
                raise PipelineError(self.failure)
            self.call = Call(self.call.turn + 1, name)
            ahead = self._ahead.pop(self.call.turn, {})
            return next((self._difference(rank, other) for other, rank in ahead.items() if other != name), None)

    def put(self, tag: Any, message: Any, sender: int, call: Call) -> str | None:
        """Files a message that `sender` sent in its `call`. Returns what is wrong where this rank's is another one.

        Of a call that this rank has not begun yet, `begin` tells.
        """
        with self._changed:
            if not (isinstance(tag, Tag) and tag.step < self._first_step):
                self._messages[tag] = message
                self._changed.notify_all()
            return None if call == self.call else self.compare(sender, call)

    def compare(self, sender: int, call: Call) -> str | None:
        """What is wrong where `sender` is in this call, if anything; as `put`."""
        with self._changed:
            if call.turn > self.call.turn:
                self._ahead.setdefault(call.turn, {})[call.name] = sender
            if call.turn != self.call.turn or call.name == self.call.name:
                return None
            return self._difference(sender, call.name)

    def _difference(self, sender: int, name: str) -> str:
        return (
            f"ranks make different calls: call {self.call.turn} of this pipeline is {name} on rank {sender} and "
            f"{self.call.name} on rank {self._rank}; make the same calls in the same order on all ranks"
        )

    def fail(self, reason: str) -> None:
        """Makes every present and later `take` raise; the first reason stays."""
        with self._changed:
            self.failure = self.failure or reason
            self._changed.notify_all()

    def closed(self, peer: int) -> None:
        """Nothing more will come from that rank."""
        with self._changed:
            self._closed.add(peer)
            self._changed.notify_all()

    def forget(self, step: int) -> None:
        """Drops the messages of steps before `step`, those that come later, too."""
        with self._changed:
            self._first_step = step
            for tag in [tag for tag in self._messages if isinstance(tag, Tag) and tag.step < step]:
                del self._messages[tag]

    def peek(self, tag: Any) -> Any:
        return self._messages.get(tag)

    def take(self, tag: Any) -> Any:
        """The message, which is there."""
        with self._changed:
            return self._messages.pop(tag)

    def wait_for(self, peer: int, tag: Any, timeout: float | None, instead: Any = None) -> None:
        """Returns once the message is there, or the one with the tag `instead`.

        Raises PipelineError when a rank has failed or `peer` has closed, TimeoutError after a while. A gather that has
        everything ends well, although a rank that had it sooner may have failed since.
        """

        def here() -> bool:
            return tag in self._messages or instead in self._messages

        with self._changed:
            self._changed.wait_for(lambda: here() or self.failure is not None or peer in self._closed, timeout)
            if here() and (self.failure is None or isinstance(tag, Values)):
                return
            if self.failure is not None:
                raise PipelineError(self.failure)
            if peer in self._closed:
                raise PipelineError(f"rank {peer} closed its pipeline while rank {self._rank} awaited {tag} from it")
            raise TimeoutError

    def why_unreachable(self, peer: int, timeout: float) -> str | None:
        """Why `peer` cannot be reached, or why everything ends; None where that is not known in `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or peer in self._closed, timeout)
            if self.failure is None and peer in self._closed:
                return f"rank {peer} closed its pipeline while rank {self._rank} had a message for it"
            return self.failure
