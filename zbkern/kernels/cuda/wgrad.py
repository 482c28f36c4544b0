"""Thin calls into the compiled extension zbkern._cuda: addresses are taken from tensors here, and checked once.

linear_wgrad is the kernel of spec.py; all tokens of a weight are one matmul, whose sum runs over the segments in the
order of the list, in fp32, and whose result is read and written once. Nothing here waits for the GPU. A launch
allocates only where it has to copy an operand whose rows are not contiguous or not at multiples of 16 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zbkern.kernels.spec import Outputs, Segments

try:
    from zbkern import _cuda

    _problem = None
except ImportError as error:
    _cuda, _problem = None, error

# how the extension names dtypes
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)


def why_not(device: torch.device | str | None = None) -> str | None:
    """Why nothing of this module can run on a device, and what would change it; None when it can."""
    visible = torch.cuda.is_available()
    if visible and (capability := torch.cuda.get_device_capability(device)) != CAPABILITY:
        return "the CUDA kernels are written for compute capability {}.{} and this GPU has {}.{}".format(
            *CAPABILITY, *capability
        )
    if _cuda is None:
        return f"the CUDA kernels are not built, or not for this Python: ZBKERN_BUILD=cuda pip install . ({_problem})"
    if not visible:
        return "torch sees no CUDA device"
    return unfit(torch.version.cuda, _cuda.CUDA_VERSION)


def unfit(torch_cuda: str | None, built_with: int) -> str | None:
    """Why a build does not fit. torch_cuda: "12.8"; built_with: 13000."""
    built = f"{built_with // 1000}.{built_with % 1000 // 10}"
    if torch_cuda is None or int(torch_cuda.split(".")[0]) != built_with // 1000:
        return (
            f"the CUDA kernels were built with CUDA {built} and this torch has CUDA {torch_cuda}; "
            "build zbkern with a toolkit of torch's major version, or install a torch for this one"
        )
    return None


def linear_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    """x, dy: both bf16 or both fp16, N and K multiples of 8. Outputs: float32 or of x's dtype. Raises ValueError."""
    linear_wgrads(((segments, outputs),), accumulate)


def linear_wgrads(layers: Sequence[tuple[Segments, Outputs]], accumulate: bool, *, max_tiles: int = 0) -> None:
    """Each dweight and dbias in memory of its own, in as few launches as possible.

    max_tiles: a block ends after so many tiles of dweight, so that others get its multiprocessor, 0 for no bound. One
    launch takes neighbours of the same dtypes, up to MAX_PRODUCTS weights with together MAX_SEGMENTS segments: no
    multiprocessor idles between two of them.
    """
    batch: list[tuple] = []  # of one launch, as the extension takes it
    kind_of_batch: tuple = ()  # what they have in common
    used = 0  # segments that they have
    copies: list[Tensor] = []  # kept alive until the launch: their memory would be reused
    for segments, (dweight, dbias) in layers:
        (n, k), (step, unit) = ((0, 0), (0, 1)) if dweight is None else (dweight.shape, dweight.stride())
        if dweight is None or unit != 1 or not (n and k) or (dbias is not None and not dbias.is_contiguous()):
            _add_bias(segments, dbias, accumulate)
            dbias = None
            if dweight is None or not (n and k):
                continue
            if unit != 1:  # a transposed view: the same matmul with its operands exchanged
                segments, dweight = [(dy, x) for x, dy in segments], dweight.t()
                n, k, step, unit = k, n, unit, step
            if unit != 1:
                raise ValueError(f"linear_wgrad: dweight must have contiguous rows; got strides {dweight.t().stride()}")
        device, dtype = dweight.get_device(), segments[0][0].dtype if segments else None
        parts = _addresses(segments, n, k, device, dtype, copies)
        if not parts:
            _add_bias((), dbias, accumulate)
            if not accumulate:
                dweight.zero_()
            continue
        kinds = _kinds(dtype, dweight.dtype, None if dbias is None else dbias.dtype)
        target = dweight.data_ptr(), 0 if dbias is None else dbias.data_ptr(), n, k, step
        for first in range(0, len(parts), _cuda.MAX_SEGMENTS):
            segments_of_one, kind = parts[first : first + _cuda.MAX_SEGMENTS], (kinds, device, accumulate or first > 0)
            fits = used + len(segments_of_one) <= _cuda.MAX_SEGMENTS and len(batch) < _cuda.MAX_PRODUCTS
            if batch and (kind != kind_of_batch or not fits):
                _launch(batch, kind_of_batch, max_tiles)
                batch, used = [], 0
            batch.append((*target, segments_of_one))
            kind_of_batch, used = kind, used + len(segments_of_one)
    if batch:
        _launch(batch, kind_of_batch, max_tiles)


def _launch(layers: list[tuple], like: tuple, max_tiles: int) -> None:
    kinds, device, accumulate = like
    _cuda.wgrad(layers, *kinds, accumulate, _processors(device), max_tiles, device, raw_stream(device))


def _addresses(
    segments: Segments, n: int, k: int, device: int, dtype: torch.dtype | None, copies: list[Tensor]
) -> list[tuple[int, int, int, int, int]]:
    """(x, dy, rows, row stride of x, of dy) of the segments that have rows.

    Rows that overlap (an expanded dy), are not contiguous or not at multiples of 16 bytes are copied, to `copies`.
    Every attribute of a tensor costs the host 30 to 60 ns, so each is read once.
    """
    parts = []
    for x, dy in segments:
        (rows, columns), (x_step, x_unit), x_at = x.shape, x.stride(), x.data_ptr()
        (dy_rows, dy_columns), (dy_step, dy_unit), dy_at = dy.shape, dy.stride(), dy.data_ptr()
        if (
            columns != k or dy_columns != n or dy_rows != rows or x.dtype is not dtype or dy.dtype is not dtype
            or x.get_device() != device or dy.get_device() != device
        ):  # fmt: skip
            raise ValueError(
                f"linear_wgrad: x must be [M, {k}] and dy [M, {n}] for dweight [{n}, {k}], all {dtype} and on its "
                f"device; got {[*x.shape]} {x.dtype} {x.device} and {[*dy.shape]} {dy.dtype} {dy.device}"
            )
        if not rows:
            continue
        apart = x_step >= k and dy_step >= n and x_unit == dy_unit == 1
        if not apart or (x_at | dy_at) & 15 or (x_step | dy_step) & 7:
            x, dy = _aligned(x), _aligned(dy)
            copies += (x, dy)
            x_at, dy_at, x_step, dy_step = x.data_ptr(), dy.data_ptr(), x.stride(0), dy.stride(0)
        parts.append((x_at, dy_at, rows, x_step, dy_step))
    return parts


@functools.cache
def _kinds(dtype: torch.dtype, dweight: torch.dtype, dbias: torch.dtype | None) -> tuple[int, int, int]:
    """The extension's numbers for these dtypes. Raises ValueError for dtypes that it does not take."""
    if dtype not in DTYPES or not {dweight, dbias or dtype} <= {dtype, torch.float32}:
        raise ValueError(
            "linear_wgrad: impl='cuda' takes x and dy in bf16 or fp16, dweight and dbias in float32 or x's dtype; "
            f"got x {dtype}, dweight {dweight}, dbias {dbias}; use impl='triton' or impl='torch'"
        )
    return KINDS[dtype], KINDS[dweight], KINDS[dbias or dtype]


@functools.cache
def _processors(device: int) -> int:
    """How many blocks run at a time: one on each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _aligned(matrix: Tensor) -> Tensor:
    """Itself, or a copy whose rows are contiguous, apart, and begin at multiples of 16 bytes."""
    step, unit = matrix.stride()
    if unit == 1 and step >= matrix.shape[1] and step % 8 == 0 and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _add_bias(segments: Segments, dbias: Tensor | None, accumulate: bool) -> None:
    """The bias alone: of a frozen weight, and of one whose operands are exchanged."""
    if dbias is None:
        return
    if not accumulate:
        dbias.zero_()
    for _, dy in segments:
        dbias.add_(dy.sum(0, dtype=torch.float32))


def raw_stream(device: int) -> int:
    """The current stream; torch.cuda.current_stream would make an object of it at each launch."""
    return torch._C._cuda_getCurrentRawStream(device)
