"""The interpreter that these tests run kernels in finds integers that overflow."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402


@triton.jit
def _nested(x, y, operation: tl.constexpr):
    if operation == "add":
        return x + y
    if operation == "sub":
        return x - y
    return x * y


@triton.jit
def _combine(x_ptr, y_ptr, out_ptr, operation: tl.constexpr):
    where = tl.arange(0, 4)
    tl.store(out_ptr + where, _nested(tl.load(x_ptr + where), tl.load(y_ptr + where), operation))


def combined(operation: str, x: int, y: int, dtype: torch.dtype) -> list[int]:
    out = torch.zeros(4, dtype=dtype)
    _combine[(1,)](*(torch.tensor([1, 2, 3, last], dtype=dtype) for last in (x, y)), out, operation)
    return out.tolist()


@pytest.mark.parametrize(
    ("operation", "x", "y", "beyond"),
    [("add", 2**31 - 2, 1, 2), ("sub", 1 - 2**31, 1, 2), ("mul", 2**15, 2**15, 2**16)],
)
def test_an_overflow_of_32_bits_ends_the_launch(operation: str, x: int, y: int, beyond: int) -> None:
    assert combined(operation, x, y, torch.int32) == combined(operation, x, y, torch.int64)
    with pytest.raises(Exception, match=f"int32 overflow detected for operation {operation}"):
        combined(operation, x, beyond, torch.int32)
    combined(operation, x, beyond, torch.int64)
