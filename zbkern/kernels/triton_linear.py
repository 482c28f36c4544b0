"""Linear layers as Triton kernels: forward and dgrad, one persistent product with what surrounds it in its epilogue."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels import tiles
from zbkern.kernels.triton_common import Kernel, Variant, activate, activation_gradient, widen
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
    a_outer, a_inner, b_outer, b_inner,
    o_outer, o_inner, z_outer, z_inner,
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
        b_t, strides = op == "fwd", ("i32:16", 1)
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

    return [
        product("fwd", bias=True),
        product("fwd", "silu", z=True, bias=True),
        product("dgrad"),
        product("dgrad", accumulate=True),
        product("dgrad", "gelu", z=True),
        product("dgrad", dtype="fp32"),
        *([product("fwd", bulk=False)] if bulk else []),
    ]
