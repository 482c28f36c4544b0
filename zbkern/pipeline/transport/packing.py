"""The tensors of a message as one buffer of bytes: one send and one receive, whatever their number and dtypes.

NCCL launches a kernel for every send, which waits for the other side, and knows few dtypes: no int16, no complex.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels read so many at once

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
Shapes = Sequence[tuple[str, tuple[int, ...], bool]]  # of tensors: dtype by its name, shape, requires_grad


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    # the name of a dtype is faster to send than itself
    return tuple((str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad) for tensor in tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes of all of them, uint8 [n]: the memory of a single contiguous one itself; None where there are none."""
    pieces = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if len(pieces) == 1:
        return pieces[0] if pieces[0].numel() else None
    starts, size = _places([piece.numel() for piece in pieces])
    if size == 0:
        return None
    buffer = torch.empty(size, dtype=torch.uint8, device=pieces[0].device)
    for start, piece in zip(starts, pieces, strict=True):
        buffer[start : start + piece.numel()].copy_(piece)
    return buffer


def copy_packed(tensors: Sequence[Tensor], address: int) -> None:
    """The same bytes, of tensors of the CPU, to memory that has room for `packed_bytes`."""
    if len(tensors) == 1:  # as most messages; views of it take longer than the copy
        tensor = tensors[0].detach().contiguous()
        ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
        return
    packed = pack(tensors)
    assert packed is not None
    ctypes.memmove(address, packed.data_ptr(), packed.nbytes)


def packed_bytes(shapes: Shapes) -> int:
    """What `pack` makes of tensors of these shapes."""
    return _places([_nbytes(dtype, shape) for dtype, shape, _ in shapes])[1]


def unpack(buffer: Tensor, shapes: Shapes) -> list[Tensor]:
    """The tensors again, in the buffer's memory, each with a version of its own, as one that was sent alone."""
    starts, _ = _places([_nbytes(dtype, shape) for dtype, shape, _ in shapes])
    storage, first = buffer.untyped_storage(), buffer.storage_offset()
    tensors = []
    for start, (name, shape, requires_grad) in zip(starts, shapes, strict=True):
        dtype = DTYPES[name]
        tensor = torch.empty(0, dtype=dtype, device=buffer.device)
        tensor.set_(storage, (first + start) // dtype.itemsize, shape)  # type: ignore[call-overload]
        tensors.append(tensor.requires_grad_(requires_grad))
    return tensors


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    count = DTYPES[dtype].itemsize
    for size in shape:
        count *= size
    return count


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each begins, and the bytes of all."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end
