"""Gated MLPs, dense and of experts, as Triton kernels: gate and up of a dense one are one product with the gate in its
epilogue, and the backward of the gate is in the epilogue of the down projection's dgrad. Each tensor that stays in
registers saves passes over [M, H].
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels import tiles
from zbkern.kernels.spec import GateOptions
from zbkern.kernels.triton.activation import Pair, gate_of, gated_fwd, halves
from zbkern.kernels.triton.common import Kernel, activate, dot, widen
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
    find_rows,
    group_end,
    load_rows,
    matrix_of,
    padded,
    ragged_argument,
    row_tiles,
)
from zbkern.kernels.triton.linear import linear_dgrad, linear_fwd
from zbkern.kernels.triton.matmul_tile import (
    Matrix,
    as_operand,
    capability_of,
    has_bulk_copies,
    multiply,
    operand,
    plan,
    precision,
    rounded,
    store,
    tile_index,
)
from zbkern.kernels.triton.replay import replayed


@Kernel
@triton.jit(do_not_specialize=["P"])
def _gated_fwd(
    x, weight_gate, weight_up, gate, up, h, bias_gate, bias_up, P, Q, R,
    x_stride, w_stride, o_stride,
    X_T: tl.constexpr, W_T: tl.constexpr, DESCRIPTORS: tl.constexpr, O_DESCRIPTORS: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """gate = x weight_gate^T, up = x weight_up^T, h = activation(gate) up; x [P, R], weights [Q, R], the others [P, Q].

    One program computes every num_programs-th tile [M, N] of gate and of up, which share their part of x.
    FLATTEN: the loops over tiles and steps become one, see `_flatten`.
    """
    count = tl.cdiv(P, M) * tl.cdiv(Q, N)
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=FLATTEN):
        p, q = tile_index(tile, P, Q, M, N, GROUP)
        first = tl.zeros((M, N), tl.float32)
        second = tl.zeros((M, N), tl.float32)
        for step in range(tl.cdiv(R, K)):
            first, part = multiply(
                first, x, weight_gate, p, q, step * K, P, Q, R, x_stride, w_stride,
                X_T, W_T, DESCRIPTORS, PRECISION, M, N, K,
            )  # fmt: skip
            factor = operand(weight_up, step * K, q, R, Q, w_stride, W_T, DESCRIPTORS, K, N)
            second = dot(part, factor, second, PRECISION)
        if bias_gate is not None:
            j = q + tl.arange(0, N)
            first += widen(tl.load(bias_gate + j, j < Q, 0.0))[None, :]
        if bias_up is not None:
            j = q + tl.arange(0, N)
            second += widen(tl.load(bias_up + j, j < Q, 0.0))[None, :]
        store(gate, first, p, q, P, Q, o_stride, M, N, O_DESCRIPTORS)
        store(up, second, p, q, P, Q, o_stride, M, N, O_DESCRIPTORS)
        first = rounded(first, gate, O_DESCRIPTORS)  # the backward computes h from these again
        second = rounded(second, up, O_DESCRIPTORS)
        store(h, activate(first, ACTIVATION) * second, p, q, P, Q, o_stride, M, N, O_DESCRIPTORS)


@Kernel
@triton.jit(do_not_specialize=["rows"])
def _gated_dgrad(
    dy, down, gate, up, dgate, dup, h, ends, rows, groups, H, R,
    y_stride, w_group, w_stride, i_stride, o_stride, h_stride,
    Y_T: tl.constexpr, W_T: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
    GROUPS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dh = dy down, the gradients of gate and up, and h = gate(gate, up), all [rows, H]; dh is never written.

    With the ends of groups dh = dy down_e in rows of group e, and 0 in rows of none. One program computes every
    num_programs-th tile [M, N], of groups as in grouped.py.
    """
    if ends is None:
        total = tl.cdiv(rows, M)
    else:
        last = row_tiles(ends, groups, GROUPS, M)
        total = tl.max(last, 0)
    steps = max(tl.cdiv(R, K), 1)  # known not to be 0: the compiler then writes the epilogue once
    for tile in tl.range(tl.program_id(0), total * tl.cdiv(H, N), tl.num_programs(0), flatten=True):
        row, q = tile_index(tile, total * M, H, M, N, GROUP)
        begin, end = 0, rows
        if ends is not None:
            group, begin, end, row = find_rows(row // M, last, ends, M)
        dh = tl.zeros((M, N), tl.float32)
        for step in range(steps):
            prefetch_gate_to_l2(gate, up, begin + row, q, end, H, i_stride, step, steps, INTERLEAVED, M, N, K)
            if ends is None:
                x = operand(dy, row, step * K, rows, R, y_stride, Y_T, DESCRIPTORS, M, K)
                y = operand(down, step * K, q, R, H, w_stride, W_T, DESCRIPTORS, K, N)
            else:
                x = load_rows(dy, begin, end, row, step * K, R, y_stride, False, M, K, DESCRIPTORS)
                y = matrix_of(down, group, step * K, q, R, H, w_group, w_stride, W_T, DESCRIPTORS, K, N)
            dh = dot(x, y, dh, PRECISION)
        write_gate_gradients(
            dh, gate, up, dgate, dup, h, begin + row, q, end, H, i_stride, o_stride, h_stride,
            INTERLEAVED, ACTIVATION, LIMIT, ALPHA, OFFSET, M, N, PARTS,
        )  # fmt: skip
    if ends is not None:
        begin = group_end(ends, groups - 1)
        nothing = tl.zeros((M, N // PARTS), tl.float32)
        count = tl.cdiv(rows - begin, M) * tl.cdiv(H, N // PARTS)
        for tile in tl.range(tl.program_id(0), count, tl.num_programs(0)):
            p, q = tile_index(tile, rows - begin, H, M, N // PARTS, GROUP)
            store(h, nothing, begin + p, q, rows, H, h_stride, M, N // PARTS, False)
            store_gate(dgate, dup, nothing, nothing, begin + p, q, rows, H, o_stride, INTERLEAVED, M, N // PARTS)


@replayed
def gated_linear_fwd(
    x: Tensor,
    weight_gate: Tensor,
    weight_up: Tensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    gate: Tensor,
    up: Tensor,
    h: Tensor,
) -> None:
    (p, r), q = x.shape, weight_gate.shape[0]
    if p == 0 or q == 0:
        return
    a, b, c = as_operand(x), as_operand(weight_gate.t()), as_operand(weight_up.t())
    outputs = (gate, up, h)
    if b.layout != c.layout or not _regular(outputs, q):
        linear_fwd(x, weight_gate, bias_gate, gate)
        linear_fwd(x, weight_up, bias_up, up)
        gated_fwd(gate, up, activation, h)
        return
    reads = has_bulk_copies(x.device) and a.describable and b.describable
    tile, programs = plan("fwd", p, 2 * q, r, x.dtype, x.device, reads)
    width = tile.n // 2  # of each half: together they are as wide as the tile of one product
    left, x_stride = a.argument(tile.m, tile.k, reads)
    (first, w_stride), (second, _) = (weight.argument(tile.k, width, reads) for weight in (b, c))
    writes = has_bulk_copies(x.device)
    targets = [Matrix(output).argument(tile.m, width, writes) for output in outputs]
    biases = [None if bias is None else bias.contiguous() for bias in (bias_gate, bias_up)]
    flags = (a.transposed, b.transposed, reads, writes, activation, precision(x.dtype))
    results, strides = (target for target, _ in targets), (x_stride, w_stride, targets[0][1])
    arguments = (left, first, second, *results, *biases, p, q, r, *strides)
    constants = (*flags, tile.m, width, tile.k, tile.group, _flatten(capability_of(x.device)))
    _gated_fwd(programs, arguments, constants, tile.warps, tile.stages)


@replayed
def gated_linear_dgrad(
    dy: Tensor, down: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor, h: Tensor
) -> None:
    _run_dgrad(dy, down, None, (gate, up), GateOptions(activation), (dgate, dup), h)


def grouped_gated_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, options: GateOptions, z: Tensor, h: Tensor
) -> None:
    grouped_linear_fwd(x, weight, bias, ends, z)
    gate_of(halves(z, options), h, options)


def grouped_gated_dgrad(
    dy: Tensor, weight: Tensor, ends: Tensor, z: Tensor, options: GateOptions, dz: Tensor, h: Tensor
) -> None:
    _run_dgrad(dy, weight, ends, halves(z, options), options, halves(dz, options), h)


def _run_dgrad(
    dy: Tensor, weight: Tensor, ends: Tensor | None, inputs: Pair, options: GateOptions, outputs: Pair, h: Tensor
) -> None:
    """inputs: gate and up, outputs: their gradients, as `halves` gives them. Without ends all rows are one group's."""
    (rows, r), hidden = dy.shape, h.shape[1]
    groups = 1 if ends is None else weight.shape[0]
    if h.numel() == 0:
        return
    if groups == 0 or not all(_regular(tensors, hidden) for tensors in (inputs, outputs, (h,))):
        dh = torch.empty_like(h, memory_format=torch.contiguous_format)
        linear_dgrad(dy, weight, dh) if ends is None else grouped_linear_dgrad(dy, weight, ends, dh)
        gate_of(inputs, h, options, dh, outputs)
        return
    left, right = as_operand(dy) if ends is None else as_rows(dy), as_operand(weight)
    reads = has_bulk_copies(dy.device) and left.describable and right.describable
    wide = reads and not options.interleaved  # a tile of 256 columns beside an interleaved z spills on sm_90
    tile, programs = plan("dgrad", -(-rows // groups), hidden, r, dy.dtype, dy.device, wide, groups=groups)
    of_rows = (tile.m, tile.k, reads)
    x, y_stride = left.argument(*of_rows) if ends is None else ragged_argument(left, *of_rows)
    matrices, w_stride = right.argument(tile.k, tile.n, reads)
    strides = (right.group_stride, w_stride, *(tensor.stride(0) for tensor in (inputs[0], outputs[0], h)))
    flags = (left.transposed, right.transposed, reads, precision(dy.dtype), *gate_constants(options), padded(groups))
    arguments = (x, matrices, *inputs, *outputs, h, ends, rows, groups, hidden, r, y_stride, *strides)
    sizes = (tile.m, tile.n, tile.k, tile.group, gate_parts(tile.n, dy.dtype, options.interleaved))
    _gated_dgrad(programs, arguments, (*flags, *sizes), tile.warps, tile.stages)


def _flatten(capability: int) -> bool:
    """Whether the forward's loops become one: with two accumulators ptxas then waits for every wgmma; without it no
    copy for tcgen05 runs ahead (the report looks for both)."""
    return tiles.unit(capability) != "wgmma"


def _regular(tensors: Sequence[Tensor | None], columns: int) -> bool:
    """Whether epilogues take them: one stride for all."""
    matrices = [tensor for tensor in tensors if tensor is not None]
    return all(tensor.stride() == matrices[0].stride() and regular(tensor, columns) for tensor in matrices)
