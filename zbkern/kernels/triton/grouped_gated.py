"""The gated MLP of experts as Triton kernels: the gate of all rows, and its backward in the epilogue of the down
projection's dgrad, where the gradient of h stays in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import GateOptions
from zbkern.kernels.triton.activation import gate_of
from zbkern.kernels.triton.common import Kernel, dot
from zbkern.kernels.triton.gate_tile import (
    gate_constants,
    gate_parts,
    prefetch_gate_to_l2,
    regular,
    store_gate,
    write_gate_gradients,
)
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
    ragged_argument,
    row_tiles,
)
from zbkern.kernels.triton.matmul_tile import has_bulk_copies, precision, store, tile_index


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
            prefetch_gate_to_l2(z, z + H, begin + row, q, end, H, z_stride, step, steps, INTERLEAVED, M, N, K)
            x = load_rows(dy, begin, end, row, step * K, R, y_stride, False, M, K, DESCRIPTORS)
            y = matrix_of(down, group, step * K, q, R, H, w_group, w_stride, W_T, DESCRIPTORS, K, N)
            dh = dot(x, y, dh, PRECISION)
        write_gate_gradients(
            dh, z, z + H, dz, dz + H, h, begin + row, q, end, H, z_stride, dz_stride, h_stride,
            INTERLEAVED, ACTIVATION, LIMIT, ALPHA, OFFSET, M, N, PARTS,
        )  # fmt: skip
    begin = group_end(ends, groups - 1)
    nothing = tl.zeros((M, N // PARTS), tl.float32)
    count = tl.cdiv(rows - begin, M) * tl.cdiv(H, N // PARTS)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        p, q = tile_index(tile, rows - begin, H, M, N // PARTS, GROUP)
        store(h, nothing, begin + p, q, rows, H, h_stride, M, N // PARTS, False)
        store_gate(dz, dz + H, nothing, nothing, begin + p, q, rows, H, dz_stride, INTERLEAVED, M, N // PARTS)


def grouped_gated_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, options: GateOptions, z: Tensor, h: Tensor
) -> None:
    """z = x weight[e]^T + bias[e] in rows of group e, h = gate(z); 0 in rows of no group."""
    grouped_linear_fwd(x, weight, bias, ends, z)
    gate_of(z, None, h, None, options)


def grouped_gated_dgrad(
    dy: Tensor, weight: Tensor, ends: Tensor, z: Tensor, options: GateOptions, dz: Tensor, h: Tensor
) -> None:
    """dh = dy weight[e] in rows of group e, then dz, its gradient with respect to z, and h = gate(z) once more."""
    (rows, r), (groups, _, hidden) = dy.shape, weight.shape
    if h.numel() == 0:
        return
    if groups == 0 or not all(regular(tensor, hidden) for tensor in (z, dz, h)):
        dh = torch.empty_like(h, memory_format=torch.contiguous_format)
        grouped_linear_dgrad(dy, weight, ends, dh)
        gate_of(z, dh, h, dz, options)
        return
    left, right = as_rows(dy), as_stack(weight)
    reads = has_bulk_copies(dy.device) and left.describable and right.describable
    wide = reads and not options.interleaved  # a tile of 256 columns beside an interleaved z spills on sm_90
    tile, programs = plan_groups("dgrad", groups, -(-rows // groups), hidden, r, dy.dtype, dy.device, wide)
    x, x_stride = ragged_argument(left, tile.m, tile.k, reads)
    matrices, w_strides = right.argument(tile.k, tile.n, reads)
    strides = (x_stride, *w_strides, z.stride(0), dz.stride(0), h.stride(0))
    flags = (right.transposed, reads, precision(dy.dtype), *gate_constants(options), padded(groups))
    _grouped_gated_dgrad(
        programs,
        (x, matrices, z, dz, h, ends, rows, groups, hidden, r, *strides),
        (*flags, tile.m, tile.n, tile.k, tile.group, gate_parts(tile.n, dy.dtype, options.interleaved)),
        tile.warps,
        tile.stages,
    )
