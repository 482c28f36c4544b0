"""Thin calls into the compiled extension zbkern._cuda: addresses are taken from tensors here, and checked once.

linear_wgrad is the launch of spec.py; all tokens of a weight are one product, whose sum runs over the segments in the
order of the list, in fp32, and whose result is read and written once. Nothing here waits for the GPU. A launch
allocates only where it has to copy an operand whose rows are not contiguous or not at multiples of 16 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

try:
    from zbkern import _cuda
except ImportError:  # not built; why_not says so
    _cuda = None

# how the extension names dtypes
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPES = (torch.bfloat16, torch.float16)

Segments = Sequence[tuple[Tensor, ...]]
Outputs = Sequence[Tensor | None]


def why_not(device: torch.device | str | None = None) -> str | None:
    """Why nothing of this module can run on a device, and what would change it; None when it can."""
    if _cuda is None:
        return "the CUDA kernels are not built; with nvcc at hand: ZBKERN_BUILD=cuda pip install zbkern"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return unfit(torch.version.cuda, _cuda.CUDA_VERSION, _cuda.ARCHITECTURES, torch.cuda.get_device_capability(device))


def unfit(torch_cuda: str | None, built_with: int, built_for: str, capability: tuple[int, int]) -> str | None:
    """Why a build does not fit. torch_cuda: "12.8"; built_with: 13000; built_for: "8.0 9.0a"; capability: (9, 0)."""
    built = f"{built_with // 1000}.{built_with % 1000 // 10}"
    if torch_cuda is None or int(torch_cuda.split(".")[0]) != built_with // 1000:
        return (
            f"the CUDA kernels were built with CUDA {built} and this torch has CUDA {torch_cuda}; "
            "build zbkern with a toolkit of torch's major version, or install a torch for this one"
        )
    major, minor = capability
    for name in built_for.split():
        number, ptx = name.removesuffix("+PTX"), name.endswith("+PTX")
        built_major, built_minor = (int(digits) for digits in number.rstrip("af").split("."))
        exact = number.endswith("a")
        same = (major, minor) == (built_major, built_minor)
        if same or (not exact and (major == built_major and minor >= built_minor)):
            return None
        if ptx and not exact and (major, minor) >= (built_major, built_minor):
            return None
    return (
        f"the CUDA kernels were built for {built_for} and this GPU is {major}.{minor}; "
        f"build them for it: TORCH_CUDA_ARCH_LIST={major}.{minor} ZBKERN_BUILD=cuda pip install zbkern"
    )


def linear_wgrad(
    segments: Segments, outputs: Outputs, accumulate: bool, *, sms: int | None = None, max_tiles: int = 0
) -> None:
    """dweight (+)= sum of dy^T x and dbias (+)= sum over rows of dy, over segments (x [M_i, K], dy [M_i, N]).

    x, dy: both bf16 or both fp16, N and K multiples of 8. Outputs: float32 or of x's dtype. sms: blocks run on at most
    that many multiprocessors, None for all. max_tiles: a block ends after so many tiles of dweight, so that others get
    its multiprocessor; 0 for no bound. Raises ValueError.
    """
    dweight, dbias = outputs
    segments = [segment for segment in segments if segment[0].shape[0]]
    if dweight is None or not segments:
        _add_bias(segments, dbias, accumulate)
        if dweight is not None and not accumulate:
            dweight.zero_()
        return
    if dweight.stride(1) != 1:  # a transposed view: the same product with its factors exchanged
        linear_wgrad([(dy, x) for x, dy in segments], (dweight.t(), None), accumulate, sms=sms, max_tiles=max_tiles)
        _add_bias(segments, dbias, accumulate)
        return
    for first in range(0, len(segments), _cuda.MAX_SEGMENTS):
        part = segments[first : first + _cuda.MAX_SEGMENTS]
        linear_wgrads([(part, outputs)], accumulate, sms=sms, max_tiles=max_tiles)
        accumulate = True


def linear_wgrads(
    products: Sequence[tuple[Segments, Outputs]], accumulate: bool, *, sms: int | None = None, max_tiles: int = 0
) -> None:
    """linear_wgrad of several weights in one launch, so that no multiprocessor idles between two of them.

    For GPUs of compute capability 9.0; others take one weight. All of the same dtypes, every dweight [N, K] with
    contiguous rows and its own memory, every segment with rows; at most MAX_PRODUCTS weights and MAX_SEGMENTS segments.
    """
    dtype, (dweight, _) = products[0][0][0][0].dtype, products[0][1]
    dbias = next((bias for _, (_, bias) in products if bias is not None), None)
    dtypes = dweight.dtype, dtype if dbias is None else dbias.dtype
    if dtype not in DTYPES or any(out not in (dtype, torch.float32) for out in dtypes):
        raise ValueError(
            "linear_wgrad: impl='cuda' takes x and dy in bf16 or fp16, dweight and dbias in float32 or x's dtype; "
            f"got x {dtype}, dweight {dtypes[0]}, dbias {dtypes[1]}; use impl='triton' or impl='torch'"
        )
    fields, shapes, alive = [], [], []
    for segments, (dweight, dbias) in products:
        if dweight.dtype != dtypes[0] or (dbias is not None and (dbias.dtype != dtypes[1] or dbias.stride(0) != 1)):
            raise ValueError(f"linear_wgrad: each dweight must be {dtypes[0]}, each dbias {dtypes[1]} and contiguous")
        n, k = dweight.shape
        parts = []
        for x, dy in segments:
            if x.dtype != dtype or dy.dtype != dtype or x.shape[1] != k or dy.shape != (x.shape[0], n):
                raise ValueError(
                    f"linear_wgrad: x must be [M, {k}] and dy [M, {n}] for dweight [{n}, {k}], both {dtype}; "
                    f"got {list(x.shape)} {x.dtype} and {list(dy.shape)} {dy.dtype}"
                )
            x, dy = _aligned(x), _aligned(dy)
            alive += (x, dy)  # a copy's memory must not become the next one's before the launch
            parts.append((x.data_ptr(), dy.data_ptr(), x.shape[0], x.stride(0), dy.stride(0)))
        fields.append((dweight.data_ptr(), 0 if dbias is None else dbias.data_ptr(), n, k, dweight.stride(0), parts))
        shapes.append((n, k))
    device = dweight.device.index
    tile, blocks, hopper = _choice(tuple(shapes), device, sms, max_tiles)
    kinds = KINDS[dtype], KINDS[dtypes[0]], KINDS[dtypes[1]]
    _cuda.wgrad(fields, *kinds, accumulate, blocks, tile, hopper, device, raw_stream(device))


def grouped_linear_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    """linear_wgrad of every group of rows: outputs [E, ..], segments (x, dy, counts). On Hopper 4 groups a launch."""
    parts = [(x.split(counts.tolist()), dy.split(counts.tolist())) for x, dy, counts in segments]
    groups = next(output for output in outputs if output is not None).shape[0]
    full: list[tuple[Segments, Outputs]] = []
    for group in range(groups):
        mine = [(xs[group], dys[group]) for xs, dys in parts if xs[group].shape[0]]
        targets = tuple(None if output is None else output[group] for output in outputs)
        if mine and targets[0] is not None and len(mine) <= _cuda.MAX_SEGMENTS and targets[0].stride(1) == 1:
            full.append((mine, targets))
        else:
            linear_wgrad(mine, targets, accumulate)
    while full:
        count = _in_one_launch(full)
        linear_wgrads(full[:count], accumulate)
        full = full[count:]


def _in_one_launch(products: Sequence[tuple[Segments, Outputs]]) -> int:
    """How many of the first products a launch takes."""
    if not _on_hopper(products[0][1][0].device.index):
        return 1
    segments = 0
    for count, (mine, _) in enumerate(products[: _cuda.MAX_PRODUCTS]):
        segments += len(mine)
        if segments > _cuda.MAX_SEGMENTS:
            return count
    return min(len(products), _cuda.MAX_PRODUCTS)


@functools.lru_cache(maxsize=1024)
def _choice(shapes: tuple[tuple[int, int], ...], device: int, sms: int | None, max_tiles: int) -> tuple[int, int, bool]:
    """Columns of a tile, number of blocks, and whether the kernels for 9.0 run."""
    properties = torch.cuda.get_device_properties(device)
    hopper = _on_hopper(device)
    places = properties.multi_processor_count if sms is None else min(sms, properties.multi_processor_count)
    if not hopper:
        places *= 2  # two blocks fit on a multiprocessor
    tile = max(_cuda.choose_tile(n, k, places) for n, k in shapes) if hopper else 128
    tiles = sum(_cuda.count_tiles(n, k, tile) for n, k in shapes)
    return tile, _cuda.choose_blocks(tiles, places, max_tiles), hopper


@functools.cache
def _on_hopper(device: int) -> bool:
    return torch.cuda.get_device_properties(device).major == 9 and _cuda.has_sm90()


def _aligned(matrix: Tensor) -> Tensor:
    """Itself, or a copy whose rows are contiguous and begin at multiples of 16 bytes."""
    if matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _add_bias(segments: Segments, dbias: Tensor | None, accumulate: bool) -> None:
    """The bias alone: of a frozen weight, and of one whose factors are exchanged."""
    if dbias is None:
        return
    if not accumulate:
        dbias.zero_()
    for _, dy in segments:
        dbias.add_(dy.sum(0, dtype=torch.float32))


def raw_stream(device: int) -> int:
    """The current stream; torch.cuda.current_stream would make an object of it at each launch."""
    return torch._C._cuda_getCurrentRawStream(device)
