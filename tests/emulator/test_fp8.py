"""Blockwise-scaled FP8: quantised bit for bit as the reference does, and multiplied."""

from __future__ import annotations

import pytest
import torch

from tests.support import launch_checks
from zbkern.kernels.reference import fp8 as reference_fp8
from zbkern.kernels.triton import fp8 as triton_fp8

pytestmark = pytest.mark.usefixtures("hopper")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def hostile(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Sizes from 2^-20 to 2^10 by column, with a row of zeros."""
    generator = torch.Generator().manual_seed(rows)
    sizes = torch.exp2(torch.randint(-20, 10, (columns,), generator=generator).float())
    values = torch.randn(rows, columns, generator=generator) * sizes
    values[rows // 2] = 0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 128), (40, 300)])
def test_rows_are_quantised_as_in_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for tensor in (hostile(*shape, dtype), hostile(*shape[::-1], dtype).t()):
        values, scales = triton_fp8._quantised(tensor)
        expected, expected_scales = reference_fp8.quantised(tensor, 1)
        assert torch.equal(values.float(), expected.float())
        assert torch.equal(scales, expected_scales.t())


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (140, 300)])
def test_weights_are_quantised_as_in_the_reference(shape: tuple[int, int], transpose: bool) -> None:
    weight = hostile(*shape, torch.bfloat16)
    values, scales = triton_fp8._quantised(weight, True, transpose)
    expected, expected_scales = reference_fp8.quantised(weight, 128)
    assert torch.equal(values.float(), (expected.t() if transpose else expected).float())
    assert torch.equal(scales, expected_scales if transpose else expected_scales.t())


def test_what_was_made_of_a_weight_is_kept_for_the_next_call() -> None:
    random = launch_checks.Random(torch.float32, "cpu")
    x, dy, weight, kept = random(5, 130), random(5, 140), random(140, 130), {}
    found = []
    for _ in range(2):
        y, dx = torch.empty(5, 140), torch.empty(5, 130)
        triton_fp8.fp8_linear_fwd(x, weight, None, y, kept)
        triton_fp8.fp8_linear_dgrad(dy, weight, dx, kept)
        found.append((y, dx))
        weight.zero_()  # which the second call does not read
    assert all(map(torch.equal, *found))
    assert found[0][0].any()
    assert found[0][1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "1e-31", "6e4"])
@pytest.mark.parametrize("shape", [(1, 1), (129, 257)])
def test_what_is_not_finite_or_very_small_is_quantised_as_in_the_reference(
    shape: tuple[int, int], value: str, dtype: torch.dtype
) -> None:
    tensor = hostile(*shape, dtype)
    tensor[0, :128] = float(value)  # all of a row's block
    tensor[-1, -1] = float(value)
    by_rows, by_blocks = reference_fp8.quantised(tensor, 1), reference_fp8.quantised(tensor, 128)
    found = [triton_fp8._quantised(tensor), *(triton_fp8._quantised(tensor, True, t) for t in (False, True))]
    wanted = [(values, scales.t()) for values, scales in (by_rows, by_blocks)] + [(by_blocks[0].t(), by_blocks[1])]
    for got, expected in zip(found, wanted, strict=True):
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
