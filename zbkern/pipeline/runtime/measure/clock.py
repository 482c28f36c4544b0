"""When actions ran: the host's clock on a CPU, events of the current stream on a GPU, both read as seconds."""

from __future__ import annotations

import time
from typing import Any

import torch

_RENEWED_AFTER = 30.0  # seconds, in which fp32 resolves 4 us; the pipeline drains for it


class EventClock:
    """`now()` marks a moment without waiting for the device; `seconds(mark)` tells it later on the host's clock.

    On a CUDA device a mark is an event of the current stream, so actions are timed where they run and not where
    they are launched; `seconds` waits for that event.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        if self._cuda:
            self._set()

    def renew(self) -> None:
        """Between steps, when no marks are left: sets the device's clock by the host's again where that is long ago.

        Events tell milliseconds in fp32, a quarter of one after an hour, and two GPUs drift apart by more.
        """
        if self._cuda and time.perf_counter() - self._base_seconds > _RENEWED_AFTER:
            self._set()

    def _set(self) -> None:
        self._base = self._event()
        self._base.synchronize()
        self._base_seconds = time.perf_counter()

    def now(self) -> Any:
        return self._event() if self._cuda else time.perf_counter()

    def seconds(self, mark: Any) -> float:
        if not self._cuda:
            return mark
        mark.synchronize()
        return self._base_seconds + self._base.elapsed_time(mark) * 1e-3

    def wait(self, mark: Any) -> None:
        """Until the device has come to this mark; the host is always there."""
        if self._cuda:
            mark.synchronize()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
