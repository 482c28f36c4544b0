"""The gate of an MLP in registers: forward, backward, and the epilogue of a dgrad that never writes dh.

Gate and up are two matrices of one stride or, INTERLEAVED, the even and odd columns of one matrix twice as wide.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import GateOptions
from zbkern.kernels.triton.common import activate, activation_gradient, widen
from zbkern.kernels.triton.matmul_tile import load, pieces, prefetch_to_l2, store


def gate_constants(options: GateOptions) -> tuple[bool, str, float, float, float]:
    """INTERLEAVED, ACTIVATION, LIMIT (0 for none), ALPHA, OFFSET."""
    limit = 0.0 if options.limit is None else options.limit
    return options.interleaved, options.activation, limit, options.alpha, options.offset


def gate_parts(columns: int, dtype: torch.dtype, interleaved: bool) -> int:
    """In how many a dgrad writes its tile: registers hold five tensors of a piece beside the tile itself, so that a
    piece reads 64 bytes of a row at a time. (Half of a 128x256 tile of each spill 272 bytes a thread on sm_90.)"""
    return 8 if columns * dtype.itemsize * (2 if interleaved else 1) >= 512 else 4


def regular(tensor: Tensor, hidden: int) -> bool:
    """Whether epilogues take it: everything a multiple of 16 elements, which is what Triton can know. Element by
    element, five tensors spill whatever the tile."""
    stride, inner = tensor.stride()
    return inner == 1 and stride % 16 == hidden % 16 == 0 and stride >= hidden and tensor.data_ptr() % 16 == 0


@triton.jit
def limited(gate, up, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """The input of the activation, and the factor of its result."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if OFFSET != 0:
        up += OFFSET
    return gate, up


@triton.jit
def gate_forward(
    gate, up,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """h of spec.GateOptions in float32."""
    gate, factor = limited(gate, up, LIMIT, OFFSET)
    return activate(ALPHA * gate, ACTIVATION) / ALPHA * factor


@triton.jit
def gate_backward(
    dh, gate, up,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """(h, dgate, dup) of spec.GateOptions in float32."""
    low, factor = limited(gate, up, LIMIT, OFFSET)
    value = activate(ALPHA * low, ACTIVATION) / ALPHA
    dgate, dup = activation_gradient(dh * factor, ALPHA * low, ACTIVATION), dh * value
    if LIMIT > 0:
        dgate, dup = tl.where(gate > LIMIT, 0.0, dgate), tl.where(tl.abs(up) > LIMIT, 0.0, dup)
    return value * factor, dgate, dup


@triton.jit
def _load_gate(
    gate, up, row, column, rows, H, stride,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(gate, up), each [ROWS, COLUMNS] from (row, column) on, zeros beyond the end; `_gate_and_up` makes them of it."""
    if INTERLEAVED:
        return (load(gate, row, 2 * column, rows, 2 * H, stride, ROWS, 2 * COLUMNS, False),)
    else:
        first = load(gate, row, column, rows, H, stride, ROWS, COLUMNS, False)
        return first, load(up, row, column, rows, H, stride, ROWS, COLUMNS, False)


@triton.jit
def _gate_and_up(loaded, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What _load_gate loaded, in float32."""
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(loaded[0], (ROWS, COLUMNS, 2)))
        return widen(gate), widen(up)
    else:
        return widen(loaded[0]), widen(loaded[1])


@triton.jit
def prefetch_gate_to_l2(
    gate, up, row, column, rows, H, stride, step, steps,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """At one of the steps of a main loop: what `write_gate_gradients` will load."""
    if INTERLEAVED:
        prefetch_to_l2(gate, row, 2 * column, rows, 2 * H, stride, step, steps, ROWS, 2 * COLUMNS, K)
    else:
        prefetch_to_l2(gate, row, column, rows, H, stride, step, steps, ROWS, COLUMNS, K)
        prefetch_to_l2(up, row, column, rows, H, stride, step, steps, ROWS, COLUMNS, K)


@triton.jit
def store_gate(
    gate, up, first, second, row, column, rows, H, stride,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The opposite of _load_gate, of values `first` and `second`."""
    if INTERLEAVED:
        both = tl.reshape(tl.join(first, second), (ROWS, 2 * COLUMNS))
        store(gate, both, row, 2 * column, rows, 2 * H, stride, ROWS, 2 * COLUMNS, False)
    else:
        store(up, second, row, column, rows, H, stride, ROWS, COLUMNS, False)
        store(gate, first, row, column, rows, H, stride, ROWS, COLUMNS, False)


@triton.jit
def write_gate_gradients(
    dh, gate, up, dgate, dup, h, row, column, rows, H, stride, d_stride, h_stride,
    INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    OFFSET: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The epilogue of dh [M, N] at (row, column): both gradients, and h once more, in PARTS pieces.

    By plain loads, a piece ahead of its use, and plain stores: beside the operands, shared memory has no room for what
    is read, and bulk copies of what is written would take turns in one buffer of it and wait for each other.
    """
    WIDTH: tl.constexpr = N // PARTS
    loaded = _load_gate(gate, up, row, column, rows, H, stride, INTERLEAVED, M, WIDTH)
    parts = pieces(dh, M, N, PARTS)
    for i in tl.static_range(PARTS):
        at = column + i * WIDTH
        first, second = _gate_and_up(loaded, INTERLEAVED, M, WIDTH)
        if i + 1 < PARTS:
            loaded = _load_gate(gate, up, row, at + WIDTH, rows, H, stride, INTERLEAVED, M, WIDTH)
        value, first, second = gate_backward(parts[i], first, second, ACTIVATION, LIMIT, ALPHA, OFFSET)
        store(h, value, row, at, rows, H, h_stride, M, WIDTH, False)
        store_gate(dgate, dup, first, second, row, at, rows, H, d_stride, INTERLEAVED, M, WIDTH)
