"""Small Triton kernels with known answers, and known faults that the emulator must name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.emulator import library
from tests.emulator.gpu import forget, gpu


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n if MASKED else i < 1000000
    tl.store(out + i, tl.load(x + i, mask) + tl.load(y + i, mask), mask)


@triton.jit
def softmax(x, out, columns, stride, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * stride + j, j < columns, float("-inf"))
    e = tl.exp(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * stride + j, e / tl.sum(e, 0), j < columns)


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(a + i[:, None] * K + k[None, :], (i[:, None] < M) & (k[None, :] < K), 0.0)
        y = tl.load(b + k[:, None] * N + j[None, :], (k[:, None] < K) & (j[None, :] < N), 0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(c + i[:, None] * N + j[None, :], total, (i[:, None] < M) & (j[None, :] < N))


@triton.jit
def shift(x, sums, COUNT: tl.constexpr, BARRIER: tl.constexpr):
    """x[i] = x[i + COUNT / 4], what another warp overwrites; sums [1]: all warps read it, and one stores their sum."""
    i = tl.arange(0, COUNT)
    value = tl.load(x + COUNT // 4 + i)
    if BARRIER:
        tl.debug_barrier()  # no warp stores where another has yet to load
    tl.store(x + i, value)
    total = tl.sum(value.to(tl.float32), 0)
    tl.store(sums, tl.load(sums) + total)


@triton.jit
def product_and_columns(a, b, out, sums, rows, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """That of docs/triton_ring.md."""
    product, total = tl.zeros((M, N), tl.float32), tl.zeros((M,), tl.float32)
    for k in range(0, rows, K):
        x, y = a.load([k, 0]), b.load([k, 0])
        product = tl.dot(x.T, y, product)
        total += tl.sum(x.to(tl.float32), 0)
    out.store([0, 0], product)
    tl.store(sums + tl.arange(0, M), total)


@pytest.fixture(autouse=True, params=[80, 90])
def capability(request: pytest.FixtureRequest) -> Iterator[int]:
    forget(add, shift, softmax, matmul, product_and_columns)
    library.findings()
    with gpu(request.param):
        yield request.param


def found() -> set[str]:
    return {finding.kind for finding in library.findings()}


def test_a_sum_and_what_lies_beside_it() -> None:
    x, y = torch.randn(1000), torch.randn(1000)
    for masked in (True, False):
        out = torch.empty(1000)
        add[(8,)](x, y, out, 1000, 128, masked)
        assert torch.equal(out, x + y)
        assert found() == (set() if masked else {"out of bounds"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_block_that_stores_where_it_has_yet_to_load(dtype: torch.dtype) -> None:
    for barrier in (True, False):
        x, sums = torch.arange(640).to(dtype), torch.ones(1)
        right = x[128:].clone()
        shift[(1,)](x, sums, 512, barrier)
        if barrier:
            assert torch.equal(x[:512], right)
            assert sums == 1 + right.float().sum()
        assert found() == (set() if barrier else {"race"})


def test_rows() -> None:
    x = torch.randn(37, 300)
    out = torch.empty_like(x)
    softmax[(37,)](x, out, 300, 300, 512)
    torch.testing.assert_close(out, x.softmax(1))
    assert not found()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_product(dtype: torch.dtype) -> None:
    a, b, c = torch.randn(130, 72).to(dtype), torch.randn(72, 100).to(dtype), torch.empty(130, 100)
    matmul[(3, 2)](a, b, c, 130, 100, 72, 64, 64, 32)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), atol=1e-4, rtol=0)
    assert not found()


def test_a_copy_that_overwrites_what_a_product_reads(capability: int) -> None:
    """A fault of Triton's, see docs/triton_ring.md; where Triton has mended it this test says so."""
    if capability < 90:
        pytest.skip("there are no bulk copies")
    a, b = (torch.randn(512, 128).bfloat16() for _ in range(2))
    out, sums = torch.empty(128, 128), torch.empty(128)
    tiles = [TensorDescriptor.from_tensor(*pair) for pair in ((a, [64, 128]), (b, [64, 128]), (out, [128, 128]))]
    product_and_columns[(1,)](*tiles, sums, 512, 128, 128, 64, num_warps=4, num_stages=3)
    assert (out - a.double().t() @ b.double()).abs().max() > 10
    torch.testing.assert_close(sums.double(), a.double().sum(0), atol=1e-4, rtol=0)
    assert found() == {"race"}
