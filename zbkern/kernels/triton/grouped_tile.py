"""What the kernels of experts share: rows and matrices of one group, found on the device.

Tiles of rows begin where a group does: none has rows of two. What a tile would read or write beyond the end of its
group is cut off, with pointers by a mask, with bulk copies by a descriptor that has a border at any row (`ragged`).
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zbkern.kernels.triton.common import offset, rows_dense
from zbkern.kernels.triton.matmul_tile import Matrix, as_operand, load, operand, store

_BILLION = 1 << 30


@triton.jit
def ragged(begin, end, row):
    """Coordinates of row `row` among rows begin to end, of a `ragged_descriptor`: what is not among them is not
    read (zeros come instead) nor written."""
    return [1 << 30, end, (1 << 30) - (end - begin) + row]


@triton.jit
def load_rows(
    source, begin, end, row, column, columns, stride,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] from (row, column) on of the rows begin to end, zeros beyond the last; [COLUMNS, ROWS] of the
    same if TRANSPOSED."""
    if DESCRIPTOR:
        loaded = tl.reshape(source.load(ragged(begin, end, row) + [column]), (ROWS, COLUMNS))  # noqa: RUF005
        return loaded.T if TRANSPOSED else loaded
    elif TRANSPOSED:
        return operand(source, column, begin + row, columns, end, stride, True, False, COLUMNS, ROWS)
    else:
        return load(source, begin + row, column, end, columns, stride, ROWS, COLUMNS, False)


@triton.jit
def store_rows(
    target, value, begin, end, row, column, columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """value [ROWS, COLUMNS] to (row, column) of the rows begin to end, nothing beyond the last."""
    if DESCRIPTOR:
        value = tl.reshape(value.to(target.dtype), (1, 1, ROWS, COLUMNS))
        target.store(ragged(begin, end, row) + [column], value)  # noqa: RUF005
    else:
        store(target, value, begin + row, column, end, columns, stride, ROWS, COLUMNS, False)


@triton.jit
def group_end(ends, group):
    """Where the rows of a group end; of the group before the first: 0."""
    return tl.load(ends + group, group >= 0, 0)


@triton.jit
def matrix_of(
    source, group, row, column, rows, columns, group_stride, stride,
    TRANSPOSED: tl.constexpr, DESCRIPTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] from (row, column) on of a group's matrix, which is stored [columns, rows] if TRANSPOSED."""
    if DESCRIPTOR:
        if TRANSPOSED:
            return tl.reshape(source.load([group, column, row]), (COLUMNS, ROWS)).T
        else:
            return tl.reshape(source.load([group, row, column]), (ROWS, COLUMNS))
    else:
        matrix = source + offset(group, group_stride)
        return operand(matrix, row, column, rows, columns, stride, TRANSPOSED, False, ROWS, COLUMNS)


@triton.jit
def row_counts(ends, groups, GROUPS: tl.constexpr):
    """[GROUPS]: how many rows every group has; 0 beyond the last group."""
    e = tl.arange(0, GROUPS)
    end = tl.load(ends + e, e < groups, 0)
    return end - tl.load(ends + e - 1, (e > 0) & (e < groups), 0)


@triton.jit
def row_tiles(ends, groups, GROUPS: tl.constexpr, M: tl.constexpr):
    """[GROUPS]: for every group, the number of row tiles of it and of those before."""
    return tl.cumsum(tl.cdiv(row_counts(ends, groups, GROUPS), M), 0)


@triton.jit
def find_rows(tile, last, ends, M: tl.constexpr):
    """(group, its first row, its end, the row of it where row tile number `tile` begins)."""
    before = last <= tile
    group = tl.sum(before.to(tl.int32), 0)
    row = (tile - tl.max(tl.where(before, last, 0), 0)) * M
    return group, group_end(ends, group - 1), group_end(ends, group), row


def as_rows(tensor: Tensor) -> Matrix:
    """The matrix, or a copy whose rows are contiguous and regular."""
    return as_operand(rows_dense(tensor))


def ragged_descriptor(matrix: Matrix, rows: int, columns: int) -> TensorDescriptor:
    """For tiles of [rows, columns] of a matrix of which some rows are cut out: see `ragged`.

    An address is (2^34 - s) x 2^30 + s x end + s x (2^30 - count + row) elements from the first, which is row
    end - count + row in the 64 bits that an address has; and the last of the three numbers is within 2^30 only for
    row < count. (The idea is Triton's: triton/tools/ragged_tma.py.)
    """
    stride, (_, width) = matrix.stride, matrix.tensor.shape
    strides = [(1 << 34) - stride, stride, stride, 1]
    return TensorDescriptor(matrix.tensor, [0x7FFF0000, 0x7FFF0000, _BILLION, width], strides, [1, 1, rows, columns])


def ragged_argument(matrix: Matrix, rows: int, columns: int, bulk: bool) -> tuple[Tensor | TensorDescriptor, int]:
    """A kernel's argument for rows that are found on the device, and the argument for their stride."""
    return (ragged_descriptor(matrix, rows, columns), 1) if bulk else (matrix.tensor, matrix.stride)


def padded(groups: int) -> int:
    return 1 << (groups - 1).bit_length()
