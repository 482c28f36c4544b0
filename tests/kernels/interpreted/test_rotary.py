"""The Triton rotary embedding in the interpreter against the reference in float64; outputs start as NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import row_checks
from zbkern import functional, testing
from zbkern.kernels.triton import rotary as triton_rotary

SHAPES = [((1, 1, 1, 1), 0), ((1, 2, 1, 2), 1), ((2, 3, 5, 10), 4), ((1, 2, 33, 128), 64), ((2, 2, 3, 67), 33)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "half"), SHAPES)
def test_rotary(shape: tuple[int, ...], half: int, interleaved: bool, dtype: torch.dtype) -> None:
    for layout, wide in (("plain", True), ("odd", False), ("transposed", True)):
        random = row_checks.Random(dtype, "cpu")
        row_checks.rotary(triton_rotary, random, shape, half, interleaved, wide, layout)


@settings(max_examples=15, deadline=None)
@given(
    st.tuples(*[st.integers(0, 3)] * 2, st.integers(1, 9), st.integers(1, 40)),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
    st.sampled_from(row_checks.checks.LAYOUTS),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_any_shape(
    shape: tuple[int, ...], half: int, interleaved: bool, wide: bool, layout: str, dtype: torch.dtype
) -> None:
    half = min(half, shape[3] // 2)
    row_checks.rotary(triton_rotary, row_checks.Random(dtype, "cpu"), shape, half, interleaved, wide, layout)


def test_tiles_are_powers_of_two() -> None:
    """Which the compiler insists on, and the interpreter does not."""
    for heads in (1, 5, 32, 40):
        for size in (1, 2, 80, 96, 256):
            for half in range(size // 2 + 1):
                tile = triton_rotary._tile(heads, size, half)
                assert all(n & (n - 1) == 0 for n in tile)
                assert tile[1] >= half
                assert tile[2] >= size - 2 * half


def test_nothing_to_rotate_launches_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU refuses a grid of no programs."""
    grids: list[tuple[int, int]] = []
    monkeypatch.setattr(triton_rotary, "_rotate", lambda grid, *_, **__: grids.append(grid))
    for shape in ((0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (2, 3, 2, 8)):
        x, angles = torch.empty(shape), torch.ones(shape[1], 4)
        triton_rotary.rotary_fwd(x, angles, angles, False, x.clone())
    assert grids == [(6, 1)]


@pytest.mark.parametrize("interleaved", [False, True])
def test_function_on_a_part_of_one_projection(interleaved: bool) -> None:
    """Queries and keys as they come out of one product: views with longer strides."""
    torch.manual_seed(0)
    angles, found = torch.randn(5, 3), []
    values = torch.randn(2, 5, 6, 8)
    for impl in ("triton", "torch"):
        together = values.clone().requires_grad_()
        q, k, _ = together.split((2, 2, 2), 2)
        for x in (q, k[0]):
            y = functional.rotary(x, angles.cos(), angles.sin(), interleaved, impl=impl)
            y.square().mul(torch.arange(8)).sum().backward(retain_graph=True)
        found.append((y, together.grad))
    for got, expected in zip(*found, strict=True):
        testing.assert_close(got, expected)
