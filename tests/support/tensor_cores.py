"""How Hopper's tensor cores add: a bit-accurate model of their products of bfloat16, float16 and tf32 into float32.

After F. A. Khattak and M. Mikaitis, Accurate Models of NVIDIA Tensor Cores (arXiv 2512.07004), which was held against
an H100: a block of products and the sum so far are shifted to the largest exponent among them, cut off two bits below a
float32's last, added exactly, and the sum is cut off to a float32. Nothing is ever rounded to nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
"""Products that are added at once; of tf32 half as many."""

_EXTRA_BITS = 2


def product(a: Tensor, b: Tensor, start: Tensor | None = None, block: int = BLOCK) -> Tensor:
    """start + a b as float32 [M, N] of a [M, K], b [K, N], whose values a tensor core takes as they are."""
    (m, k), n = a.shape, b.shape[1]
    total = torch.zeros(m, n, dtype=torch.float64) if start is None else start.double()
    for first in range(0, k, block):
        left, right = a[:, first : first + block, None].double(), b[None, first : first + block, :].double()
        terms = torch.cat([left * right, total[:, None, :]], 1)  # exact: 24 bits of 53
        exponents = torch.cat([_exponent(left) + _exponent(right), _exponent(total)[:, None, :]], 1)
        largest = exponents.where(terms != 0, -200).amax(1, keepdim=True)
        total = _cut(_cut(terms, largest - 23 - _EXTRA_BITS).sum(1), None)
    return total.float()


def _exponent(value: Tensor) -> Tensor:
    """e where 2^e <= |value| < 2^(e + 1)."""
    return torch.frexp(value).exponent - 1


def _cut(value: Tensor, last: Tensor | None) -> Tensor:
    """Towards zero to multiples of 2^last; None for the last bit of a float32."""
    last = _exponent(value) - 23 if last is None else last
    return torch.ldexp(torch.ldexp(value, -last).trunc(), last)
