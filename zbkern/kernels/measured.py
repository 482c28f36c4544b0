"""Whose launches are the faster, as measured: what impl="auto" goes by.

`python -m bench.cuda_wgrad` measures W on a GPU and prints its entry of WGRAD; `python -m bench.gpu` has the products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TypeVar

from torch import Tensor

PRODUCTS: dict[tuple[int, int], str] = {}
"""compute capability -> "triton" or "torch", which is cuBLAS: whose product is the faster where there is nothing to
fuse into it (F and B of a linear without activation). Not measured yet: cuBLAS, which is known to be near the ceiling.
"""

WGRAD: dict[tuple[int, int], dict[tuple[int, int, int], str]] = {}
"""compute capability -> (tokens, N, K) -> "cuda" or "triton". Not measured yet: "auto" never takes the extension."""

ATTENTION: dict[tuple[int, int], dict[tuple[int, int, int], tuple[str, ...]]] = {}
"""compute capability -> (tokens of a sequence, head size, 2 if causal else 1) -> cores, the fastest at forward and
backward together first. Not measured yet: `functions/attention_paths.py` has the order that stands in for it."""

Fastest = TypeVar("Fastest")


def nearest(table: Mapping[tuple[int, int, int], Fastest], shape: tuple[int, int, int]) -> Fastest:
    """What was the fastest at the measured shape nearest to this one, in ratios of the sizes."""

    def distance(other: tuple[int, int, int]) -> float:
        return sum(abs(math.log(mine / its)) for mine, its in zip(shape, other, strict=True))

    return table[min(table, key=distance)]


def linear_wgrad(
    table: Mapping[tuple[int, int, int], str], implementations: Mapping[str, ModuleType]
) -> Callable[[Sequence[tuple[Tensor, ...]], Sequence[Tensor | None], bool], None]:
    """A launch like spec.py's linear_wgrad that runs the faster one at its shape; tokens are those of all segments."""

    @functools.lru_cache(maxsize=4096)
    def faster(tokens: int, n: int, k: int) -> Callable[..., None]:
        name = nearest(table, (tokens, n, k))
        if n % 8 or k % 8:  # not for the extension
            name = "triton"
        return implementations[name].linear_wgrad

    def run(segments: Sequence[tuple[Tensor, ...]], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
        x, dy = segments[0]
        tokens = sum([x.shape[0] for x, _ in segments])
        faster(max(1, tokens), dy.shape[1], x.shape[1])(segments, outputs, accumulate)

    return run
