"""What all transports share: a mailbox, calls that ranks make together, values of all ranks, and who is stuck."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from zbkern.pipeline.transport.framing import CallNotice, NormTotal, Notice, StallAnswer, StallQuery, decode, encode
from zbkern.pipeline.transport.mailbox import Call, Mailbox, Note, Values
from zbkern.pipeline.transport.mailbox import PipelineError as PipelineError
from zbkern.pipeline.transport.mailbox import Tag as Tag

LONGEST_TIMEOUT = 365 * 86400  # seconds; waits for a lock end in an OverflowError from some 300 years on
_GRACE = 2.0  # seconds in which a rank that is asked why it sends nothing answers


class Transport(ABC):
    """What the engine needs of the connection of one rank to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.awaits: int | None = None  # the rank a message of which is waited for
        self.passes_totals_to: Sequence[int] = ()  # of an optimizer's norm, whatever this rank does meanwhile
        self.begin_action("none")
        self._join(Mailbox(rank))

    def _join(self, mailbox: Mailbox) -> None:
        """Begins anew, with nothing under way."""
        self._mailbox = mailbox
        self._gathers = 0
        self._waiting: set[int] = set()  # ranks that have answered that they wait themselves

    @property
    def failure(self) -> str | None:
        """Why every call raises, None while no rank has failed."""
        return self._mailbox.failure

    def begin(self, call: str) -> None:
        """Begins this rank's next call, such as a step. Raises PipelineError when a rank has failed.

        Messages carry the call that they are sent in: where another rank makes a different one, both fail.
        """
        difference = self._mailbox.begin(call)
        if difference is not None:
            self.fail(difference)
            raise PipelineError(difference)

    def announce(self) -> None:
        """Tells the other ranks which call this one is in; those that are in another one fail, as this one does."""
        for peer in self.peers:
            self._tell(peer, CallNotice(*self._mailbox.call))

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def begin_action(self, action: object) -> None:
        """What this rank does from now on, for messages."""
        self.action = action
        self._action_start = time.monotonic()

    @abstractmethod
    def send(self, peer: int, tag: Any, message: Any) -> None:
        """Starts sending a pytree of tensors and bytes to `peer` and returns; the tensors must stay as they are.

        peer: also this rank, whose neighbouring chunks hand tensors over directly. Raises PipelineError when the peer
        is gone.
        """

    def ready(self, tag: Any) -> bool:
        """True when `receive` would return at once."""
        message = self._mailbox.peek(tag)
        return message is not None and (not message[1] or all(work.is_completed() for work in message[1]))

    def receive(self, peer: int, tag: Any, timeout: float | None) -> Any:
        """The message from `peer`. Raises PipelineError when a rank has failed, or is stuck for `timeout` seconds."""
        self.wait_for(peer, tag, timeout)
        message, works = self._mailbox.take(tag)
        if works:
            self._settle(message, works)
        return message

    def wait_for(self, peer: int, tag: Any, timeout: float | None, instead: Any = None) -> None:
        """Returns once `receive` would, or one of the tag `instead`. Raises as `receive`."""
        self.awaits = peer
        try:
            self._mailbox.wait_for(peer, tag, timeout, instead)
        except TimeoutError:
            self._ask(peer, str(tag), timeout or 0)
            raise PipelineError(self._mailbox.failure) from None
        except PipelineError as error:  # of a peer that closed, perhaps: the others hear that it did
            self.fail(str(error))
            raise
        finally:
            self.awaits = None

    def _settle(self, message: Any, works: Sequence[Any]) -> None:  # noqa: B027
        """Sees to it that a message is there for whoever uses it; without works it is."""

    def forget(self, step: int) -> None:
        """Drops messages to this rank of steps before `step`, arrived or not: nobody will ask for them."""
        for message, works in self._mailbox.forget(step):
            self._settle(message, works)

    def send_total(self, total: NormTotal) -> None:
        """Sends it to the ranks that have sent their sums to this one, which do the same as soon as it arrives."""
        for rank in self.passes_totals_to:
            self._tell(rank, total)

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """One value of every rank, by rank: numbers, strings, and containers and NamedTuples of them; collective.

        Raises TypeError for other values, PipelineError as `receive` does. timeout: None for as long as ranks wait for
        each other to start.
        """
        # from rank to rank and back, because a collective would wait for a frozen rank and never name it
        self.begin("gather")
        self._gathers += 1
        n = self._gathers
        earlier, everything = (Values(n, f"what {which} ranks give to gather {n}") for which in ("earlier", "all"))
        values = [encode(value)]
        decode(values[0])  # what others could not read is an error here
        if self.rank > 0:
            values = self.receive(self.rank - 1, earlier, timeout) + values
        if self.rank < self.size - 1:
            self.send(self.rank + 1, earlier, values)
            values = self.receive(self.rank + 1, everything, timeout)
        if self.rank > 0:
            self.send(self.rank - 1, everything, values)
        return [decode(data) for data in values]

    def broadcast(self, source: int, message: Any, timeout: float | None) -> Any:
        """A pytree of tensors of rank `source`, on every rank; collective. Raises PipelineError as `receive` does."""
        self.begin("broadcast")
        self._gathers += 1
        tag = Values(self._gathers, f"what rank {source} gives to broadcast {self._gathers}")
        if self.rank != source:
            message = self.receive(self.rank + (1 if source > self.rank else -1), tag, timeout)
        for peer in (self.rank - 1, self.rank + 1):  # away from the source
            if 0 <= peer < self.size and abs(peer - source) > abs(self.rank - source):
                self.send(peer, tag, message)
        return message

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Tells every rank that this one has failed; the first reason that a rank hears or tells stays."""

    @abstractmethod
    def reopen(self) -> None:
        """Makes a transport that has failed usable again, without the messages that were under way; collective.

        Raises PipelineError when a rank was lost: only a restart brings it back.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the transport; collective."""

    # ---- who is stuck

    def _ask(self, peer: int, tag: str, waited: float) -> None:
        """Asks `peer` why it sends nothing; returns once a failure is known that explains it.

        A rank that waits itself asks on; one that does not says that it is stuck, from another thread than the one
        that is. Where it is frozen and says nothing, the rank that asked it names it.
        """
        self._tell(peer, StallQuery(tag, waited))
        if self._mailbox.wait_for_failure(_GRACE) is not None:
            return
        waits = peer in self._waiting
        if not waits or self._mailbox.wait_for_failure(_GRACE * self.size) is None:
            both = "waits, too: all ranks must make the same calls, optimizer.step() also"
            self._stop(
                f"rank {self.rank}, action {self.action}: waits for rank {peer}, which "
                f"{both if waits else 'does not answer'}; {tag} was awaited for {waited:g} s"
            )

    def _hear(self, sender: int, message: Notice) -> None:
        """A question why this rank sends nothing, the answer to one, the call that the sender is in, or a norm."""
        if isinstance(message, NormTotal):
            self._mailbox.put(total_tag(message.step), (message.sums, ()), sender, self._mailbox.call)
            self.send_total(message)
            return
        if isinstance(message, CallNotice):
            difference = self._mailbox.compare(sender, Call(*message))
            if difference is not None:
                self._stop(difference)
            return
        if isinstance(message, StallAnswer):
            self._waiting.add(sender)
            return
        peer, tag, waited = self.awaits, message.tag, message.waited
        if peer is not None:
            self._tell(sender, StallAnswer())
            threading.Thread(target=self._ask, args=(peer, tag, waited), name="zbkern-stall", daemon=True).start()
            return
        seconds = time.monotonic() - self._action_start
        self._stop(
            f"rank {self.rank}, action {self.action}: stuck for {seconds:.1f} s; {tag} was awaited for {waited:g} s"
        )

    @abstractmethod
    def _tell(self, peer: int, message: Notice) -> None:
        """Sends what the peer's `_hear` is called with; no error where it is gone."""

    def _stop(self, reason: str) -> None:
        """`fail`, where no call of this rank is about to raise."""
        self.fail(reason)


def total_tag(step: int) -> Note:
    """Of the NormTotal of the n-th optimizer step."""
    return Note(step, f"the squared gradient norm of all stages, optimizer step {step}")


def check_timeout(function: str, timeout: float) -> float:
    """`timeout`, seconds to wait for one message. Raises ValueError for one out of range.

    function: what the caller is called in errors. There is no "for ever": a rank that is stuck would never be named.
    """
    if not 0 < timeout <= LONGEST_TIMEOUT:  # False for NaN, too
        raise ValueError(
            f"{function}: timeout must be a number of seconds above 0 and at most {LONGEST_TIMEOUT} (a year); "
            f"got {timeout!r}"
        )
    return timeout
