"""The clock of a device whose events count in fp32 from their own zero, in place of torch's."""

from __future__ import annotations

import time

import pytest
import torch

from zbkern.pipeline.runtime.measure import clock

AHEAD = 5.0  # seconds between the host's moment and the device's


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.seconds, self.stream = time.perf_counter() + AHEAD, stream

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return torch.tensor(1e3 * (later.seconds - self.seconds), dtype=torch.float32).item()


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)


def test_marks_are_read_on_the_clock_of_the_host() -> None:
    mine = clock.EventClock(torch.device("cuda", 1))
    before = time.perf_counter()
    found, after = mine.seconds(mine.now()), time.perf_counter()
    assert before - 1e-3 < found < after + 1e-3


def test_marks_are_of_the_device_asked_for() -> None:
    assert clock.EventClock(torch.device("cuda", 1)).now().stream == torch.device("cuda", 1)


def test_after_a_day_it_is_still_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, now = clock.EventClock(torch.device("cuda", 0)), time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + 86400.123)
    start, end = mine.now(), mine.now()
    end.seconds = start.seconds + 1e-3
    assert mine.seconds(end) - mine.seconds(start) != pytest.approx(1e-3, rel=0.1)  # what renewing is for
    mine.renew()
    start, end = mine.now(), mine.now()
    end.seconds = start.seconds + 1e-3
    assert mine.seconds(end) - mine.seconds(start) == pytest.approx(1e-3, rel=0.1)
