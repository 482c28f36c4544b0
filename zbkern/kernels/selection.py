"""Whose launches are the faster, as measured: what impl="auto" goes by.

`python -m bench.cuda_wgrad` measures W on a GPU and prints its entry of WGRAD; `python -m bench.gpu` has the products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

PRODUCTS: dict[tuple[int, int], str] = {}
"""compute capability -> "triton" or "torch", which is cuBLAS: whose product is the faster where there is nothing to
fuse into it (F and B of a linear without activation). Not measured yet: cuBLAS, which is known to be near the ceiling.
"""

WGRAD: dict[tuple[int, int], dict[tuple[int, int, int], str]] = {}
"""compute capability -> (tokens, N, K) -> "cuda" or "triton". Not measured yet: "auto" never takes the extension."""

ATTENTION: dict[tuple[int, int], dict[tuple[int, int, int], tuple[str, ...]]] = {}
"""compute capability -> (tokens of a sequence, head size, 2 if causal else 1) -> cores, the fastest at forward and
backward together first. Not measured yet: `functions/attention_backends.py` has the order that stands in for it."""

Fastest = TypeVar("Fastest")
Segments = Sequence[tuple[Tensor, ...]]
Outputs = Sequence[Tensor | None]


def nearest(table: Mapping[tuple[int, int, int], Fastest], shape: tuple[int, int, int]) -> Fastest:
    """What was the fastest at the measured shape nearest to this one, in ratios of the sizes."""

    def distance(other: tuple[int, int, int]) -> float:
        return sum(abs(math.log(mine / its)) for mine, its in zip(shape, other, strict=True))

    return table[min(table, key=distance)]


def linear_wgrad(
    table: Mapping[tuple[int, int, int], str], implementations: Mapping[str, ModuleType]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """linear_wgrad and linear_wgrads (spec.py) that run the faster one at its shape; tokens are those of all segments.

    What the extension does not take goes to Triton. Several weights are a launch of each: of the extension, of Triton.
    """

    @functools.lru_cache(maxsize=4096)
    def faster(tokens: int, n: int, k: int) -> str:
        return nearest(table, (tokens, n, k))

    def choose(segments: Segments, outputs: Outputs) -> str:
        x, dweight = segments[0][0], outputs[0]
        if dweight is None or not _for_the_extension(x.dtype, dweight, outputs[1]):
            return "triton"
        n, k = dweight.shape
        return faster(max(1, sum([x.shape[0] for x, _ in segments])), n, k)

    def several(products: Sequence[tuple[Segments, Outputs]], accumulate: bool, **options: int | None) -> None:
        chosen: dict[str, list[tuple[Segments, Outputs]]] = {}
        for product in products:
            chosen.setdefault(choose(*product), []).append(product)
        for name, some in chosen.items():
            implementations[name].linear_wgrads(some, accumulate, **options)

    def one(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
        implementations[choose(segments, outputs)].linear_wgrad(segments, outputs, accumulate)

    return one, several


def _for_the_extension(dtype: torch.dtype, dweight: Tensor, dbias: Tensor | None) -> bool:
    """Whether it takes such outputs: a `main_grad` in a flat buffer may begin anywhere."""
    dtypes = {dweight.dtype, dtype if dbias is None else dbias.dtype}
    steps, (n, k) = dweight.stride(), dweight.shape
    row = max(steps) * dweight.element_size()
    return (
        dtype in (torch.bfloat16, torch.float16)
        and dtypes <= {dtype, torch.float32}
        and min(steps) == 1
        and not (n % 8 or k % 8 or row % 16 or dweight.data_ptr() % 16)
    )
