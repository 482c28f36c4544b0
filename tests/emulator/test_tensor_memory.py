"""Tensor memory on the emulator: known answers through Triton's own layouts of it, and faults that it must notice."""

from __future__ import annotations

import contextlib
import re
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    get_tmem_reg_layout,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)  # fmt: skip

from tests.emulator import library
from tests.emulator.gpu import driver, gpu

SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b")  # of 64 rows, the first is 16x32bx2


@gluon.jit
def through_memory(x, y, M: gl.constexpr, N: gl.constexpr, STORED: gl.constexpr, LOADED: gl.constexpr):
    memory: gl.constexpr = TensorMemoryLayout([M, N], col_stride=1)
    there: gl.constexpr = get_tmem_reg_layout(gl.float32, [M, N], memory, 4, instr_variant=STORED)
    back: gl.constexpr = get_tmem_reg_layout(gl.float32, [M, N], memory, 4, instr_variant=LOADED)
    kept = allocate_tensor_memory(gl.float32, [M, N], memory)
    i, j = gl.arange(0, M, gl.SliceLayout(1, there)), gl.arange(0, N, gl.SliceLayout(0, there))
    kept.store(gl.load(x + i[:, None] * N + j[None, :]))
    i, j = gl.arange(0, M, gl.SliceLayout(1, back)), gl.arange(0, N, gl.SliceLayout(0, back))
    gl.store(y + i[:, None] * N + j[None, :], kept.load(back))


@gluon.jit
def shared(source, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SWIZZLE: gl.constexpr):
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    dtype: gl.constexpr = source.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, dtype.primitive_bitwidth, 2)
    i, j = gl.arange(0, ROWS, gl.SliceLayout(1, blocked)), gl.arange(0, COLUMNS, gl.SliceLayout(0, blocked))
    value = gl.load(source + i[:, None] * COLUMNS + j[None, :])
    return gl.allocate_shared_memory(dtype, [ROWS, COLUMNS], layout, value)


@gluon.jit
def product(
    a, b, c,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, SWIZZLE: gl.constexpr,
):  # fmt: skip
    """c [M, N] = A B + (A B + A B), the second sum over the first in tensor memory; A stored [K, M] if A_T."""
    memory: gl.constexpr = TensorMemoryLayout([M, N], col_stride=1)
    registers: gl.constexpr = get_tmem_reg_layout(gl.float32, [M, N], memory, 4)
    left = shared(a, K, M, SWIZZLE).permute((1, 0)) if A_T else shared(a, M, K, SWIZZLE)
    right = shared(b, N, K, SWIZZLE).permute((1, 0)) if B_T else shared(b, K, N, SWIZZLE)
    fence_async_shared()
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
    total = allocate_tensor_memory(gl.float32, [M, N], memory)
    tcgen05_mma(left, right, total, use_acc=False)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)
    value = total.load(registers)
    gl.thread_barrier()
    tcgen05_mma(left, right, total)
    tcgen05_commit(done)
    mbarrier.wait(done, 1)
    value += total.load(registers)
    mbarrier.invalidate(done)
    i, j = gl.arange(0, M, gl.SliceLayout(1, registers)), gl.arange(0, N, gl.SliceLayout(0, registers))
    gl.store(c + i[:, None] * N + j[None, :], value)


def _multiply(
    dtype: torch.dtype, rows: int = 128, turned: tuple[bool, bool] = (False, True), swizzle: int = 32
) -> bool:
    """Whether all three orders of asynchronous work are right."""
    m, n, k = rows, 64, 128
    x, y = (torch.randint(-4, 5, shape).to(dtype) for shape in ((m, k), (k, n)))
    stored = [each.T.contiguous() if t else each for each, t in zip((x, y), turned, strict=True)]
    right = True
    for seed in range(3):
        out = torch.zeros(m, n)
        with gpu(100, seed):
            product[(1,)](*stored, out, m, n, k, *turned, swizzle)
        right = right and torch.equal(out.double(), 3 * x.double() @ y.double())
    return right


def _kinds() -> set[str]:
    return {found.kind for found in library.findings()}


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_loads_what_another_stores(rows: int, shape: str) -> None:
    for stored, loaded in ((shape, SHAPES[0]), (SHAPES[0], shape)):
        with gpu(100):
            x, y = torch.randn(rows, 64), torch.zeros(rows, 64)
            through_memory[(1,)](x, y, rows, 64, stored, loaded)
        assert torch.equal(x, y)
    assert not _kinds()


@pytest.mark.parametrize(
    ("rows", "swizzle", "turned"),
    [(64, 128, (False, False)), (128, 64, (False, True)), (128, 32, (True, False)), (64, 128, (True, True))],
)
def test_products_of_16_bits(rows: int, swizzle: int, turned: tuple[bool, bool]) -> None:
    assert _multiply(torch.bfloat16, rows, turned, swizzle)
    assert not _kinds()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_products_of_other_types(dtype: torch.dtype) -> None:
    assert _multiply(dtype)
    assert not _kinds()


@pytest.mark.parametrize(
    ("without", "kind"),
    [
        (r"@\S+ tcgen05\.commit[^;]*;", "deadlock"),
        (r"@\S+ tcgen05\.dealloc[^;]*;", "tensor memory"),
        (r"@\S+ tcgen05\.alloc[^;]*;", "tensor memory"),
        (r"@!complete bra\.uni waitLoop;", "race"),
        (r"(?<=wait::ld\.sync\.aligned;)(.*?)bar\.sync\s+0;", "race"),
        (r"fence\.proxy\.async[^;]*;", "proxy"),
    ],
)
def test_what_is_left_out_is_noticed(without: str, kind: str) -> None:
    real = driver(100).utils.load_binary

    def load(name: str, code: bytes, *more: Any) -> Any:
        changed = re.sub(without, lambda match: "".join(match.groups()), code.decode(), count=1, flags=re.DOTALL)
        assert changed != code.decode()
        return real(name, changed.encode(), *more)

    product.device_caches.clear()
    with mock.patch.object(driver(100).utils, "load_binary", load), contextlib.suppress(RuntimeError):
        _multiply(torch.bfloat16)
    product.device_caches.clear()
    assert kind in _kinds()
