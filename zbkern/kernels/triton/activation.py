"""Activations and gated activations as Triton kernels: one pass over memory each, float32 inside."""

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.spec import GateOptions
from zbkern.kernels.triton.common import Kernel, activate, activation_gradient, offset, widen
from zbkern.kernels.triton.gate_tile import gate_backward, gate_constants, gate_forward
from zbkern.kernels.triton.replay import replayed

Pair = tuple[Tensor, Tensor | None]
"""Gate and up, or where they are interleaved both in one matrix, and None."""

_BLOCK = 1024
"""Elements of 4 warps: 8 per thread, which is one 16-byte access for half precision."""


@triton.jit
def _place(columns, blocks, BLOCK: tl.constexpr):
    """(row, first column of its block, which of these exist) of a program. Blocks of one row follow each other."""
    block = tl.program_id(0)
    first = (block % blocks).to(tl.int64) * BLOCK
    return (block // blocks).to(tl.int64), first, first + tl.arange(0, BLOCK) < columns


@triton.jit
def _at(matrix, row, first, row_stride, column_stride, BLOCK: tl.constexpr):
    """Pointers to a block of a row: one address of 64 bits, and offsets of 32 where columns are neighbours."""
    return matrix + (row * row_stride + first * column_stride) + offset(tl.arange(0, BLOCK), column_stride)


@triton.jit
def _read(matrix, row, first, row_stride, column_stride, mask, BLOCK: tl.constexpr):
    return widen(tl.load(_at(matrix, row, first, row_stride, column_stride, BLOCK), mask))


@triton.jit
def _write(matrix, value, row, first, row_stride, column_stride, mask, BLOCK: tl.constexpr):
    tl.store(_at(matrix, row, first, row_stride, column_stride, BLOCK), value.to(matrix.dtype.element_ty), mask)


@Kernel
@triton.jit
def _activation(
    gate, up, dh, h, dgate, dup, columns, blocks,
    gate_row, gate_column, up_row, up_column, dh_row, dh_column, h_row, h_column,
    dgate_row, dgate_column, dup_row, dup_column,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h [M, H] = activation(gate), GATED times up; where there is dh, dgate and dup, and GATED h once more.

    INTERLEAVED: gate and dgate [M, 2 H] have up and dup in their odd columns. LIMIT, ALPHA, OFFSET: spec.GateOptions.
    One program: one block of one row.
    """
    row, first, mask = _place(columns, blocks, BLOCK)
    twice = (2 * first + tl.arange(0, 2 * BLOCK)) < 2 * columns
    if INTERLEAVED:
        both = _read(gate, row, 2 * first, gate_row, gate_column, twice, 2 * BLOCK)
        value, factor = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        value = _read(gate, row, first, gate_row, gate_column, mask, BLOCK)
        factor = _read(up, row, first, up_row, up_column, mask, BLOCK) if GATED else value
    if dh is None:
        value = gate_forward(value, factor, ACTIVATION, LIMIT, ALPHA, OFFSET) if GATED else activate(value, ACTIVATION)
        _write(h, value, row, first, h_row, h_column, mask, BLOCK)
    else:
        upstream = _read(dh, row, first, dh_row, dh_column, mask, BLOCK)
        if GATED:
            again, value, factor = gate_backward(upstream, value, factor, ACTIVATION, LIMIT, ALPHA, OFFSET)
            _write(h, again, row, first, h_row, h_column, mask, BLOCK)
        else:
            value = activation_gradient(upstream, value, ACTIVATION)
        if INTERLEAVED:
            both = tl.reshape(tl.join(value, factor), (2 * BLOCK,))
            _write(dgate, both, row, 2 * first, dgate_row, dgate_column, twice, 2 * BLOCK)
        else:
            _write(dgate, value, row, first, dgate_row, dgate_column, mask, BLOCK)
            if GATED:
                _write(dup, factor, row, first, dup_row, dup_column, mask, BLOCK)


@replayed
def activation_fwd(z: Tensor, activation: str, y: Tensor) -> None:
    _launch((z, None, None, y, None, None), y, False, GateOptions(activation))


@replayed
def activation_bwd(dy: Tensor, z: Tensor, activation: str, dz: Tensor) -> None:
    _launch((z, None, dy, None, dz, None), dz, False, GateOptions(activation))


@replayed
def gated_fwd(gate: Tensor, up: Tensor, activation: str, h: Tensor) -> None:
    _launch((gate, up, None, h, None, None), h, True, GateOptions(activation))


@replayed
def gated_bwd(dh: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor, h: Tensor) -> None:
    _launch((gate, up, dh, h, dgate, dup), h, True, GateOptions(activation))


def gate_of(
    inputs: Pair, h: Tensor, options: GateOptions, dh: Tensor | None = None, outputs: Pair | None = None
) -> None:
    """h [M, H] of gate and up, and where dh is given the outputs, their gradients."""
    _launch((*inputs, dh, h, *(outputs or (None, None))), h, True, options)


def halves(z: Tensor, options: GateOptions) -> Pair:
    """(gate, up) of z [M, 2 H], or (z, None) where they are interleaved."""
    if options.interleaved:
        return z, None
    gate, up = z.chunk(2, 1)
    return gate, up


def _launch(tensors: tuple[Tensor | None, ...], like: Tensor, gated: bool, options: GateOptions) -> None:
    """One elementwise pass over as many elements as `like` has. Contiguous tensors are one long row; others go row by
    row, with their own strides."""
    if like.numel() == 0:
        return
    rows, columns = like.shape
    strides = [(None, None) if tensor is None else tensor.stride() for tensor in tensors]
    if all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        rows, columns = 1, like.numel()
        strides = [(None, None) if tensor is None else (0, 1) for tensor in tensors]
    blocks = triton.cdiv(columns, _BLOCK)
    arguments = (*tensors, columns, blocks, *(stride for pair in strides for stride in pair))
    _activation(rows * blocks, arguments, (gated, *gate_constants(options), _BLOCK), warps=4, stages=1)
