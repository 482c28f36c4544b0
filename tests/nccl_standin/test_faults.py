"""A rank fails: all others end in time, with one name and cause, and go on where all are there."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from tests.nccl_standin.faults import TIMEOUT, Fault, run_with
from tests.support.seeds import seed as seed_of

BOUND = 3.0  # seconds after which others end; 2 for what is under way, 2 for questions that a frozen rank never answers

PLACES = {
    "kill": ("connect", "F", "send", "connected send", "recv", "optimizer"),
    "freeze": ("F", "send", "connected send", "recv", "optimizer"),
    "raise": ("F", "send", "recv"),
    "interrupt": ("F", "send"),
    "memory": ("F", "recv"),
}


def cases() -> Iterator[Fault]:
    for kind, places in PLACES.items():
        for place in places:
            for size in (2, 3, 5):
                for victim in {0, size // 2, size - 1}:
                    yield Fault(kind, place, size, victim)


def check(fault: Fault, seed: int) -> None:
    run, told = run_with(fault, seed)
    bound = BOUND + (TIMEOUT + 2 if fault.kind == "freeze" else 0)
    name = f"rank {fault.victim}"
    for rank, each in enumerate(told):
        if each is None:
            assert rank == fault.victim
            continue
        assert each.after < bound, (rank, each)
        if fault.kind == "kill":
            assert each.text == f"{name} exited unexpectedly: its connection closed without notice", (rank, each)
        elif fault.kind == "freeze":
            assert re.search(rf"{name}, which does not answer|{name}, action .*: stuck", each.text), (rank, each)
        elif rank != fault.victim or fault.place == "recv":
            cause = "KeyboardInterrupt" if fault.kind == "interrupt" else "the cause"
            assert name in each.text, (rank, each)
            assert cause in each.text, (rank, each)
    if fault.kind not in ("kill", "freeze"):
        assert len({each.goes_on for each in told if each}) == 1, told
    left = [nccl for nccl in run.communicators if not nccl.closed and told[nccl.rank] is not None]
    assert not left, "communicators that nobody ended"
    assert not run.errors()


QUICK = [
    Fault("kill", "connected send", 3, 1),
    Fault("kill", "connect", 3, 0),
    Fault("freeze", "send", 2, 0),
    Fault("freeze", "connected send", 3, 1),
    Fault("raise", "F", 3, 2),
    Fault("interrupt", "send", 2, 0),
    Fault("memory", "recv", 3, 1),
]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: "-".join(map(str, fault)))
def test_others_end_in_time_with_one_name(fault: Fault) -> None:
    check(fault, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PLACES])
def test_everywhere_others_end_in_time_with_one_name(kind: str) -> None:
    rng = random.Random(seed_of(0))
    for fault in cases():
        if fault.kind == kind:
            seed = rng.randrange(10**6)
            print(fault, seed)
            check(fault, seed)
