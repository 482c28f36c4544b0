"""W, merged W, the loss of a head, and attention of drawn shapes: sizes of 1, odd ones, more than a tile, no rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.emulator.cases import BF16, FP32, Case, faults
from tests.support import attention_checks, row_checks
from tests.support import launch_checks as checks
from zbkern.kernels import spec


def _size(draw: random.Random) -> int:
    return draw.choice((1, draw.randint(2, 40), 8 * draw.randint(1, 40), draw.randint(100, 400)))


def _rows(draw: random.Random, count: int) -> list[int]:
    return [draw.choice((0, 1, _size(draw), _size(draw))) for _ in range(count)]


def _layouts(draw: random.Random) -> list[str]:
    return [draw.choice(checks.LAYOUTS) for _ in range(3)]


def _tensors(scale: float = 0.5) -> checks.Random:
    return checks.Random(BF16, "cpu", scale=scale)


def _w(launches: ModuleType, draw: random.Random, bias: bool = False) -> None:
    shape = (_rows(draw, draw.randint(1, 5)), _size(draw), _size(draw), _layouts(draw))
    checks.linear_wgrad(launches, _tensors(), *shape, draw.choice((BF16, FP32)), draw.random() < 0.5, bias)


def _w_with_bias(launches: ModuleType, draw: random.Random) -> None:
    _w(launches, draw, True)


def _merged_w(launches: ModuleType, draw: random.Random) -> None:
    segments = draw.randint(1, 3)
    layers = [(_size(draw), _size(draw), _rows(draw, segments)) for _ in range(draw.randint(2, 5))]
    checks.linear_wgrads(launches, _tensors(), layers, _layouts(draw), draw.random() < 0.5, draw.random() < 0.5)


def _cross_entropy(launches: ModuleType, draw: random.Random) -> None:
    options = spec.CrossEntropyOptions(
        ignore_index=draw.choice((-100, 1)),
        label_smoothing=draw.choice((0.0, 0.1)),
        z_loss=draw.choice((0.0, 1e-3)),
        chunk=draw.choice((16, 100, 1024)),
        softcap=draw.choice((None, 2.0)),
    )
    rows, vocabulary = _rows(draw, draw.randint(1, 3)), 1 + _size(draw)
    row_checks.cross_entropy(
        launches, _tensors(0.2), rows, vocabulary, _size(draw), options, draw.random() < 0.5, draw.random() < 0.5
    )


def _attention(launches: ModuleType, draw: random.Random) -> None:
    """One sequence is longer: gradients of a few tokens alone cancel down to the rounding of y."""
    shared, kv_heads, causal = draw.choice((1, 2, 4)), draw.choice((1, 2)), draw.random() < 0.7
    queries = [draw.choice((0, 1, draw.randint(2, 150))) for _ in range(draw.randint(0, 2))]
    queries.insert(draw.randint(0, len(queries)), draw.randint(20, 150))
    attention_checks.attention(
        launches,
        BF16,
        queries,
        draw.choice((None, [draw.choice((0, 1, draw.randint(2, 150))) for _ in queries])),
        (shared * kv_heads, kv_heads),
        draw.choice((8, 16, 40, 64, 80)),
        causal,
        draw.choice((None, draw.randint(1, 100))) if causal else None,
        softcap=draw.choice((None, 5.0)),
        sinks=draw.random() < 0.3,
        beyond=draw.choice((None, draw.randint(0, 40))),
    )


CHECKS: dict[str, Callable[[ModuleType, random.Random], None]] = {
    "W": _w, "W with a bias": _w_with_bias, "merged W": _merged_w,
    "cross-entropy": _cross_entropy, "attention": _attention,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "first", "count"),
    [
        *(pytest.param(name, 0, 1, id=name) for name in CHECKS),
        *(pytest.param(name, 1, 8, id=f"{name}, many", marks=pytest.mark.slow) for name in CHECKS),
    ],
)
def test_shapes_that_are_drawn(name: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        draw, capability = random.Random(f"{name} {number}"), (90, 80)[number % 2]
        case = Case(f"{name} {number}", lambda launches, draw=draw: CHECKS[name](launches, draw))  # type: ignore[misc]
        found, _, _ = faults(case, capability, [number])
        assert not found, case.name
