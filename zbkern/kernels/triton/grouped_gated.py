"""The gated MLP of experts as Triton kernels: the gate of all rows, and its backward in the epilogue of the down
projection's dgrad, where the gradient of h stays in registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import GateOptions
from zbkern.kernels.triton.common import Kernel, activate, activation_gradient, dot, rows_dense, widen
from zbkern.kernels.triton.grouped import grouped_linear_dgrad, grouped_linear_fwd
from zbkern.kernels.triton.grouped_tile import (
    as_rows,
    as_stack,
    find_rows,
    group_end,
    load_rows,
    matrix_of,
    padded,
    plan_groups,
    ragged_descriptor,
    row_tiles,
)
from zbkern.kernels.triton.matmul_tile import (
    call_to_l2,
    has_bulk_copies,
    load,
    pieces,
    precision,
    store,
    tile_index,
)


@triton.jit
def load_gate(z, row, column, rows, H, stride, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(gate, up), each [ROWS, COLUMNS] from (row, column) on, zeros beyond the end; `gate_and_up` makes them of it."""
    if INTERLEAVED:
        return (load(z, row, 2 * column, rows, 2 * H, stride, ROWS, 2 * COLUMNS, False),)
    else:
        gate = load(z, row, column, rows, H, stride, ROWS, COLUMNS, False)
        return gate, load(z + H, row, column, rows, H, stride, ROWS, COLUMNS, False)


@triton.jit
def gate_and_up(loaded, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What load_gate loaded, in float32."""
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(loaded[0], (ROWS, COLUMNS, 2)))
        return widen(gate), widen(up)
    else:
        return widen(loaded[0]), widen(loaded[1])


@triton.jit
def call_gate_to_l2(
    z, row, column, rows, H, stride, step, steps,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """At one of the steps of a main loop: what load_gate will load."""
    if INTERLEAVED:
        call_to_l2(z, row, 2 * column, rows, 2 * H, stride, step, steps, ROWS, 2 * COLUMNS)
    else:
        call_to_l2(z, row, column, rows, H, stride, step, steps, ROWS, COLUMNS)
        call_to_l2(z + H, row, column, rows, H, stride, step, steps, ROWS, COLUMNS)


@triton.jit
def store_gate(
    z, gate, up, row, column, rows, H, stride,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The opposite of load_gate."""
    if INTERLEAVED:
        both = tl.reshape(tl.join(gate, up), (ROWS, 2 * COLUMNS))
        store(z, both, row, 2 * column, rows, 2 * H, stride, ROWS, 2 * COLUMNS, False)
    else:
        store(z, gate, row, column, rows, H, stride, ROWS, COLUMNS, False)
        store(z + H, up, row, column, rows, H, stride, ROWS, COLUMNS, False)


@triton.jit
def limited(gate, up, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """What the activation takes, and what it is multiplied by."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate, up + OFFSET


@triton.jit
def gate_backward(
    dh, gate, up,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """(h, dgate, dup) of spec.GateOptions in float32. LIMIT: 0 for none."""
    low, factor = limited(gate, up, LIMIT, OFFSET)
    value = activate(ALPHA * low, ACTIVATION) / ALPHA
    dgate, dup = activation_gradient(dh * factor, ALPHA * low, ACTIVATION), dh * value
    if LIMIT > 0:
        dgate, dup = tl.where(gate > LIMIT, 0.0, dgate), tl.where(tl.abs(up) > LIMIT, 0.0, dup)
    return value * factor, dgate, dup


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _gate(
    z, dh, h, dz, rows, H, z_stride, dh_stride, h_stride, dz_stride,
    BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """h [rows, H] = gate(z), and if BACKWARD dz [rows, 2 H], its gradient times dh.

    One program: [ROWS, COLUMNS] of h at a time.
    """
    across = tl.cdiv(H, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
        row, column = tile // across * ROWS, tile % across * COLUMNS
        loaded = load_gate(z, row, column, rows, H, z_stride, INTERLEAVED, ROWS, COLUMNS)
        gate, up = gate_and_up(loaded, INTERLEAVED, ROWS, COLUMNS)
        if BACKWARD:
            upstream = widen(load(dh, row, column, rows, H, dh_stride, ROWS, COLUMNS, False))
            value, dgate, dup = gate_backward(upstream, gate, up, ACTIVATION, LIMIT, ALPHA, OFFSET)
            store_gate(dz, dgate, dup, row, column, rows, H, dz_stride, INTERLEAVED, ROWS, COLUMNS)
        else:
            low, factor = limited(gate, up, LIMIT, OFFSET)
            value = activate(ALPHA * low, ACTIVATION) / ALPHA * factor
        store(h, value, row, column, rows, H, h_stride, ROWS, COLUMNS, False)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _grouped_gated_dgrad(
    dy, down, z, dz, h, ends, rows, groups, H, R,
    y_stride, w_group, w_stride, z_stride, dz_stride, h_stride,
    W_T: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr, INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
    GROUPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dh = dy down_e in rows of group e, dz the gradient of z [rows, 2 H], h = gate(z) [rows, H].

    All are 0 in rows of no group. dh is never written. One program computes every num_programs-th tile [M, N], as in
    grouped.py.
    """
    last = row_tiles(ends, groups, GROUPS, M)
    total = tl.max(last, 0)
    steps = max(tl.cdiv(R, K), 1)  # known not to be 0: the compiler then writes the epilogue once
    for tile in tl.range(tl.program_id(0), total * tl.cdiv(H, N), tl.num_programs(0), flatten=True):
        p, q = tile_index(tile, total * M, H, M, N, GROUP)
        group, begin, end, row = find_rows(p // M, last, ends, M)
        dh = tl.zeros((M, N), tl.float32)
        for step in range(steps):
            call_gate_to_l2(z, begin + row, q, end, H, z_stride, step, steps, INTERLEAVED, M, N)
            x = load_rows(dy, begin, end, row, step * K, R, y_stride, False, M, K, DESCRIPTORS)
            y = matrix_of(down, group, step * K, q, R, H, w_group, w_stride, W_T, DESCRIPTORS, K, N)
            dh = dot(x, y, dh, PRECISION)
        loaded = load_gate(z, begin + row, q, end, H, z_stride, INTERLEAVED, M, N // PARTS)
        parts = pieces(dh, M, N, PARTS)
        for i in tl.static_range(PARTS):
            column = q + i * (N // PARTS)
            gate, up = gate_and_up(loaded, INTERLEAVED, M, N // PARTS)
            if i + 1 < PARTS:
                following = column + N // PARTS
                loaded = load_gate(z, begin + row, following, end, H, z_stride, INTERLEAVED, M, N // PARTS)
            value, dgate, dup = gate_backward(parts[i], gate, up, ACTIVATION, LIMIT, ALPHA, OFFSET)
            store(h, value, begin + row, column, end, H, h_stride, M, N // PARTS, False)
            store_gate(dz, dgate, dup, begin + row, column, end, H, dz_stride, INTERLEAVED, M, N // PARTS)
    begin = group_end(ends, groups - 1)
    nothing = tl.zeros((M, N // PARTS), tl.float32)
    count = tl.cdiv(rows - begin, M) * tl.cdiv(H, N // PARTS)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        p, q = tile_index(tile, rows - begin, H, M, N // PARTS, GROUP)
        store(h, nothing, begin + p, q, rows, H, h_stride, M, N // PARTS, False)
        store_gate(dz, nothing, nothing, begin + p, q, rows, H, dz_stride, INTERLEAVED, M, N // PARTS)


def grouped_gated_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    options: GateOptions,
    z: Tensor,
    h: Tensor,
    num_sms: int | None = None,
) -> None:
    """z = x weight[e]^T + bias[e] in rows of group e, h = gate(z); 0 in rows of no group."""
    grouped_linear_fwd(x, weight, bias, ends, z, num_sms)
    _run_gate(z, None, h, None, options, num_sms)


def grouped_gated_dgrad(
    dy: Tensor,
    weight: Tensor,
    ends: Tensor,
    z: Tensor,
    options: GateOptions,
    dz: Tensor,
    h: Tensor,
    num_sms: int | None = None,
) -> None:
    """dh = dy weight[e] in rows of group e, then dz, its gradient with respect to z, and h = gate(z) once more."""
    (rows, r), (groups, _, hidden) = dy.shape, weight.shape
    if h.numel() == 0:
        return
    if groups == 0 or not all(_regular(tensor, hidden) for tensor in (z, dz, h)):
        dh = torch.empty_like(h, memory_format=torch.contiguous_format)
        grouped_linear_dgrad(dy, weight, ends, dh, num_sms)
        _run_gate(z, dh, h, dz, options, num_sms)
        return
    left, right = as_rows(dy), as_stack(weight)
    reads = has_bulk_copies(dy.device) and left.describable and right.describable
    wide = reads and not options.interleaved  # a tile of 256 columns beside an interleaved z spills on sm_90
    tile, programs = plan_groups("dgrad", groups, -(-rows // groups), hidden, r, dy.dtype, dy.device, wide, num_sms)
    factors: list[Any] = [left.tensor, right.tensor]
    strides = [left.stride, *right.strides]
    if reads:
        factors, strides = [ragged_descriptor(left, tile.m, tile.k), right.descriptor(tile.k, tile.n)], [1, 1, 1]
    flags = (right.transposed, reads, precision(dy.dtype), *_gate_constants(options), padded(groups))
    _grouped_gated_dgrad(
        programs,
        (*factors, z, dz, h, ends, rows, groups, hidden, r, *strides, z.stride(0), dz.stride(0), h.stride(0)),
        (*flags, tile.m, tile.n, tile.k, tile.group, _parts(tile.n, dy.dtype, options.interleaved)),
        tile.warps,
        tile.stages,
    )


def _run_gate(
    z: Tensor, dh: Tensor | None, h: Tensor, dz: Tensor | None, options: GateOptions, num_sms: int | None
) -> None:
    rows, hidden = h.shape
    if h.numel() == 0:
        return
    z = rows_dense(z)
    given = [h, dz]
    written = [None if tensor is None else rows_dense(tensor, copy=False) for tensor in given]
    strides = [0 if tensor is None else tensor.stride(0) for tensor in (z, dh, *written)]
    count = triton.cdiv(rows, _ROWS) * triton.cdiv(hidden, _COLUMNS)
    constants = (dh is not None, *_gate_constants(options), _ROWS, _COLUMNS)
    _gate(min(count, num_sms or count), (z, dh, *written, rows, hidden, *strides), constants, warps=4, stages=2)
    for tensor, result in zip(given, written, strict=True):
        if tensor is not None and result is not None and result is not tensor:
            tensor.copy_(result)


_ROWS, _COLUMNS = 16, 128


def _gate_constants(options: GateOptions) -> tuple[Any, ...]:
    limit = 0.0 if options.limit is None else options.limit
    return options.interleaved, options.activation, limit, options.alpha, options.offset


def _regular(tensor: Tensor, hidden: int) -> bool:
    """Whether the epilogue takes it: everything a multiple of 16 elements, which is what Triton can know."""
    stride, inner = tensor.stride()
    return inner == 1 and stride % 16 == hidden % 16 == 0 and tensor.data_ptr() % 16 == 0


def _parts(columns: int, dtype: torch.dtype, interleaved: bool) -> int:
    """In how many the dgrad writes its tile: registers hold five tensors of a piece beside the tile itself, so that a
    piece reads 64 bytes of a row of z at a time."""
    return 8 if columns * dtype.itemsize * (2 if interleaved else 1) >= 512 else 4
