"""One tile of a matmul, in parts that the kernels of linear layers share.

out [P, Q] = sum over r of A[p, r] B[r, q]. A program takes tiles [M, N] of the output in turn. Operands are matrices of
rows and columns in memory, either way round: A is stored [P, R], or [R, P] if A_T; B is stored [R, Q], or [Q, R] if
B_T. A matrix comes as a tensor descriptor, or as a pointer with the stride of its rows, whose elements are neighbours.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zbkern.kernels import tiles
from zbkern.kernels.triton.common import dot, offset


@triton.jit
def tile_index(tile, P, Q, M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr):
    """Where tile number `tile` begins: down bands of GROUP tile rows, so that its neighbours find operands in L2."""
    rows = tl.cdiv(P, M)
    band = GROUP * tl.cdiv(Q, N)
    first = tile // band * GROUP
    height = min(rows - first, GROUP)
    inside = tile % band
    return (first + inside % height) * M, inside // height * N


@triton.jit
def load(
    source, row, column, rows, columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] from (row, column) on, zeros beyond the end."""
    if DESCRIPTOR:
        return source.load([row, column])
    else:
        i = (row + tl.arange(0, ROWS))[:, None]
        j = (column + tl.arange(0, COLUMNS))[None, :]
        return tl.load(source + (offset(i, stride) + j), (i < rows) & (j < columns), 0.0)


_AHEAD = tl.constexpr(1024)
"""Of what a tile sums over, how much is left when its epilogue's inputs are prefetched into L2: 9 us of 128 x 256 on an
H100, in which memory delivers the inputs of all SMs and nothing else drives them out again."""


@triton.jit
def prefetch_to_l2(
    source, row, column, rows, columns, stride, step, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """At one of the steps of K of a main loop: prefetches [ROWS, COLUMNS] from (row, column) on, which the epilogue
    loads.

    The SMs reach their epilogues together, and all would wait for memory there.
    """
    if step == max(steps - _AHEAD // K, 0):
        LINE: tl.constexpr = 1024 // source.dtype.element_ty.primitive_bitwidth  # 128 bytes
        i = tl.minimum(row + tl.arange(0, ROWS), rows - 1)[:, None]
        j = tl.minimum(column + tl.arange(0, COLUMNS // LINE) * LINE, columns - 1)[None, :]
        place = source + (offset(i, stride) + j)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], tl.int32, False, 1)


@triton.jit
def pause(nanoseconds):
    """Lets so much time go by, about."""
    tl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [nanoseconds], tl.int32, False, 1)


@triton.jit
def store(
    target, value, row, column, rows, columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """value [ROWS, COLUMNS] to (row, column), nothing beyond the end, rounded to the target's dtype."""
    if DESCRIPTOR:
        target.store([row, column], value.to(target.dtype))
    else:
        i = (row + tl.arange(0, ROWS))[:, None]
        j = (column + tl.arange(0, COLUMNS))[None, :]
        tl.store(target + (offset(i, stride) + j), value.to(target.dtype.element_ty), (i < rows) & (j < columns))


@triton.jit
def rounded(value, target, DESCRIPTOR: tl.constexpr):
    """value as it will be read from the target again, in float32."""
    return value.to(target.dtype if DESCRIPTOR else target.dtype.element_ty).to(tl.float32)


@triton.jit
def operand(
    source, row, column, rows, columns, stride,
    TRANSPOSED: tl.constexpr, DESCRIPTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] from (row, column) on of a matrix, which is stored [columns, rows] if TRANSPOSED.

    Pointers are laid out as the matmul wants them: sm_80 cannot copy ahead what is transposed after it was loaded.
    """
    if not TRANSPOSED:
        return load(source, row, column, rows, columns, stride, ROWS, COLUMNS, DESCRIPTOR)
    elif DESCRIPTOR:
        return load(source, column, row, columns, rows, stride, COLUMNS, ROWS, DESCRIPTOR).T
    else:
        i = (row + tl.arange(0, ROWS))[:, None]
        j = (column + tl.arange(0, COLUMNS))[None, :]
        return tl.load(source + (i + offset(j, stride)), (i < rows) & (j < columns), 0.0)


@triton.jit
def multiply(
    accumulator, a, b, p, q, r, P, Q, R, a_stride, b_stride,
    A_T: tl.constexpr, B_T: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """(accumulator + A[p:p+M, r:r+K] B[r:r+K, q:q+N], the part of A)."""
    x = operand(a, p, r, P, R, a_stride, A_T, DESCRIPTORS, M, K)
    y = operand(b, r, q, R, Q, b_stride, B_T, DESCRIPTORS, K, N)
    return dot(x, y, accumulator, PRECISION), x


@triton.jit
def pieces(value, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr):
    """value [M, N] as 1, 2, 4 or 8 pieces from left to right: an epilogue has registers for one at a time."""
    if PARTS == 1:
        return (value,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(value, (M, 2, N // 2)), (0, 2, 1)))
        return pieces(left, M, N // 2, PARTS // 2) + pieces(right, M, N // 2, PARTS // 2)


class Matrix:
    """A matrix, or one for every group, as it lies in memory: whether transposed, the stride of its rows (or columns),
    that of groups, how tiles are copied."""

    __slots__ = ("describable", "group_stride", "stride", "tensor", "transposed")

    def __init__(self, tensor: Tensor) -> None:
        *groups, stride, inner = tensor.stride()
        if tensor.shape[-1] == 1:
            inner = 1  # whatever torch says
        self.tensor = tensor
        self.group_stride = groups[0] if groups else 0
        self.transposed = stride == 1 and inner != 1
        columns = tensor.shape[-2 if self.transposed else -1]
        if self.transposed:
            stride, inner = inner, stride
        self.stride = stride
        # what the GPU's own copies (TMA) ask for: contiguous rows, everything a multiple of 16 bytes
        self.describable = (
            inner == 1
            and stride >= columns
            and (stride | self.group_stride) * tensor.element_size() % 16 == 0
            and tensor.data_ptr() % 16 == 0
            and tensor.numel() > 0
        )

    @property
    def layout(self) -> tuple[bool, int, bool]:
        """Equal for matrices that one launch may take as its segments."""
        return self.transposed, self.stride, self.describable

    def descriptor(self, rows: int, columns: int) -> TensorDescriptor:
        """For tiles of [rows, columns] of a matrix, which are [columns, rows] in memory if it is transposed."""
        *groups, m, n = self.tensor.shape
        shape, block = ([n, m], [columns, rows]) if self.transposed else ([m, n], [rows, columns])
        if groups:
            return described(self.tensor, [*groups, *shape], [self.group_stride, self.stride, 1], [1, *block])
        return described(self.tensor, shape, [self.stride, 1], block)

    def argument(self, rows: int, columns: int, bulk: bool) -> tuple[Tensor | TensorDescriptor, int]:
        """A kernel's argument for it, and the argument for its stride: descriptors carry their own."""
        return (self.descriptor(rows, columns), 1) if bulk else (self.tensor, self.stride)


def described(base: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """TensorDescriptor(...) without its checks, of what is `describable`: they are two thirds of its cost, and a W has
    three of them. One kept for the next launch would keep its tensor's memory."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape = base, shape, strides, block
    return descriptor


def as_operand(tensor: Tensor) -> Matrix:
    """A matrix that is multiplied, or one for every group: itself where GPUs copy 16 bytes of it at a time, else as a
    copy of which they do.

    One element at a time nothing is copied ahead of the matmul, and registers spill: the copy costs less.
    """
    matrix = Matrix(tensor)
    regular = (matrix.stride | matrix.group_stride) % 16 == 0  # all that Triton knows of a stride
    if tensor.numel() == 0 or (matrix.describable and (regular or has_bulk_copies(tensor.device))):
        return matrix
    rows = tensor.mT if matrix.transposed else tensor
    columns = rows.shape[-1]
    copied = tensor.new_empty(*rows.shape[:-1], triton.cdiv(columns, 16) * 16)[..., :columns].copy_(rows)
    return Matrix(copied.mT if matrix.transposed else copied)


def has_bulk_copies(device: torch.device) -> bool:
    """Tensor copies by the GPU itself (TMA): compute capability 9.0 and later."""
    return capability_of(device) >= 90


def capability_of(device: torch.device) -> int:
    """90 for 9.0."""
    return _machine(device)[0]


def processors(device: torch.device) -> int:
    """How many SMs the GPU has."""
    return _machine(device)[1]


@functools.cache
def _machine(device: torch.device) -> tuple[int, int]:
    """(compute capability: 90 for 9.0, SMs)."""
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def late_start(tile: tiles.Tile, rows: int, device: torch.device) -> tuple[int | None, int]:
    """(nanoseconds, programs): by how much so many programs begin later than those before; None for none.

    Programs that share an SM begin half a tile apart, in the time that one takes alone at 838 TFLOP/s (an H200, merged
    W). How late they are changes no result.
    """
    return (tile.m * tile.n * rows // 6350, processors(device)) if tile.share > 1 else (None, 1)


@functools.lru_cache(maxsize=4096)
def plan(
    op: str,
    p: int,
    q: int,
    r: int,
    dtype: torch.dtype,
    device: torch.device,
    describable: bool,
    others: tuple[tuple[int, int], ...] = (),
    groups: int = 1,
) -> tuple[tiles.Tile, int]:
    """(tile, programs to start) for as many [p, q] as there are groups, and `others`, in one launch. describable:
    operands and outputs all are."""
    capability, sms = _machine(device)
    others += ((p, q),) * (groups - 1)
    tile = tiles.choose(op, p, q, r, str(dtype).removeprefix("torch."), capability, sms, describable, others)
    return tile, min(sms * tile.share, tiles.count(tile, (p, q), *others))


def share_a_launch(
    op: str, shapes: Sequence[Sequence[int]], r: int, dtype: torch.dtype, device: torch.device, describable: bool
) -> bool:
    """Whether matmuls of these shapes, over as many rows each, are as fast in one launch as in one each."""
    return tiles.share_a_launch(op, shapes, r, str(dtype).removeprefix("torch."), *_machine(device), describable)


def precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: where torch may use tf32 as one matmul of tf32, else as three of its parts.

    torch.set_float32_matmul_precision and allow_tf32 both set what is asked here; torch's own question after the former
    raises an error where a program has set fp32_precision.
    """
    if dtype != torch.float32:
        return "ieee"
    allowed = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # from torch 2.9 on
    if allowed is None:
        return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "tf32" if allowed == "tf32" else "tf32x3"
