"""What a rank is doing, for its transport to report when another rank has waited too long."""

from __future__ import annotations

import time


class Activity:
    """What a rank is doing: `action` since `start`, or waiting for a message of rank `awaits`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.awaits: int | None = None
        self.begin("none")

    def begin(self, action: object) -> None:
        self.action = action
        self.start = time.monotonic()

    def stuck(self, tag: str, waited: float) -> str:
        """What a rank says that waits for no message itself, when another one has waited too long for it."""
        seconds = time.monotonic() - self.start
        return f"rank {self.rank}, action {self.action}: stuck for {seconds:.1f} s; {tag} was awaited for {waited:g} s"

    def timeout_message(self, peer: int, tag: str, waited: float, link: tuple[int, int] | None) -> str:
        """What a rank says that has waited too long, and was told of no rank that is stuck.

        link: the last rank that answered, and the one that it waits for; None where nobody did.
        """
        reason = "it does not answer"
        if link is not None:
            reason = f"rank {link[0]} waits for rank {link[1]}, which does not answer"
        return f"rank {self.rank}, action {self.action}: rank {peer} did not send {tag} in {waited:g} s: {reason}"
