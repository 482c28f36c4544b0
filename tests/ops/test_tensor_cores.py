"""The model of tensor cores against what was published about them, and the tolerances that follow from it."""

from __future__ import annotations

import pytest
import torch

from tests.support import tensor_cores
from zbkern import testing


def added(start: float, *products: float) -> float:
    """start + the products, in one block."""
    values = torch.tensor([products])
    return tensor_cores.product(values, torch.ones(len(products), 1), torch.tensor([[start]])).item()


@pytest.mark.parametrize(
    ("start", "products", "expected"),
    [
        (1.0, [2.0**-24] * 16, 1 + 2**-20),  # kept by the two extra bits: one by one they would all be lost
        (1.0, [2.0**-25] * 16, 1 + 2**-21),
        (1.0, [2.0**-26] * 16, 1.0),  # cut off before they are added, though their sum is 2^-22
        (1.0, [1.5 * 2.0**-23], 1 + 2**-23),  # a sum is cut off: to nearest it would be 1 + 2^-22
        (-1.0, [-1.5 * 2.0**-23], -1 - 2**-23),  # towards zero, not down
        (0.0, [2.0**-130] * 2, 2.0**-129),
        (2.0**24, [1.0, -(2.0**24)], 1.0),  # exact inside a block, in any order
    ],
)
def test_the_model_does_what_was_published(start: float, products: list[float], expected: float) -> None:
    assert added(start, *products) == expected


def test_sums_of_several_blocks_are_cut_off_after_each() -> None:
    """One at a time, 2^-24 is lost each time; sixteen at a time none of them."""
    ones, small = torch.ones(32, 1), torch.full((1, 32), 2.0**-24)
    start = torch.ones(1, 1)
    assert tensor_cores.product(small, ones, start).item() == 1 + 2**-19
    assert tensor_cores.product(small, ones, start, block=1).item() == 1.0


@pytest.mark.parametrize("terms", [64, 4096, 65536])
def test_a_right_product_passes_and_one_without_a_row_fails(terms: int) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(*shape).bfloat16() for shape in ((12, terms), (terms, 12)))
    exact = a.double() @ b.double()
    got = tensor_cores.product(a, b)
    testing.assert_close(got, exact, terms=terms)
    with pytest.raises(AssertionError):
        testing.assert_close((a[:, 1:].double() @ b[1:].double()).float(), exact, terms=terms)
    if terms == 65536:  # the reason for it
        with pytest.raises(AssertionError):
            testing.assert_close(got, exact)
