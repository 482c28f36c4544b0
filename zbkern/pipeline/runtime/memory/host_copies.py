"""Copies between a device and its host, beside the passes: one lane per direction, which copies one thing at a time.

On a GPU a lane is a stream, and a wait is an event that the current stream waits for. On a CPU it is a thread, the
"host" is another buffer, and a wait blocks. Everything else is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

Pairs = list[tuple[Tensor, Tensor]]  # destination, source


class Copy(NamedTuple):
    """A copy under way. `wait` makes what the caller does next come after its end; `marks` are when it began and ended,
    as the clock tells them (`EventClock`), known once it has ended; None for one that has failed."""

    wait: Callable[[], object]
    marks: Callable[[], tuple[Any, Any] | None]


class Lanes:
    """The two lanes of a device, for transfers of about copy_size bytes; now: the clock's mark of a moment (of the
    current stream)."""

    def __init__(self, device: torch.device, now: Callable[[], Any], copy_size: int) -> None:
        lane = _StreamLane if device.type == "cuda" else _ThreadLane
        self.device, self.copy_size = device, copy_size
        self.out, self.back = lane(device, now), lane(device, now)

    def close(self) -> None:
        """Waits for the copies under way; there can be no others then. No-op the second time."""
        self.out.close()
        self.back.close()


class _StreamLane:
    def __init__(self, device: torch.device, now: Callable[[], Any]) -> None:
        self._device, self._now = device, now
        self._stream = torch.cuda.Stream(device)

    def begin(self, pairs: Pairs) -> Copy:
        """Copies after what the current stream has been given by now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            begun = self._now()
            copy(pairs)
            ended = self._now()
        return Copy(lambda: torch.cuda.current_stream(self._device).wait_event(ended), lambda: (begun, ended))

    def close(self) -> None:
        self._stream.synchronize()


class _ThreadLane:
    def __init__(self, device: torch.device, now: Callable[[], Any]) -> None:
        self._now = now
        self._thread = ThreadPoolExecutor(1, "zbkern copies")

    def begin(self, pairs: Pairs) -> Copy:
        future: Future[tuple[Any, Any]] = self._thread.submit(self._copy, pairs)
        return Copy(future.result, lambda: None if future.exception() else future.result())

    def close(self) -> None:
        self._thread.shutdown()

    def _copy(self, pairs: Pairs) -> tuple[Any, Any]:
        begun = self._now()
        copy(pairs)
        pairs.clear()  # the thread keeps its arguments a little longer, and with them the memory to be given back
        return begun, self._now()


def copy(pairs: Pairs) -> None:
    """Copies every source into its destination, on the current stream."""
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)
