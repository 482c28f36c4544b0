"""Linear layers as Triton kernels: forward and dgrad, one persistent product with what surrounds it in its epilogue."""

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.triton.common import Kernel, activate, rows_dense, widen
from zbkern.kernels.triton.matmul_tile import (
    Matrix,
    as_operand,
    has_bulk_copies,
    multiply,
    pieces,
    plan,
    precision,
    rounded,
    store,
    tile_index,
)
from zbkern.kernels.triton.replay import replayed


@triton.jit
def _finish(
    value, p, q, out, z, bias, P, Q, o_stride, z_stride,
    ACTIVATION: tl.constexpr, O_DESCRIPTOR: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile, or a piece of one: bias, activation, store."""
    if bias is not None:
        j = q + tl.arange(0, N)
        value += widen(tl.load(bias + j, j < Q, 0.0))[None, :]
    if z is not None:
        store(z, value, p, q, P, Q, z_stride, M, N, O_DESCRIPTOR)
        value = rounded(value, z, O_DESCRIPTOR)
    value = activate(value, ACTIVATION)
    store(out, value, p, q, P, Q, o_stride, M, N, O_DESCRIPTOR)


@Kernel
@triton.jit(do_not_specialize=["P"])
def _product(
    a, b, out, z, bias, P, Q, R, a_stride, b_stride, o_stride, z_stride,
    A_T: tl.constexpr, B_T: tl.constexpr, DESCRIPTORS: tl.constexpr, O_DESCRIPTOR: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [P, Q] = epilogue(sum over r of A[p, r] B[r, q]).

    One program computes every num_programs-th tile [M, N]. The two loops are fused, so that the operands of the next
    tile arrive while this one is written; tiles go down bands of GROUP rows, whose operands then stay in L2.
    """
    steps = max(tl.cdiv(R, K), 1)  # known not to be 0: the compiler then writes the epilogue once
    count = tl.cdiv(P, M) * tl.cdiv(Q, N)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        p, q = tile_index(tile, P, Q, M, N, GROUP)
        accumulator = tl.zeros((M, N), tl.float32)
        for step in range(steps):
            accumulator, _ = multiply(
                accumulator, a, b, p, q, step * K, P, Q, R, a_stride, b_stride,
                A_T, B_T, DESCRIPTORS, PRECISION, M, N, K,
            )  # fmt: skip
        parts = pieces(accumulator, M, N, PARTS)
        for i in tl.static_range(PARTS):
            _finish(
                parts[i], p, q + i * (N // PARTS), out, z, bias, P, Q, o_stride, z_stride,
                ACTIVATION, O_DESCRIPTOR, M, N // PARTS,
            )  # fmt: skip


@replayed
def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    activation: str | None = None,
    z: Tensor | None = None,
) -> None:
    _run_product("fwd", x, weight.t(), y, z, bias, activation)


@replayed
def linear_dgrad(dy: Tensor, weight: Tensor, dx: Tensor) -> None:
    _run_product("dgrad", dy, weight, dx, None, None, None)


def _run_product(
    op: str,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    z: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> None:
    (p, r), q = a.shape, b.shape[1]
    if p == 0 or q == 0:
        return
    left, right = as_operand(a), as_operand(b)
    rows, beside = rows_dense(out, copy=False), None if z is None else rows_dense(z, copy=False)
    targets = [None if tensor is None else Matrix(tensor) for tensor in (rows, beside)]
    bulk = has_bulk_copies(a.device)
    reads = bulk and left.describable and right.describable
    writes = bulk and all(target is None or target.describable for target in targets)
    tile, programs = plan(op, p, q, r, a.dtype, a.device, reads and writes)
    width = tile.n // tile.epilogue_parts()
    results = [(None, 1) if target is None else target.argument(tile.m, width, writes) for target in targets]
    pairs = [left.argument(tile.m, tile.k, reads), right.argument(tile.k, tile.n, reads), *results]
    operands, strides = zip(*pairs, strict=True)
    bias = None if bias is None else bias.contiguous()
    flags = (left.transposed, right.transposed, reads, writes, activation or "")
    sizes = (tile.m, tile.n, tile.k, tile.group, tile.epilogue_parts(writes))
    constants = (*flags, precision(a.dtype), *sizes)
    _product(programs, (*operands, bias, p, q, r, *strides), constants, tile.warps, tile.stages)
    if rows is not out:
        out.copy_(rows)
    if z is not None and beside is not None and beside is not z:
        z.copy_(beside)
