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

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_HALVES = (torch.bfloat16, torch.float16)

Segments = Sequence[tuple[Tensor, ...]]
Outputs = Sequence[Tensor | None]


def why_not() -> str | None:
    """Why nothing of this module can run here, and what would change it; None when it can."""
    if _cuda is None:
        return "the CUDA kernels are not built; with nvcc at hand: ZBKERN_BUILD=cuda pip install zbkern"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return unfit(torch.version.cuda, _cuda.CUDA_VERSION, _cuda.ARCHITECTURES, torch.cuda.get_device_capability())


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
        _launch([_product(part, dweight, dbias)], dweight, dbias, part[0][0], accumulate, sms, max_tiles)
        accumulate = True


def linear_wgrads(
    products: Sequence[tuple[Segments, Outputs]], accumulate: bool, *, sms: int | None = None, max_tiles: int = 0
) -> None:
    """linear_wgrad of several weights in one launch, so that no multiprocessor idles between two of them.

    For GPUs of compute capability 9.0. Each (x, dy) of a segment and each output as in linear_wgrad, all of the same
    dtypes, every dweight with contiguous rows; at most MAX_PRODUCTS weights and MAX_SEGMENTS segments that have rows.
    """
    (some, *_), (dweight, _) = products[0][0], products[0][1]
    dbias = next((outputs[1] for _, outputs in products if outputs[1] is not None), None)
    ready = [_product([s for s in segments if s[0].shape[0]], *outputs) for segments, outputs in products]
    _launch(ready, dweight, dbias, some[0], accumulate, sms, max_tiles)


def _product(segments: Segments, dweight: Tensor, dbias: Tensor | None) -> tuple:
    """One weight as the extension takes it."""
    n, k = dweight.shape
    parts = []
    for x, dy in segments:
        if x.shape[1] != k or dy.shape[1] != n or x.shape[0] != dy.shape[0]:
            raise ValueError(
                f"linear_wgrad: x must be [M, {k}] and dy [M, {n}] for dweight [{n}, {k}]; "
                f"got {list(x.shape)} and {list(dy.shape)}"
            )
        x, dy = _aligned(x), _aligned(dy)
        parts.append((x.data_ptr(), dy.data_ptr(), x.shape[0], x.stride(0), dy.stride(0)))
    return dweight.data_ptr(), 0 if dbias is None else dbias.data_ptr(), n, k, dweight.stride(0), parts


def _launch(
    products: list[tuple],
    dweight: Tensor,
    dbias: Tensor | None,
    x: Tensor,
    accumulate: bool,
    sms: int | None,
    max_tiles: int,
) -> None:
    device = dweight.device.index
    bias_dtype = x.dtype if dbias is None else dbias.dtype
    if x.dtype not in _HALVES or dweight.dtype not in (x.dtype, torch.float32) or bias_dtype not in _KINDS:
        raise ValueError(
            "linear_wgrad: impl='cuda' takes x and dy in bf16 or fp16, dweight and dbias in float32 or x's dtype; "
            f"got x {x.dtype}, dweight {dweight.dtype}, dbias {bias_dtype}; use impl='triton' or impl='torch'"
        )
    shapes = tuple((product[2], product[3]) for product in products)
    tile, blocks, hopper = _choice(shapes, device, sms, max_tiles)
    kinds = _KINDS[x.dtype], _KINDS[dweight.dtype], _KINDS[bias_dtype]
    _cuda.wgrad(products, *kinds, accumulate, blocks, tile, hopper, device, _stream(device))


@functools.lru_cache(maxsize=1024)
def _choice(shapes: tuple[tuple[int, int], ...], device: int, sms: int | None, max_tiles: int) -> tuple[int, int, bool]:
    """Columns of a tile, number of blocks, and whether the kernels for 9.0 run."""
    properties = torch.cuda.get_device_properties(device)
    hopper = properties.major == 9 and _cuda.has_sm90()
    places = properties.multi_processor_count if sms is None else min(sms, properties.multi_processor_count)
    if not hopper:
        places *= 2  # two blocks fit on a multiprocessor
    tile = max(_cuda.choose_tile(n, k, places) for n, k in shapes) if hopper else 128
    tiles = sum(_cuda.count_tiles(n, k, tile) for n, k in shapes)
    return tile, _cuda.choose_blocks(tiles, places, max_tiles), hopper


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


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)  # 0.1 us; torch.cuda.current_stream makes an object of it


def control(device: torch.device | str) -> Tensor:
    """What adamw reads on the device at each step, to be written there: [learning rate, step, factor, skip], float32.

    step: 1 at the first. factor: of all gradients (clipping, loss scale). skip: nonzero leaves everything as it is.
    """
    return torch.tensor([0.0, 1.0, 1.0, 0.0], device=device)


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    control: Tensor,
    *,
    masters: Sequence[Tensor] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    undo: bool = False,
) -> None:
    """One AdamW step of all tensors in one launch, in place; can be captured in a CUDA graph.

    params: of one dtype, float32, bf16 or fp16; grads: likewise. exp_avgs, exp_avg_sqs, masters: float32; with masters
    (the weights in float32) each param is the rounded copy. All contiguous. undo: the inverse, with the gradients of
    the step; exact up to rounding (arXiv 2401.10241, appendix). For an exact return, save
    the tensors with copy_all before the step. Raises ValueError.
    """
    lists = [params, grads, exp_avgs, exp_avg_sqs] + ([] if masters is None else [masters])
    if len({len(tensors) for tensors in lists}) != 1:
        raise ValueError(f"adamw: lists of tensors must be equally long; got {[len(tensors) for tensors in lists]}")
    if not params:
        return
    for name, tensors, dtype in (
        ("params", params, params[0].dtype),
        ("grads", grads, grads[0].dtype),
        ("exp_avgs", exp_avgs, torch.float32),
        ("exp_avg_sqs", exp_avg_sqs, torch.float32),
        ("masters", masters or (), torch.float32),
    ):
        _check_list("adamw", name, tensors, dtype, params)
    items = [
        (*(tensor.data_ptr() for tensor in tensors), *([0] if masters is None else []), tensors[0].numel())
        for tensors in zip(*lists, strict=True)
    ]
    device = params[0].device.index
    kinds = _KINDS[params[0].dtype], _KINDS[grads[0].dtype]
    _cuda.adam(items, *kinds, control.data_ptr(), *betas, eps, weight_decay, undo, device, _stream(device))


def squared_norm(
    tensors: Sequence[Tensor], result: Tensor, *, accumulate: bool = False, workspace: Tensor | None = None
) -> None:
    """result[0] (+)= sum of the squares of all elements, result[1] = 1 where one is not finite. result [2] float32.

    tensors: of one dtype, contiguous. One pass; the sum has a fixed order. workspace: squared_norm_workspace floats,
    which is allocated where it is not given. Raises ValueError.
    """
    if tensors:
        _check_list("squared_norm", "tensors", tensors, tensors[0].dtype, tensors)
    spans = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
    if workspace is None:
        workspace = result.new_empty(_cuda.squared_norm_workspace(spans))
    kind = _KINDS[tensors[0].dtype] if tensors else 0
    device = result.device.index
    _cuda.squared_norm(spans, kind, accumulate, result.data_ptr(), workspace.data_ptr(), device, _stream(device))


def squared_norm_workspace(tensors: Sequence[Tensor]) -> int:
    """Floats that squared_norm needs."""
    return _cuda.squared_norm_workspace([(0, tensor.numel()) for tensor in tensors])


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target in one launch; same dtypes and sizes, contiguous. Raises ValueError."""
    if len(targets) != len(sources):
        raise ValueError(f"copy_all: as many targets as sources are needed; got {len(targets)} and {len(sources)}")
    for target, source in zip(targets, sources, strict=True):
        _check_list("copy_all", "sources", [source], target.dtype, [target])
        _check_list("copy_all", "targets", [target], target.dtype, [source])
    if targets:
        device = targets[0].device.index
        pairs = zip(targets, sources, strict=True)
        copies = [(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in pairs]
        _cuda.copy_all(copies, device, _stream(device))


def _check_list(
    function: str, name: str, tensors: Sequence[Tensor], dtype: torch.dtype, like: Sequence[Tensor]
) -> None:
    for index, (tensor, other) in enumerate(zip(tensors, like, strict=False)):
        if tensor.dtype != dtype or (function != "copy_all" and dtype not in _KINDS):
            raise ValueError(f"{function}: {name}[{index}] must be {dtype}, one of {list(_KINDS)}; got {tensor.dtype}")
        if tensor.numel() != other.numel() or tensor.device != other.device or not tensor.is_contiguous():
            raise ValueError(
                f"{function}: {name}[{index}] must be contiguous, with {other.numel()} elements on {other.device}; "
                f"got {tensor.numel()} with strides {tensor.stride()} on {tensor.device}"
            )
