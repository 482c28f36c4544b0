"""What a row of `bench.gpu` is made of: sizes, where it runs, one shape with its peers and its check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from zbkern import testing
from zbkern.kernels import dispatch

Run = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Shapes of all rows: of large models, or small enough for a test on a CPU."""

    square: int = 8192
    copied: int = 2**30
    tokens: tuple[int, ...] = (2048, 4096, 8192)
    merged: tuple[int, ...] = (1024, 2048, 4096)
    layers: tuple[tuple[int, int], ...] = ((4096, 4096), (14336, 4096), (4096, 14336))  # N, K, of Llama 3 8B
    large: tuple[tuple[int, int, int], ...] = (  # tokens, N, K: long microbatches, and Llama 3 70B
        *((16384, 4096, 4096), (8192, 14336, 4096), (16384, 4096, 14336)),
        *((4096, 28672, 8192), (8192, 8192, 28672), (16384, 8192, 8192)),
    )
    hidden: tuple[int, int] = (4096, 14336)
    heads: tuple[int, int, int] = (32, 128, 8192)  # heads, head size, tokens
    vocabulary: tuple[int, int, int] = (8192, 4096, 128256)  # tokens, features, vocabulary
    norm: tuple[int, int] = (16384, 4096)
    calls: tuple[int, int] = (100, 20)  # whose host time is measured: sets of operands, and their turns

    @classmethod
    def tiny(cls) -> Sizes:
        layers, heads, vocabulary = ((48, 32),), (2, 16, 32), (16, 32, 64)
        return cls(64, 4096, (32,), (16,), layers, ((64, 32, 48),), (32, 48), heads, vocabulary, (24, 32), (3, 1))


@dataclass(frozen=True)
class Bench:
    """Where and how everything runs."""

    device: torch.device
    dtype: torch.dtype
    impl: str
    sizes: Sizes

    @property
    def tolerance(self) -> float:
        """Where both sides round on the way: twice what a single one is allowed."""
        return 2 * testing.TOLERANCE[self.dtype]

    def backend(self, op: str) -> ModuleType:
        return dispatch.resolve(op, self.impl, self.device, self.dtype)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=self.device)).to(self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device)


@dataclass(frozen=True)
class Case:
    """One shape of a row. work: flops or bytes, whichever the row counts, that one run of `ours` needs at least. check:
    runs what it compares itself. baseline: the peer that goals are about, the first when not named."""

    label: str
    ours: Run
    peers: dict[str, Run]
    check: Run
    work: int = 0
    floor: float | None = None  # in the unit of the row's goal
    target: float | None = None
    baseline: str | None = None


@dataclass(frozen=True)
class Row:
    """unit: what `rate` is given in. goal: what floor and target are about: "ratio" to the first peer, or "rate"."""

    name: str
    unit: str
    goal: str
    cases: Callable[[Bench], Iterator[Case]] = field(repr=False)

    def rate(self, case: Case, seconds: float) -> float:
        return seconds * 1e6 if self.unit == "us" else case.work / seconds / 1e12
