"""W on a stream of its own: after the B it belongs to, beside everything else, with nothing freed under it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class SideStream:
    """Launches kernels on `stream`, ordered by events alone; the host never waits.

    What a kernel reads was allocated on another stream, whose allocator reuses the memory as soon as the last reference
    is gone. So references are held until the host has seen that the kernel is done, or a stream waits for it.
    (record_stream would keep the memory, too, but until the allocator is next called, and no count would show it.) What
    a kernel allocates belongs to this stream. A stream's priority counts only against others: give the forwards and
    backwards a stream of higher priority (torch.cuda.Stream(priority=-1)), or W competes with them as an equal.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._in_flight: deque[tuple[Any, Sequence[Any]]] = deque()  # (event at its end, what it holds), oldest first

    def record_event(self) -> Any:
        """An event after everything that the current stream has been given so far."""
        return torch.cuda.current_stream(self.stream.device).record_event()

    def launch(self, function: Callable[[], None], ready_events: Iterable[Any], held: Sequence[Any]) -> None:
        """function(), after these events. held: is kept alive until `take_finished` or `join` returns it."""
        for event in ready_events:
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            function()
        self._in_flight.append((self.stream.record_event(), held))

    def take_finished(self) -> list[Any]:
        """The objects that were held for kernels which are done by now."""
        # Events of a graph that is being captured have no state yet
        if not self._in_flight or torch.cuda.is_current_stream_capturing():
            return []
        ended: list[Any] = []
        while self._in_flight and self._in_flight[0][0].query():
            ended += self._in_flight.popleft()[1]
        return ended

    def join(self) -> list[Any]:
        """Makes the current stream wait for all kernels. Returns what was held, whose memory that stream may reuse."""
        if not self._in_flight:
            return []
        torch.cuda.current_stream(self.stream.device).wait_event(self._in_flight[-1][0])
        held = [each for _, what in self._in_flight for each in what]
        self._in_flight.clear()
        return held
