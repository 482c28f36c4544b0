"""A wait that is taken out of a compiled kernel is noticed, whichever it is."""

from __future__ import annotations

import pytest

from tests.emulator.taken_out import KINDS, cases, tried

WAITS = [
    *((80, "attention", kind) for kind in KINDS[80]),
    *((90, "linear_wgrad", kind) for kind in ("mbarrier wait", "expect_tx")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "name", "kind"), WAITS)
def test_a_wait_that_is_missing(capability: int, name: str, kind: str) -> None:
    (case,) = (case for case in cases() if case.name == name)
    found = list(tried(capability, case, kind, 2, [1]))
    assert found
    assert all(one.found for one in found), found
