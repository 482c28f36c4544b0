"""Activations and gated activations as Triton kernels: one pass over memory each, float32 inside."""

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.triton.common import Kernel, activate, activation_gradient, offset, widen

_BLOCK = 1024
"""Elements of 4 warps: 8 per thread, which is one 16-byte access for half precision."""


@triton.jit
def _turns(count):
    """(start, stop, step) of a program's blocks: one, or every num_programs-th of `count`.

    Over one block no loop is left in the code: with it gated_bwd has 39 registers instead of 32 on sm_80.
    """
    if count is None:
        return tl.program_id(0), tl.program_id(0) + 1, 1
    else:
        return tl.program_id(0), count, tl.num_programs(0)


@triton.jit
def _place(block, columns, blocks, BLOCK: tl.constexpr):
    """(row, first column of a block, which of its columns exist). Blocks of one row follow each other."""
    first = (block % blocks).to(tl.int64) * BLOCK
    return (block // blocks).to(tl.int64), first, first + tl.arange(0, BLOCK) < columns


@triton.jit
def _at(matrix, row, first, row_stride, column_stride, BLOCK: tl.constexpr):
    """Pointers to a block of a row: one address of 64 bits, and offsets of 32 where columns are neighbours."""
    return matrix + (row * row_stride + first * column_stride) + offset(tl.arange(0, BLOCK), column_stride)


@Kernel
@triton.jit(do_not_specialize=["count"])
def _activation_fwd(z, y, count, columns, blocks, zr, zc, yr, yc, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """y = activation(z), both [M, N]. One program: one block of one row, or every num_programs-th block."""
    start, stop, step = _turns(count)
    for block in tl.range(start, stop, step):
        row, first, mask = _place(block, columns, blocks, BLOCK)
        value = activate(widen(tl.load(_at(z, row, first, zr, zc, BLOCK), mask)), ACTIVATION)
        tl.store(_at(y, row, first, yr, yc, BLOCK), value.to(y.dtype.element_ty), mask)


@Kernel
@triton.jit(do_not_specialize=["count"])
def _activation_bwd(
    dy, z, dz, count, columns, blocks, dyr, dyc, zr, zc, dzr, dzc, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """dz = dy activation'(z), all [M, N]. One program: one block of one row, or every num_programs-th block."""
    start, stop, step = _turns(count)
    for block in tl.range(start, stop, step):
        row, first, mask = _place(block, columns, blocks, BLOCK)
        gradient = widen(tl.load(_at(dy, row, first, dyr, dyc, BLOCK), mask))
        value = widen(tl.load(_at(z, row, first, zr, zc, BLOCK), mask))
        result = activation_gradient(gradient, value, ACTIVATION)
        tl.store(_at(dz, row, first, dzr, dzc, BLOCK), result.to(dz.dtype.element_ty), mask)


@Kernel
@triton.jit(do_not_specialize=["count"])
def _gated_fwd(
    gate, up, h, count, columns, blocks, gr, gc, ur, uc, hr, hc, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """h = activation(gate) * up, all [M, H]. One program: one block of one row, or every num_programs-th block."""
    start, stop, step = _turns(count)
    for block in tl.range(start, stop, step):
        row, first, mask = _place(block, columns, blocks, BLOCK)
        value = activate(widen(tl.load(_at(gate, row, first, gr, gc, BLOCK), mask)), ACTIVATION)
        value *= widen(tl.load(_at(up, row, first, ur, uc, BLOCK), mask))
        tl.store(_at(h, row, first, hr, hc, BLOCK), value.to(h.dtype.element_ty), mask)


@Kernel
@triton.jit(do_not_specialize=["count"])
def _gated_bwd(
    dh, gate, up, dgate, dup, h,
    count, columns, blocks, dhr, dhc, gr, gc, ur, uc, dgr, dgc, dur, duc, hr, hc,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate = dh up activation'(gate), dup = dh activation(gate), h = activation(gate) up, all [M, H].

    One program: one block of one row, or every num_programs-th block.
    """
    start, stop, step = _turns(count)
    for block in tl.range(start, stop, step):
        row, first, mask = _place(block, columns, blocks, BLOCK)
        dh_value = widen(tl.load(_at(dh, row, first, dhr, dhc, BLOCK), mask))
        gate_value = widen(tl.load(_at(gate, row, first, gr, gc, BLOCK), mask))
        up_value = widen(tl.load(_at(up, row, first, ur, uc, BLOCK), mask))
        activated = activate(gate_value, ACTIVATION)
        dgate_value = activation_gradient(dh_value * up_value, gate_value, ACTIVATION)
        tl.store(_at(dgate, row, first, dgr, dgc, BLOCK), dgate_value.to(dgate.dtype.element_ty), mask)
        tl.store(_at(dup, row, first, dur, duc, BLOCK), (dh_value * activated).to(dup.dtype.element_ty), mask)
        tl.store(_at(h, row, first, hr, hc, BLOCK), (activated * up_value).to(h.dtype.element_ty), mask)


def activation_fwd(z: Tensor, activation: str, y: Tensor, num_sms: int | None = None) -> None:
    """y = activation(z)."""
    _launch(_activation_fwd, (z, y), activation, num_sms)


def activation_bwd(dy: Tensor, z: Tensor, activation: str, dz: Tensor, num_sms: int | None = None) -> None:
    """dz = dy activation'(z)."""
    _launch(_activation_bwd, (dy, z, dz), activation, num_sms)


def gated_fwd(gate: Tensor, up: Tensor, activation: str, h: Tensor, num_sms: int | None = None) -> None:
    """h = activation(gate) * up."""
    _launch(_gated_fwd, (gate, up, h), activation, num_sms)


def gated_bwd(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    dgate: Tensor,
    dup: Tensor,
    h: Tensor,
    num_sms: int | None = None,
) -> None:
    """dgate = dh up activation'(gate), dup = dh activation(gate), and h = activation(gate) * up once more."""
    _launch(_gated_bwd, (dh, gate, up, dgate, dup, h), activation, num_sms)


def _launch(kernel: Kernel, tensors: tuple[Tensor, ...], activation: str, num_sms: int | None) -> None:
    """One elementwise pass. Contiguous tensors are one long row; others go row by row, with their own strides."""
    size = tensors[0].numel()
    if size == 0:
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        rows, columns = 1, size
        strides = (0, 1) * len(tensors)
    else:
        rows, columns = tensors[0].shape
        strides = tuple(stride for tensor in tensors for stride in tensor.stride())
    # With a bound one program is alone on its SM, and has as many accesses under way as four do.
    block, warps = (_BLOCK, 4) if num_sms is None else (4 * _BLOCK, 16)
    blocks = triton.cdiv(columns, block)
    count = rows * blocks
    turns = None if num_sms is None else count
    kernel(min(count, num_sms or count), (*tensors, turns, columns, blocks, *strides), (activation, block), warps, 1)
