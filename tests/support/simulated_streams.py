"""Streams without a GPU: what is put on them runs later, in any order that the events between them allow."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch


class Event:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class Stream:
    """In place of torch.cuda.Stream, for tensors on the CPU."""

    device = torch.device("cpu")

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: deque[Callable[[], bool]] = deque()  # each returns False while it cannot begin

    def record_event(self) -> Event:
        event = Event()

        def reach() -> bool:
            event.passed = True
            return True

        self.work.append(reach)
        return event

    def wait_event(self, event: Event) -> None:
        self.work.append(event.query)

    def step(self) -> bool:
        """Runs the first piece of work; False when there is none, or it must wait."""
        if not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True


class Device:
    """A main and a side stream, in place of the GPU's for `zbkern.wgrad.side_stream`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main, self.side = Stream("main"), Stream("side")
        self._current = [self.main]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current[-1])
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    @property
    def current(self) -> Stream:
        return self._current[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def launch(self, function: Callable[[], Any]) -> None:
        """Puts work on the current stream."""

        def run() -> bool:
            function()
            return True

        self.current.work.append(run)

    def finish(self, first: Sequence[Stream] | None = None) -> None:
        """Runs all work. first: a stream runs as far as events let it before a later one of these gets a step."""
        order = first or (self.main, self.side)
        while any(stream.step() for stream in order):
            pass
        assert not any(stream.work for stream in order), "streams wait for each other"
