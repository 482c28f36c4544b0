"""A barrier, wait or fence that is taken out of a compiled kernel is noticed, but for those that it can do without."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.emulator.taken_out import KINDS, cases, tried

NEEDED = {
    # One after mbarriers are initialised, one before a copy overwrites what the other warps' product read, and around
    # each half of the tile on its way out. The others stand beside one of these, and one thread's work lies between.
    ("bar.sync", "_product"): 6,
    ("bar.sync", "_sums"): 6,
    ("mbarrier wait", "_product"): 1,
    ("mbarrier wait", "_sums"): 2,
    ("fence.proxy.async", "_product"): 2,
    ("fence.proxy.async", "_sums"): 2,
    # Without the one at the end, where no product is pending.
    ("wgmma.wait_group", "_product"): 2,
    ("wgmma.wait_group", "_sums"): 2,
    ("wgmma.fence", "_product"): 1,
    ("wgmma.fence", "_sums"): 1,
    ("cp.async.bulk.wait_group", "_product"): 3,
    ("cp.async.bulk.wait_group", "_sums"): 3,
    ("expect_tx", "_product"): 3,
    ("expect_tx", "_sums"): 12,  # two operands in six stages
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_fwd", "linear_wgrad"])
def test_what_products_need_is_missed(name: str) -> None:
    (case,) = (case for case in cases() if case.name == name)
    missed = Counter((one.kind, one.kernel) for one in tried(90, case, list(KINDS[90]), [1]) if one.found)
    (kernel,) = {kernel for _, kernel in missed}
    assert missed == {key: count for key, count in NEEDED.items() if key[1] == kernel}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_no_barrier_of_a_loss_can_be_left_out(capability: int) -> None:
    """One is for global memory: a warp reads the target's logit, which another overwrites by its gradient."""
    (case,) = (case for case in cases() if case.name == "cross_entropy")
    found = [one for one in tried(capability, case, ["bar.sync"], [1]) if one.kernel == "_loss"]
    assert len(found) > 2
    assert all("race" in one.found for one in found), found


@pytest.mark.slow
def test_what_attention_waits_for_is_missed() -> None:
    (case,) = (case for case in cases() if case.name == "attention")
    found = list(tried(80, case, ["cp.async.wait_group"], [1]))
    assert found
    assert all(one.found for one in found), found
