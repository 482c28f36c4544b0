"""The tolerance of long sums, against products that are added as Hopper's tensor cores add them.

After F. A. Khattak and M. Mikaitis, Accurate Models of NVIDIA Tensor Cores (arXiv 2512.07004): sixteen products and the
sum so far are added at once, and the sum is cut off to a float32, never rounded to nearest.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zbkern import testing


def product(a: Tensor, b: Tensor) -> Tensor:
    """float32 [M, N] of a [M, K], b [K, N]; exact within sixteen products, which the cores cut off two bits later."""
    total = torch.zeros(len(a), b.shape[1], dtype=torch.float64)
    for left, right in zip(a.double().split(16, 1), b.double().split(16), strict=True):
        total += left @ right
        last = torch.frexp(total).exponent - 24
        total = torch.ldexp(torch.ldexp(total, -last).trunc(), last)
    return total.float()


@pytest.mark.parametrize("terms", [64, 4096, 65536])
def test_a_right_product_passes_and_one_without_a_row_fails(terms: int) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(*shape).bfloat16() for shape in ((12, terms), (terms, 12)))
    exact = a.double() @ b.double()
    got = product(a, b)
    testing.assert_close(got, exact, terms=terms)
    with pytest.raises(AssertionError):
        testing.assert_close((a[:, 1:].double() @ b[1:].double()).float(), exact, terms=terms)
    if terms == 65536:  # the reason for it
        with pytest.raises(AssertionError):
            testing.assert_close(got, exact)
