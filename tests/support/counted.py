"""Ranks whose time is counted instead of measured: it goes on by what they sleep, and to when their messages arrive.

So what they measure is the same on every machine, however busy. Each rank is a thread, as is a test without ranks. With
eager filling it is not the same: W that fill a wait depend on when a message is there on the machine.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench.overlap_counted import Counted, Stamped
from tests.support.chunks import results_on_threads
from zbkern.pipeline.runtime.measure.clock import EventClock

Travel = Callable[[int, int, Any, Any], float]
_rank = threading.local()


def sleep(seconds: float, noise: float = 0.0) -> None:
    """This rank's time goes on by as much, and by up to that share of it, drawn by the rank."""
    _rank.lane.sleep(seconds * (1 + noise * _rank.random.random()))


def results_on_counted_ranks(size: int, function: Callable[[Stamped], Any], travel: Travel | None = None) -> list[Any]:
    """As `results_on_threads`; travel: seconds of a message by sender, receiver, tag and message. By a test with the
    fixture `counted_time`, which counts from 0 here."""

    def call(transport: Any) -> Any:
        _begin(transport.rank)
        transport.lane = _rank.lane
        if travel is not None:
            transport.travel = travel
        return function(transport)

    return results_on_threads(size, call, ring=Stamped.ring)


def _begin(rank: int) -> None:
    _rank.lane, _rank.random = Counted(), random.Random(rank)


@pytest.fixture
def counted_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clock by which passes and messages are measured tells the time that ranks have counted."""
    monkeypatch.setattr(EventClock, "now", lambda _: _rank.lane.now())
    _begin(0)
    yield
    del _rank.lane, _rank.random
