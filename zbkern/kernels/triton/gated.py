"""Gated MLPs as Triton kernels: both halves in one product with the gate in its epilogue, and the backward of the gate
in the epilogue of the down projection's dgrad. Each tensor that stays in registers saves passes over [M, H].
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels import tiles
from zbkern.kernels.triton.activation import gated_bwd, gated_fwd
from zbkern.kernels.triton.common import Kernel, activate, activation_gradient, dot, widen
from zbkern.kernels.triton.linear import linear_dgrad, linear_fwd
from zbkern.kernels.triton.matmul_tile import (
    Matrix,
    as_operand,
    call_to_l2,
    capability_of,
    has_bulk_copies,
    load,
    multiply,
    operand,
    pieces,
    plan,
    precision,
    rounded,
    store,
    tile_index,
)
from zbkern.kernels.triton.replay import replay


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


@triton.jit
def _gate_backward(
    dh, before, factor, p, q, dgate, dup, h, P, Q, stride,
    ACTIVATION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The epilogue of a piece of dh: both gradients, and h once more.

    By plain stores: bulk copies would take turns in one buffer of shared memory, and wait for each other.
    """
    before, factor = widen(before), widen(factor)
    activated = activate(before, ACTIVATION)
    store(h, activated * factor, p, q, P, Q, stride, M, N, False)
    store(dup, dh * activated, p, q, P, Q, stride, M, N, False)
    store(dgate, activation_gradient(dh * factor, before, ACTIVATION), p, q, P, Q, stride, M, N, False)


@Kernel
@triton.jit(do_not_specialize=["P"])
def _gated_dgrad(
    dy, down, gate, up, dgate, dup, h, P, Q, R,
    y_stride, w_stride, i_stride, o_stride,
    Y_T: tl.constexpr, W_T: tl.constexpr, DESCRIPTORS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dh = dy down, dgate = dh up activation'(gate), dup = dh activation(gate), h = activation(gate) up.

    dy [P, R], down [R, Q], the others [P, Q]; dh is never written. One program computes every num_programs-th tile.
    gate and up come by plain loads, a piece ahead of its use: beside the operands, shared memory has no room for them.
    """
    count = tl.cdiv(P, M) * tl.cdiv(Q, N)
    steps = max(tl.cdiv(R, K), 1)  # known not to be 0: the compiler then writes the epilogue once
    for tile in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        p, q = tile_index(tile, P, Q, M, N, GROUP)
        dh = tl.zeros((M, N), tl.float32)
        for step in range(steps):
            call_to_l2(gate, p, q, P, Q, i_stride, step, steps, M, N)
            call_to_l2(up, p, q, P, Q, i_stride, step, steps, M, N)
            dh, _ = multiply(
                dh, dy, down, p, q, step * K, P, Q, R, y_stride, w_stride,
                Y_T, W_T, DESCRIPTORS, PRECISION, M, N, K,
            )  # fmt: skip
        WIDTH: tl.constexpr = N // PARTS
        before = load(gate, p, q, P, Q, i_stride, M, WIDTH, False)
        factor = load(up, p, q, P, Q, i_stride, M, WIDTH, False)
        parts = pieces(dh, M, N, PARTS)
        for i in tl.static_range(PARTS):
            gate_now, up_now = before, factor
            if i + 1 < PARTS:
                before = load(gate, p, q + (i + 1) * WIDTH, P, Q, i_stride, M, WIDTH, False)
                factor = load(up, p, q + (i + 1) * WIDTH, P, Q, i_stride, M, WIDTH, False)
            _gate_backward(
                parts[i], gate_now, up_now, p, q + i * WIDTH, dgate, dup, h, P, Q, o_stride, ACTIVATION, M, WIDTH
            )


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
    num_sms: int | None = None,
) -> None:
    """gate = x weight_gate^T + bias_gate, up = x weight_up^T + bias_up, h = activation(gate) * up."""
    operands = (x, weight_gate, weight_up, bias_gate, bias_up, gate, up, h)
    options = ("gated_linear_fwd", activation, num_sms, precision(x.dtype))
    replay.run(lambda: _forward(*operands[:5], activation, gate, up, h, num_sms), operands, options)


def _forward(
    x: Tensor,
    weight_gate: Tensor,
    weight_up: Tensor,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    gate: Tensor,
    up: Tensor,
    h: Tensor,
    num_sms: int | None,
) -> None:
    (p, r), q = x.shape, weight_gate.shape[0]
    if p == 0 or q == 0:
        return
    a, b, c = as_operand(x), as_operand(weight_gate.t()), as_operand(weight_up.t())
    outputs = (gate, up, h)
    if b.layout != c.layout or not _regular(outputs):
        linear_fwd(x, weight_gate, bias_gate, gate, num_sms=num_sms)
        linear_fwd(x, weight_up, bias_up, up, num_sms=num_sms)
        gated_fwd(gate, up, activation, h, num_sms=num_sms)
        return
    reads = has_bulk_copies(x.device) and a.describable and b.describable
    tile, programs = plan("fwd", p, 2 * q, r, x.dtype, x.device, reads, num_sms)
    width = tile.n // 2  # of each half: together they are as wide as the tile of one product
    operands, strides = [a.tensor, b.tensor, c.tensor], (a.stride, b.stride)
    if reads:
        operands = [a.descriptor(tile.m, tile.k), b.descriptor(tile.k, width), c.descriptor(tile.k, width)]
        strides = (1, 1)
    results, writes, output_stride = _outputs(outputs, tile.m, width)
    biases = [None if bias is None else bias.contiguous() for bias in (bias_gate, bias_up)]
    flags = (a.transposed, b.transposed, reads, writes, activation, precision(x.dtype))
    _gated_fwd(
        programs,
        (*operands, *results, *biases, p, q, r, *strides, output_stride),
        (*flags, tile.m, width, tile.k, tile.group, _flatten(capability_of(x.device))),
        tile.warps,
        tile.stages,
    )


def gated_linear_dgrad(
    dy: Tensor,
    down: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor,
    num_sms: int | None = None,
) -> None:
    """dh = dy down, then dgate = dh up activation'(gate), dup = dh activation(gate), and h = activation(gate) * up."""
    operands = (dy, down, gate, up, dgate, dup, h)
    options = ("gated_linear_dgrad", activation, num_sms, precision(dy.dtype))
    replay.run(lambda: _backward(*operands[:4], activation, dgate, dup, h, num_sms), operands, options)


def _backward(
    dy: Tensor,
    down: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor,
    num_sms: int | None,
) -> None:
    (p, r), q = dy.shape, down.shape[1]
    if p == 0 or q == 0:
        return
    a, b = as_operand(dy), as_operand(down)
    inputs, outputs = (gate, up), (dgate, dup, h)
    if not _regular(inputs) or not _regular(outputs):
        dh = torch.empty_like(gate)
        linear_dgrad(dy, down, dh, num_sms=num_sms)
        gated_bwd(dh, gate, up, activation, dgate, dup, h, num_sms=num_sms)
        return
    reads = has_bulk_copies(dy.device) and a.describable and b.describable
    tile, programs = plan("dgrad", p, q, r, dy.dtype, dy.device, reads, num_sms)
    operands, strides = [a.tensor, b.tensor], (a.stride, b.stride)
    if reads:
        operands, strides = [a.descriptor(tile.m, tile.k), b.descriptor(tile.k, tile.n)], (1, 1)
    flags = (a.transposed, b.transposed, reads, activation, precision(dy.dtype))
    _gated_dgrad(
        programs,
        (*operands, gate, up, *outputs, p, q, r, *strides, gate.stride(0), h.stride(0)),
        (*flags, tile.m, tile.n, tile.k, tile.group, _parts(tile)),
        tile.warps,
        tile.stages,
    )


def _flatten(capability: int) -> bool:
    """Whether the forward's loops become one: with two accumulators ptxas then waits for every wgmma; without it no
    copy for tcgen05 runs ahead (the report looks for both)."""
    return tiles.unit(capability) != "wgmma"


def _parts(tile: tiles.Tile) -> int:
    """In how many the dgrad writes its tile: five tensors of half a 128x256 tile spill 272 bytes a thread on sm_90."""
    return 8 if tile.n >= 256 else 2 * tile.parts()


def _regular(tensors: Sequence[Tensor]) -> bool:
    """Whether epilogues take them: rows at one stride and everything a multiple of 16 elements, which is what Triton
    can know. Element by element, five tensors spill whatever the tile."""
    stride, columns = tensors[0].stride(0), tensors[0].shape[1]
    return stride % 16 == columns % 16 == 0 and all(
        tensor.stride() == (stride, 1) and stride >= columns and tensor.data_ptr() % 16 == 0 for tensor in tensors
    )


def _outputs(tensors: Sequence[Tensor], rows: int, columns: int) -> tuple[list[Any], bool, int]:
    """(what the kernel is given, whether these are descriptors, the stride of its rows)."""
    if has_bulk_copies(tensors[0].device):
        return [Matrix(tensor).descriptor(rows, columns) for tensor in tensors], True, 1
    return list(tensors), False, tensors[0].stride(0)
