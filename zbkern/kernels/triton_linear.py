"""Linear layers as Triton kernels: one persistent product for forward and dgrad, one for wgrad over many segments."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels import tiles
from zbkern.kernels.triton_common import INTERPRETED, Kernel, Variant, activate, activation_gradient, widen
from zbkern.kernels.triton_product import (
    Matrix,
    halve,
    has_bulk_copies,
    load,
    multiply,
    place,
    plan,
    precision,
    rounded,
    store,
)

_SEGMENTS = 8
"""Segments that one launch of wgrad takes; more run as further launches that accumulate."""


@triton.jit
def _finish(
    value, p, q, out, z, bias, P, Q, o_outer, o_inner, z_outer, z_inner,
    ACCUMULATE: tl.constexpr, ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, O_DESCRIPTOR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile, or half of one: bias, activation (or the backward of one), addition, store."""
    if bias is not None:
        j = q + tl.arange(0, N)
        value += widen(tl.load(bias + j, j < Q, 0.0))[None, :]
    if BACKWARD:
        below = widen(load(z, p, q, P, Q, z_outer, z_inner, M, N, O_DESCRIPTOR))
        value = activation_gradient(value, below, ACTIVATION)
    elif z is not None:
        store(z, value, p, q, P, Q, z_outer, z_inner, M, N, O_DESCRIPTOR)
        value = activate(rounded(value, z, O_DESCRIPTOR), ACTIVATION)
    else:
        value = activate(value, ACTIVATION)
    if ACCUMULATE:
        value += widen(load(out, p, q, P, Q, o_outer, o_inner, M, N, O_DESCRIPTOR))
    store(out, value, p, q, P, Q, o_outer, o_inner, M, N, O_DESCRIPTOR)


@Kernel
@triton.jit(do_not_specialize=["P"])
def _product(
    a, b, out, z, bias, P, Q, R,
    a_outer: tl.int64, a_inner: tl.int64, b_outer: tl.int64, b_inner: tl.int64,
    o_outer: tl.int64, o_inner: tl.int64, z_outer: tl.int64, z_inner: tl.int64,
    A_T: tl.constexpr, B_T: tl.constexpr, DESCRIPTORS: tl.constexpr, O_DESCRIPTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr, ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """out [P, Q] (+)= epilogue(sum over r of A[p, r] B[r, q]).

    One program computes every num_programs-th tile [M, N]. The two loops are fused, so that the operands of the next
    tile arrive while this one is written; tiles go down bands of GROUP rows, whose operands then stay in L2.
    """
    count = tl.cdiv(P, M) * tl.cdiv(Q, N)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        p, q = place(tile, P, Q, M, N, GROUP)
        accumulator = tl.zeros((M, N), tl.float32)
        for step in range(tl.cdiv(R, K)):
            accumulator, _ = multiply(
                accumulator, a, b, p, q, step * K, P, Q, R, a_outer, a_inner, b_outer, b_inner,
                A_T, B_T, DESCRIPTORS, PRECISION, M, N, K,
            )  # fmt: skip
        if HALVES == 2:
            left, right = halve(accumulator, M, N)
            _finish(
                left, p, q, out, z, bias, P, Q, o_outer, o_inner, z_outer, z_inner,
                ACCUMULATE, ACTIVATION, BACKWARD, O_DESCRIPTOR, M, N // 2,
            )  # fmt: skip
            _finish(
                right, p, q + N // 2, out, z, bias, P, Q, o_outer, o_inner, z_outer, z_inner,
                ACCUMULATE, ACTIVATION, BACKWARD, O_DESCRIPTOR, M, N // 2,
            )  # fmt: skip
        else:
            _finish(
                accumulator, p, q, out, z, bias, P, Q, o_outer, o_inner, z_outer, z_inner,
                ACCUMULATE, ACTIVATION, BACKWARD, O_DESCRIPTOR, M, N,
            )  # fmt: skip


@triton.jit
def _land(
    value, p, q, out, P, Q, o_outer, o_inner,
    ACCUMULATE: tl.constexpr, REDUCE: tl.constexpr, O_DESCRIPTOR: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Writes or adds a tile. REDUCE: the addition happens on its way to memory, in L2."""
    if REDUCE:
        out.atomic_add([p, q], value)
    else:
        if ACCUMULATE:
            value += widen(load(out, p, q, P, Q, o_outer, o_inner, M, N, O_DESCRIPTOR))
        store(out, value, p, q, P, Q, o_outer, o_inner, M, N, O_DESCRIPTOR)


@Kernel
@triton.jit(do_not_specialize=["r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7"])
def _sum_of_products(
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7, r0, r1, r2, r3, r4, r5, r6, r7,
    out, dbias, P, Q,
    a_outer: tl.int64, a_inner: tl.int64, b_outer: tl.int64, b_inner: tl.int64, o_outer: tl.int64, o_inner: tl.int64,
    SEGMENTS: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr,
    DESCRIPTORS: tl.constexpr, O_DESCRIPTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr, REDUCE: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """out [P, Q] (+)= sum over segments s and rows r < r_s of A_s[p, r] B_s[r, q];  dbias [P] (+)= sum of A_s[p, r].

    One program computes every num_programs-th tile [M, N]. The segments are one loop: each step picks its operands
    by its number, so copies run ahead across the border of two segments, and the output is read and written once.
    """
    e0 = tl.cdiv(r0, K)  # the step after the last of each segment
    e1 = e0
    e3 = e0
    e7 = e0
    if SEGMENTS >= 2:
        e1 = e0 + tl.cdiv(r1, K)
        e3 = e1
        e7 = e1
    if SEGMENTS >= 4:
        e2 = e1 + tl.cdiv(r2, K)
        e3 = e2 + tl.cdiv(r3, K)
        e7 = e3
    if SEGMENTS >= 8:
        e4 = e3 + tl.cdiv(r4, K)
        e5 = e4 + tl.cdiv(r5, K)
        e6 = e5 + tl.cdiv(r6, K)
        e7 = e6 + tl.cdiv(r7, K)
    count = tl.cdiv(P, M) * tl.cdiv(Q, N)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        p, q = place(tile, P, Q, M, N, GROUP)
        accumulator = tl.zeros((M, N), tl.float32)
        columns = tl.zeros((M,), tl.float32)
        for step in range(e7):
            a = a0
            b = b0
            rows = r0
            first = 0
            if SEGMENTS >= 2:
                if step >= e0:
                    a, b, rows, first = a1, b1, r1, e0
            if SEGMENTS >= 4:
                if step >= e1:
                    a, b, rows, first = a2, b2, r2, e1
                if step >= e2:
                    a, b, rows, first = a3, b3, r3, e2
            if SEGMENTS >= 8:
                if step >= e3:
                    a, b, rows, first = a4, b4, r4, e3
                if step >= e4:
                    a, b, rows, first = a5, b5, r5, e4
                if step >= e5:
                    a, b, rows, first = a6, b6, r6, e5
                if step >= e6:
                    a, b, rows, first = a7, b7, r7, e6
            accumulator, part = multiply(
                accumulator, a, b, p, q, (step - first) * K, P, Q, rows, a_outer, a_inner, b_outer, b_inner,
                A_T, B_T, DESCRIPTORS, PRECISION, M, N, K,
            )  # fmt: skip
            if dbias is not None:
                if q == 0:
                    columns += tl.sum(widen(part), 1)
        if HALVES == 2:
            left, right = halve(accumulator, M, N)
            _land(left, p, q, out, P, Q, o_outer, o_inner, ACCUMULATE, REDUCE, O_DESCRIPTOR, M, N // 2)
            _land(right, p, q + N // 2, out, P, Q, o_outer, o_inner, ACCUMULATE, REDUCE, O_DESCRIPTOR, M, N // 2)
        else:
            _land(accumulator, p, q, out, P, Q, o_outer, o_inner, ACCUMULATE, REDUCE, O_DESCRIPTOR, M, N)
        if dbias is not None:
            i = p + tl.arange(0, M)
            mine = (i < P) & (q == 0)
            if ACCUMULATE:
                columns += widen(tl.load(dbias + i, mine, 0.0))
            tl.store(dbias + i, columns.to(dbias.dtype.element_ty), mine)


@Kernel
@triton.jit(do_not_specialize=["M"])
def _sum_rows(
    dy, dbias, M, N, outer: tl.int64, inner: tl.int64, step: tl.int64,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dbias [N] (+)= sum over rows of dy [M, N]. One program: all rows of COLUMNS columns, in order."""
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, M, ROWS):
        i = first + tl.arange(0, ROWS)
        place = dy + (i[:, None] * outer + j[None, :] * inner)
        total += widen(tl.load(place, (i < M)[:, None] & (j < N)[None, :], 0.0))
    value = tl.sum(total, 0)
    if ADD:
        value += widen(tl.load(dbias + j * step, j < N, 0.0))
    tl.store(dbias + j * step, value.to(dbias.dtype.element_ty), j < N)


def linear_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    activation: str | None = None,
    z: Tensor | None = None,
    num_sms: int | None = None,
) -> None:
    """y = activation(x weight^T + bias); z, where given, takes the value before the activation."""
    _run_product("fwd", x, weight.t(), y, z, bias, False, activation, False, num_sms)


def linear_dgrad(
    dy: Tensor,
    weight: Tensor,
    dx: Tensor,
    accumulate: bool = False,
    activation: str | None = None,
    z: Tensor | None = None,
    num_sms: int | None = None,
) -> None:
    """dx (+)= dy weight; with activation and z, (dy weight) activation'(z), the gradient below that activation."""
    _run_product("dgrad", dy, weight, dx, z, None, accumulate, activation, activation is not None, num_sms)


def _run_product(
    op: str,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    z: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
    activation: str | None,
    backward: bool,
    num_sms: int | None,
) -> None:
    (p, r), q = a.shape, b.shape[1]
    if p == 0 or q == 0:
        return
    left, right, result, before = Matrix(a), Matrix(b), Matrix(out), None if z is None else Matrix(z)
    described = left.describable and right.describable
    tile, reads, programs = plan(op, p, q, r, a.dtype, a.device, described, num_sms)
    writes = (
        has_bulk_copies(a.device)
        and not result.transposed
        and result.describable
        and (before is None or before.describable)
    )
    writes = writes and not (before is not None and before.transposed)
    arguments: list[Any]
    strides: tuple[int, ...]
    if reads:
        arguments = [left.descriptor(tile.m, tile.k), right.descriptor(tile.k, tile.n)]
        strides = (1, 1, 1, 1)
    else:
        arguments = [a, b]
        strides = (left.outer, left.inner, right.outer, right.inner)
    if writes:
        width = tile.n // tile.halves
        arguments += [result.descriptor(tile.m, width), before and before.descriptor(tile.m, width)]
        strides += (1, 1, 1, 1)
    else:
        arguments += [out, z]
        strides += (*out.stride(), *((1, 1) if z is None else z.stride()))
    bias = None if bias is None else bias.contiguous()
    flags = (left.transposed, right.transposed, reads, writes, accumulate, activation or "", backward)
    sizes = (tile.m, tile.n, tile.k, tile.group, tile.halves)
    _product(
        programs,
        (*arguments, bias, p, q, r, *strides),
        (*flags, precision(a.dtype), *sizes),
        tile.warps,
        tile.stages,
    )


def linear_wgrad(
    segments: Sequence[tuple[Tensor, ...]],
    outputs: Sequence[Tensor | None],
    accumulate: bool,
    num_sms: int | None = None,
) -> None:
    """dweight (+)= sum of dy^T x and dbias (+)= sum over rows of dy, over segments (x [M_i, K], dy [M_i, N])."""
    dweight, dbias = outputs
    pairs = [(dy.t(), x) for x, dy in segments if x.shape[0]]
    if not pairs:
        if not accumulate:
            for output in outputs:
                if output is not None:
                    output.zero_()
        return
    exchanged = dweight is not None and Matrix(dweight).transposed  # stored [K, N]
    if dbias is not None and (exchanged or dweight is None or dweight.numel() == 0 or not dbias.is_contiguous()):
        sum_rows([dy for _, dy in segments], dbias, accumulate)
        dbias = None
    if dweight is not None and dweight.numel():
        if exchanged:  # the same product with its factors exchanged
            dweight, pairs = dweight.t(), [(x.t(), dy.t()) for dy, x in pairs]
        _run_sum("wgrad", pairs, dweight, dbias, accumulate, num_sms)


def linear_dgrad_sum(segments: Sequence[tuple[Tensor, Tensor]], dx: Tensor, num_sms: int | None = None) -> None:
    """dx = sum of dy weight over (dy [M, N_i], weight [N_i, K]): the input of several layers, written once."""
    if dx.numel():
        _run_sum("dgrad", segments, dx, None, False, num_sms)


def sum_rows(gradients: Sequence[Tensor], dbias: Tensor, accumulate: bool) -> None:
    """dbias [N] (+)= sum over rows of every dy [M_i, N]: the bias gradient where no product takes it along."""
    for dy in gradients:
        m, n = dy.shape
        arguments = (dy, dbias, m, n, *dy.stride(), *dbias.stride())
        _sum_rows(triton.cdiv(n, 64), arguments, (accumulate, 32, 64), warps=4, stages=3)
        accumulate = True


def _run_sum(
    op: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    out: Tensor,
    dbias: Tensor | None,
    accumulate: bool,
    num_sms: int | None,
) -> None:
    """out (+)= sum of a b and dbias (+)= sum of a's columns, over pairs (a [P, R_i], b [R_i, Q])."""
    rest = [(Matrix(a), Matrix(b)) for a, b in pairs]
    result = Matrix(out)
    p, q = out.shape
    while rest:
        left, right = rest[0]
        same = [pair for pair in rest if pair[0].layout == left.layout and pair[1].layout == right.layout][:_SEGMENTS]
        rest = [pair for pair in rest if pair not in same]
        rows = [a.tensor.shape[1] for a, _ in same]
        described = left.describable and right.describable
        tile, reads, programs = plan(op, p, q, sum(rows), left.tensor.dtype, out.device, described, num_sms)
        slots = triton.next_power_of_2(len(same))
        spare = slots - len(same)  # segments of no rows
        unused = [None] * (_SEGMENTS - slots)
        if reads:
            a = [m.descriptor(tile.m, tile.k) for m, _ in same]
            b = [m.descriptor(tile.k, tile.n) for _, m in same]
            strides = (1, 1, 1, 1)
        else:
            a, b = [m.tensor for m, _ in same], [m.tensor for _, m in same]
            strides = (left.outer, left.inner, right.outer, right.inner)
        a += a[:1] * spare + unused
        b += b[:1] * spare + unused
        rows += [0] * spare + unused
        writes = has_bulk_copies(out.device) and result.describable and not result.transposed
        reduces = writes and accumulate and out.dtype == torch.float32 and not INTERPRETED
        target = result.descriptor(tile.m, tile.n // tile.halves) if writes else out
        strides += (1, 1) if writes else out.stride()
        flags = (slots, left.transposed, right.transposed, reads, writes, accumulate, reduces)
        sizes = (tile.m, tile.n, tile.k, tile.group, tile.halves)
        _sum_of_products(
            programs,
            (*a, *b, *rows, target, dbias, p, q, *strides),
            (*flags, precision(left.tensor.dtype), *sizes),
            tile.warps,
            tile.stages,
        )
        accumulate = True


def variants(capability: int) -> list[Variant]:
    """Large bf16 layers with their epilogues, one layer in float32, and a shape that bulk copies refuse."""
    bulk = capability >= 90
    sms = {80: 108, 90: 132, 100: 148}[capability]

    def product(
        op: str, epilogue: str = "", dtype: str = "bf16", z: bool = False, bias: bool = False, accumulate: bool = False,
        bulk: bool = bulk,
    ) -> Variant:  # fmt: skip
        long = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
        tile = tiles.choose(op, 4096, 4096, 4096, long, capability, sms, bulk)
        backward = op == "dgrad" and z
        b_t, strides = op == "fwd", ("i64:16", 1)
        pointer, width = f"*{dtype}", tile.n // tile.halves

        def operand(*block: int) -> str:
            return f"tensordesc<{dtype}[{block[0]}, {block[1]}]>" if bulk else pointer

        types = (
            operand(tile.m, tile.k),
            operand(tile.n, tile.k) if b_t else operand(tile.k, tile.n),
            operand(tile.m, width),
            operand(tile.m, width) if z else None,
            pointer if bias else None,
            *("i32", "i32:16", "i32:16"),
            *((1,) * 8 if bulk else strides * 4),
        )
        constants = (
            *(False, b_t, bulk, bulk, accumulate, epilogue, backward),
            "tf32x3" if dtype == "fp32" else "ieee",
            *(tile.m, tile.n, tile.k, tile.group, tile.halves),
        )
        name = f"linear_{op} {dtype}" + f" {epilogue}" * bool(epilogue) + " bias" * bias + " add" * accumulate
        return Variant(name + " pointers" * (not bulk), _product, types, constants, tile.warps, tile.stages, True, bulk)

    def wgrad(slots: int, dtype: str, out: str, accumulate: bool, bias: bool = False, bulk: bool = bulk) -> Variant:
        long = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
        tile = tiles.choose("wgrad", 4096, 4096, 4096, long, capability, sms, bulk)

        def operand(*block: int) -> str:
            return f"tensordesc<{dtype}[{block[0]}, {block[1]}]>" if bulk else f"*{dtype}"

        unused = (None,) * (_SEGMENTS - slots)
        width = tile.n // tile.halves
        types = (
            *(operand(tile.k, tile.m),) * slots, *unused, *(operand(tile.k, tile.n),) * slots, *unused,
            *("i32",) * slots, *unused,
            f"tensordesc<{out}[{tile.m}, {width}]>" if bulk else f"*{out}", f"*{out}" if bias else None,
            *("i32:16", "i32:16"), *((1,) * 6 if bulk else ("i64:16", 1) * 3),
        )  # fmt: skip
        reduces = bulk and accumulate and out == "fp32"
        constants = (
            *(slots, True, False, bulk, bulk, accumulate, reduces),
            "tf32x3" if dtype == "fp32" else "ieee",
            *(tile.m, tile.n, tile.k, tile.group, tile.halves),
        )
        name = f"linear_wgrad {dtype} to {out}, {slots} segments" + " bias" * bias + " add" * accumulate
        return Variant(
            name + " pointers" * (not bulk), _sum_of_products, types, constants, tile.warps, tile.stages, True, bulk
        )

    pointers = ("i64:16", 1)
    return [
        product("fwd", bias=True),
        product("fwd", "silu", z=True, bias=True),
        product("dgrad"),
        product("dgrad", accumulate=True),
        product("dgrad", "gelu", z=True),
        product("dgrad", dtype="fp32"),
        wgrad(1, "bf16", "fp32", accumulate=True),
        wgrad(4, "bf16", "fp32", accumulate=True, bias=True),
        wgrad(8, "bf16", "bf16", accumulate=True),
        wgrad(1, "fp32", "fp32", accumulate=False),
        *([product("fwd", bulk=False), wgrad(2, "bf16", "fp32", accumulate=True, bulk=False)] if bulk else []),
        Variant("sum_rows bf16", _sum_rows, ("*bf16", "*fp32", "i32", "i32:16", *pointers, 1), (True, 32, 64), 4, 3),
    ]
