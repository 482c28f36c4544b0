"""The calls whose kernels the report compiles: of the shapes of large layers, and everything that calls can select.

Operands are on torch's device "meta", which has no memory; kernels are called as on a GPU of a capability, and what
would be compiled is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from build_tools.kernels.jobs import CompileJob, recorded
from zbkern.kernels.spec import AttentionOptions, CrossEntropyOptions, GateOptions

SMS = {80: 108, 89: 128, 90: 132, 100: 148, 120: 170}
"""Of an A100, RTX 4090, H100, B200 and RTX 5090."""

Run = tuple[str, Callable[[], object]]


class Named(NamedTuple):
    """A job, and the call that it is of. aligned: its operands begin where the GPU copies 16 bytes at a time."""

    name: str
    job: CompileJob
    aligned: bool


def jobs(capability: int, runs_of: Callable[[int], Iterator[Run]] | None = None) -> list[Named]:
    """What `runs`, or another of these lists, compile on such a GPU, each once."""
    from triton.backends.compiler import GPUTarget

    found: list[Named] = []
    with tiles_of(capability), recorded(GPUTarget("cuda", capability, 32)) as made:
        for name, run in (runs_of or runs)(capability):
            begin = len(made)
            run()
            several = len(made) > begin + 1
            for job in made[begin:]:
                label = f"{name}: {job.kernel[1].strip('_')}" if several else name
                found.append(Named(label, job, not (runs_of is all_runs or "shifted" in name)))
    return found


def backend() -> ModuleType:
    from zbkern.kernels.triton import kernels

    return kernels


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str = "plain") -> Tensor:
    """A matrix with one of LAYOUTS."""
    if layout == "transposed":
        return empty(columns, rows, dtype=dtype).t()
    if layout == "odd":
        return empty(rows, columns + 1, dtype=dtype)[:, :columns]
    if layout == "shifted":
        return empty(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
    return empty(rows, columns, dtype=dtype)


# ---- the shapes of large layers ----

HALF, SINGLE = torch.bfloat16, torch.float32
SIZE = 4096
ROWS = 4095
"""Tokens, of which nothing may be known; features are multiples of 16."""


def runs(capability: int) -> Iterator[Run]:
    """(name, call) of what production launches: large layers in bf16, what has the fewest registers left in float32,
    and outputs that bulk copies refuse."""
    yield from tightest(capability)
    for shape in SHORTER_ATTENTION:
        yield attention(*shape)
    if capability >= 89:
        yield from casts(torch.float8_e4m3fn, SINGLE)
        for dtype in (HALF, SINGLE):
            yield from casts(torch.float8_e5m2, dtype)


def tightest(capability: int) -> Iterator[Run]:
    """Of `runs`, what comes closest to a limit of the GPU: one kind of casts, the longest attention of a head size."""
    bulk = capability >= 90
    yield from large_linears(bulk)
    yield from large_experts(bulk)
    yield from elementwise()
    yield from embedding()
    yield from norms()
    yield from rotary()
    yield from loss()
    if capability >= 89:
        yield from casts(torch.float8_e4m3fn, HALF)
        x, parts = empty(SIZE, SIZE), empty(512, dtype=SINGLE)
        yield "float8_amax bf16", lambda: backend().float8_amax(x, parts)
    for shape in ATTENTION:
        yield attention(*shape)
    yield from attention_tables()


def short(dtype: torch.dtype) -> str:
    return {HALF: "bf16", SINGLE: "fp32"}[dtype]


def large_linears(bulk: bool) -> Iterator[Run]:
    """Dense layers. Names that begin with "fp32" are of products in float32."""
    plain, odd = ("plain",) * 3, ("plain", "plain", "shifted")
    wanted = ("fwd", "fwd silu z", "dgrad", "gated fwd", "gated dgrad silu")
    yield from chosen("linear bf16", linear((SIZE, SIZE), HALF, plain), wanted)
    yield from chosen("linear fp32", linear((SIZE, SIZE), SINGLE, plain), ("fwd silu z", "dgrad"))
    turned = linear((SIZE, SIZE), SINGLE, ("plain", "transposed", "plain"))
    yield from chosen("linear fp32 transposed", turned, ("gated dgrad gelu",))
    for products, segments, bias, out in (
        (1, 1, False, SINGLE), (1, 4, True, SINGLE), (1, 8, False, HALF), (8, 1, False, SINGLE), (2, 4, True, SINGLE),
    ):  # fmt: skip
        yield wgrad(products, segments, HALF, out, True, bias)
    yield wgrad(1, 1, SINGLE, SINGLE, False, False)
    dx = empty(SIZE, SIZE)
    yield "linear_dgrad_sum bf16 of 4", lambda: backend().linear_dgrad_sum([(dx, dx)] * 4, dx)
    if bulk:
        yield from chosen("linear bf16 shifted", linear((SIZE, SIZE - 1), HALF, odd), ("dgrad",))
        yield wgrad(8, 1, HALF, SINGLE, True, False, "shifted")


def chosen(prefix: str, found: Iterator[Run], names: Sequence[str]) -> Iterator[Run]:
    calls = dict(found)
    for name in names:
        yield f"{prefix} {name}", calls[name]


def wgrad(
    products: int, segments: int, dtype: torch.dtype, out: torch.dtype, add: bool, bias: bool, layout: str = "plain"
) -> Run:
    """W of so many weights, of so many microbatches."""
    columns = SIZE - 1 if layout == "shifted" else SIZE
    x, dy = empty(SIZE, columns, dtype=dtype), empty(SIZE, SIZE, dtype=dtype)
    outputs = [(matrix(SIZE, columns, out, layout), empty(SIZE, dtype=out) if bias else None) for _ in range(products)]
    layers = [([(x, dy)] * segments, output) for output in outputs]
    name = f"linear_wgrad {short(dtype)} to {short(out)}, {products} x {segments}" + " bias" * bias + " add" * add
    return name + f" {layout}" * (layout != "plain"), lambda: backend().linear_wgrads(layers, add)


def large_experts(bulk: bool) -> Iterator[Run]:
    """Eight experts."""
    yield experts(HALF)
    yield experts(HALF, bias=True, turned=True)
    yield experts(HALF, dgrad=True)
    yield experts(SINGLE, bias=True)
    for segments, dtype, out, add in ((1, HALF, SINGLE, True), (4, HALF, SINGLE, True), (8, HALF, HALF, True)):
        yield experts_wgrad(segments, dtype, out, add, bias=segments == 1)
    yield experts_wgrad(1, SINGLE, SINGLE, False)
    if bulk:
        yield experts(HALF, dgrad=True, layout="shifted")
        yield experts_wgrad(4, HALF, SINGLE, True, layout="shifted")
    plain, gpt_oss = GateOptions(), GateOptions("silu", True, 7.0, 1.702, 1.0)
    yield gated_experts(HALF, plain, False)
    yield gated_experts(HALF, gpt_oss, True)
    yield gated_experts(SINGLE, GateOptions("gelu"), True)
    for options in (plain, gpt_oss):
        yield "gate bf16" + " interleaved" * options.interleaved, gate(options)
    yield "gate bf16 backward interleaved", gate(gpt_oss, True)


def ends() -> Tensor:
    return empty(8, dtype=torch.int32)


def experts(
    dtype: torch.dtype, dgrad: bool = False, bias: bool = False, turned: bool = False, layout: str = "plain"
) -> Run:
    columns = SIZE - 1 if layout == "shifted" else SIZE
    x, out = empty(8 * SIZE, SIZE, dtype=dtype), matrix(8 * SIZE, columns, dtype, layout)
    weight, one = empty(8, SIZE, columns, dtype=dtype), empty(8, SIZE, dtype=dtype) if bias else None
    name = f"grouped_linear_{'dgrad' if dgrad else 'fwd'} {short(dtype)}" + " bias" * bias + " transposed" * turned
    if dgrad:
        return f"{name} {layout}".removesuffix(" plain"), lambda: backend().grouped_linear_dgrad(x, weight, ends(), out)
    stored = weight.mT if turned else weight
    return name, lambda: backend().grouped_linear_fwd(x, stored, one, ends(), out)


def experts_wgrad(
    segments: int, dtype: torch.dtype, out: torch.dtype, add: bool, bias: bool = False, layout: str = "plain"
) -> Run:
    columns = SIZE - 1 if layout == "shifted" else SIZE
    x, dy = empty(8 * SIZE, columns, dtype=dtype), empty(8 * SIZE, SIZE, dtype=dtype)
    outputs = matrix(8 * SIZE, columns, out, layout).view(8, SIZE, columns), empty(8, SIZE, dtype=out) if bias else None
    name = f"grouped_linear_wgrad {short(dtype)} to {short(out)}, {segments}" + " add" * add
    pairs = [(x, dy, ends())] * segments
    return f"{name} {layout}".removesuffix(" plain"), lambda: backend().grouped_linear_wgrad(pairs, outputs, add)


def gated_experts(dtype: torch.dtype, options: GateOptions, turned: bool) -> Run:
    dy, z, h = (empty(8 * SIZE, width, dtype=dtype) for width in (SIZE, 2 * SIZE, SIZE))
    weight = empty(8, SIZE, SIZE, dtype=dtype)
    stored = weight.mT if turned else weight
    name = f"grouped_gated_dgrad {short(dtype)} {options.activation}" + " interleaved" * options.interleaved
    return name, lambda: backend().grouped_gated_dgrad(dy, stored, ends(), z, options, z, h)


def gate(options: GateOptions, backward: bool = False) -> Callable[[], None]:
    """The gate of all rows alone: without groups no product is launched."""
    x, z, h = (empty(8 * SIZE, width) for width in (SIZE, 2 * SIZE, SIZE))
    nothing = empty(0, SIZE, SIZE), empty(0, dtype=torch.int32)
    if backward:
        return lambda: backend().grouped_gated_dgrad(x, *nothing, z, options, z, h)
    return lambda: backend().grouped_gated_fwd(x, empty(0, 2 * SIZE, SIZE), None, nothing[1], options, z, h)


def elementwise() -> Iterator[Run]:
    x, strided = empty(ROWS, SIZE), empty(ROWS, 2 * SIZE)[:, :SIZE]
    yield "activation_fwd silu", lambda: backend().activation_fwd(x, "silu", x)
    yield "activation_bwd silu", lambda: backend().activation_bwd(x, x, "silu", x)
    yield "gated_fwd silu", lambda: backend().gated_fwd(x, x, "silu", x)
    yield "gated_bwd silu", lambda: backend().gated_bwd(x, x, x, "silu", x, x, x)
    yield "gated_bwd silu of rows", lambda: backend().gated_bwd(x, strided, strided, "silu", x, x, x)
    yield "sum_rows bf16", lambda: backend().linear_wgrad([(x, x)], (None, empty(SIZE, dtype=SINGLE)), True)


def embedding() -> Iterator[Run]:
    for segments, name, tokens in ((1, "rare", SIZE), (4, "rare", SIZE), (4, "frequent", 16 * SIZE)):
        parts = [(empty(tokens, dtype=torch.int64), empty(tokens, SIZE))] * segments
        weight = empty(SIZE, SIZE, dtype=SINGLE)
        run = functools.partial(backend().embedding_wgrad, parts, (weight,), True)
        yield f"embedding_wgrad, {segments} segments, {name}", run


NORMS = (
    *((128, False, False), (4096, False, False), (4096, True, False), (8192, True, False), (16384, True, False)),
    *((65536, True, False), (4096, False, True), (8192, True, True), (16384, True, True), (65536, True, True)),
)
"""(features, LayerNorm rather than RMSNorm, with a residual): usual lengths, and those that hold most."""


def norms() -> Iterator[Run]:
    for features, centered, added in NORMS:
        name = f"{'added ' if added else ''}{'layer' if centered else 'rms'} {features}"
        x, weight, rows = empty(ROWS, features), empty(features), empty(ROWS, dtype=SINGLE)
        residual = (x, x) if added else ()
        partials = empty(1 + centered, backend().norm_partials(ROWS, features, x.device), features, dtype=SINGLE)
        last = (x, partials, x) if added else (x, partials)
        bias, mean = (weight, rows) if centered else (None, None)
        fwd = functools.partial(backend().norm_fwd, x, weight, bias, 1e-5, x, mean, rows, *residual)
        yield f"norm forward {name}", fwd
        yield f"norm dgrad {name}", functools.partial(backend().norm_dgrad, x, x, weight, mean, rows, *last)
    parts = [(empty(1, 63, SIZE, dtype=SINGLE),)] * 4
    yield "norm_wgrad", lambda: backend().norm_wgrad(parts, (empty(SIZE, dtype=SINGLE),), True)


def rotary() -> Iterator[Run]:
    for interleaved, size, half in ((False, 128, 64), (True, 128, 64), (True, 256, 32)):
        x, angles = empty(1, SIZE, 32, size), empty(SIZE, half, dtype=SINGLE)
        run = functools.partial(backend().rotary_fwd, x, angles, angles, interleaved, x)
        yield f"rotary {'interleaved ' if interleaved else ''}{2 * half} of {size}", run


def casts(kind: torch.dtype, dtype: torch.dtype) -> Iterator[Run]:
    """To 8 bits, of rows and of columns, with a scale for each and for all."""
    parts = empty(512, dtype=SINGLE)
    for turned, amax, features in itertools.product((False, True), (None, parts), (SIZE, 7 * SIZE)):
        x = empty(features, ROWS + 1, dtype=dtype).t() if turned else empty(ROWS, features, dtype=dtype)
        y, scale = empty(*x.shape, dtype=kind), empty(1 if amax is parts else len(x), dtype=SINGLE)
        name = f"float8_cast {short(dtype)} to {str(kind)[13:]} of {features}" + " turned" * turned
        run = functools.partial(backend().float8_cast, x, amax, True, y, scale)
        yield name + " one scale" * (amax is not None), run


def loss() -> Iterator[Run]:
    z, target, rows = empty(SIZE, SIZE), empty(SIZE, dtype=torch.int64), empty(SIZE, dtype=SINGLE)
    plain, smoothed = CrossEntropyOptions(), CrossEntropyOptions(label_smoothing=0.1)
    fwd = functools.partial(backend().cross_entropy_fwd, z, z, None, target)
    yield "cross_entropy_fwd, smoothed, and dx", lambda: fwd(smoothed, rows, rows, z)
    yield "cross_entropy_fwd", lambda: fwd(plain, rows, rows, None)
    segments, outputs = [(z, target, rows, rows)], (empty(SIZE, SIZE, dtype=SINGLE), None)
    yield "cross_entropy_wgrad", lambda: backend().cross_entropy_wgrad(segments, outputs, True, z, None, plain)


# ---- attention ----


def attention(
    size: int, dtype: torch.dtype, causal: bool, window: bool, packed: bool,
    value_size: int | None = None, softcap: bool = False, sinks: bool = False,
) -> Run:  # fmt: skip
    """Both directions, with two query heads for a key head. packed: sequences of different lengths."""
    sizes = "/".join(map(str, dict.fromkeys((size, value_size or size))))
    flags = " causal" * causal + " window" * window + " packed" * packed + " softcap" * softcap + " sinks" * sinks
    ends = (0, 1000, 1023) if packed else (0, 1023, 2046)
    options = AttentionOptions(0.1, causal, 128 if window else None, ends, ends, 30.0 if softcap else None)
    value_size = size if value_size is None else value_size
    q, dq = (empty(ends[-1], 4, size, dtype=dtype) for _ in range(2))
    k, dk = (empty(ends[-1], 2, size, dtype=dtype) for _ in range(2))
    y, dy = (empty(ends[-1], 4, value_size, dtype=dtype) for _ in range(2))
    v, dv = (empty(ends[-1], 2, value_size, dtype=dtype) for _ in range(2))
    lse, heads = empty(4, ends[-1], dtype=SINGLE), empty(4, dtype=SINGLE) if sinks else None

    def run() -> None:
        backend().attention_fwd(q, k, v, options, y, lse, heads)
        backend().attention_dgrad(dy, q, k, v, y, lse, options, dq, dk, dv, lse if sinks else None)

    return f"attention {short(dtype)} {sizes}{flags}", run


ATTENTION: tuple[tuple, ...] = (
    # head size, dtype, causal, window, sequences of different lengths[, head size of values, soft cap, sinks]
    (40, HALF, True, True, True),
    (64, HALF, True, True, True, 64, False, True),
    (96, HALF, True, False, False),
    (128, HALF, True, False, True, 128, True, True),
    (256, HALF, True, True, False, 256, True, False),
    (192, HALF, True, False, True, 128, False, False),
    (64, SINGLE, False, False, True),
    (128, SINGLE, True, True, True),
)
"""Every head size that has tiles of its own, the longest code of each, and what has the fewest registers left."""

SHORTER_ATTENTION: tuple[tuple, ...] = (
    (64, HALF, True, False, False),
    (64, HALF, False, False, True),
    (64, HALF, True, True, True),
    (128, HALF, True, False, False),
    (128, HALF, False, False, True),
    (128, HALF, True, True, True),
    (256, HALF, False, False, False),
    (256, HALF, True, False, False),
    (256, HALF, True, True, True),
    (192, HALF, True, False, False, 128, False, False),
    (128, SINGLE, True, False, False),
)
"""Of the same head sizes: the code of each is part of a longer one's."""


def attention_tables() -> Iterator[Run]:
    """The tiles of sequences whose ends are on the device."""
    places = empty(1000, dtype=torch.int32)
    options = AttentionOptions(0.1, True, None, places, places)
    q, lse = empty(2048, 2, 64), empty(2, 2048, dtype=SINGLE)
    yield "attention tiles", lambda: backend().attention_fwd(q, q, q, options, q, lse)
    yield "attention tiles backward", lambda: backend().attention_dgrad(q, q, q, q, q, lse, options, q, q, q)


# ---- everything that calls can select ----

LAYOUTS = (
    ("plain", "plain", "plain"),
    ("plain", "plain", "odd"),
    ("plain", "plain", "shifted"),
    ("transposed", "plain", "plain"),
    ("plain", "transposed", "plain"),
    ("transposed", "transposed", "odd"),
)
"""Of two operands and of the output: contiguous rows, or columns; rows whose pitch is no multiple of 16 bytes; rows
that start at an unaligned address. Operands that are odd or shifted are copied first."""

SHAPES = ((4096, 4096), (2048, 1024), (1024, 1024), (512, 512), (4096, 64), (64, 4096), (4095, 4097), (513, 519))
"""[rows, columns] of outputs that together take every tile."""


def linear(shape: tuple[int, int], dtype: torch.dtype, layouts: tuple[str, str, str]) -> Iterator[tuple[str, Callable]]:
    """(name, call) of every kernel of linear layers: x, weight and y, or what is in their place, have the layouts."""
    triton, (p, q), r = backend(), shape, SIZE
    one, two, three = layouts

    def m(rows: int, columns: int, layout: str, other: torch.dtype = dtype) -> Tensor:
        return matrix(rows, columns, other, layout)

    bias = empty(q, dtype=dtype)
    x, weight, y, z = m(p, r, one), m(q, r, two), m(p, q, three), m(p, q, three)
    yield "fwd", lambda: triton.linear_fwd(x, weight, bias, y)
    yield "fwd silu z", lambda: triton.linear_fwd(x, weight, bias, y, "silu", z)
    yield "fwd gelu", lambda: triton.linear_fwd(x, weight, bias, y, "gelu")
    down = m(r, q, two)
    yield "dgrad", lambda: triton.linear_dgrad(x, down, y)
    yield "dgrad sum", lambda: triton.linear_dgrad_sum([(x, down)] * 3, y)
    rows, gradient = m(r, q, one), m(r, p, two)
    for out in dict.fromkeys((torch.float32, dtype)):
        dweight, dbias = m(p, q, three, out), empty(p, dtype=out)
        for accumulate, segments in itertools.product((False, True), (1, 4, 8)):
            name = f"wgrad to {str(out)[6:]} of {segments}" + " add" * accumulate
            pairs = [(rows, gradient)] * segments
            yield name, functools.partial(triton.linear_wgrad, pairs, (dweight, dbias), accumulate)
    layers = [([(rows, gradient)], (dweight, dbias))] * 7
    yield "wgrads of 7", lambda: triton.linear_wgrads(layers, True)
    up, gate, h = (m(p, q, three) for _ in range(3))
    for name, biases in (("gated fwd", (None, None)), ("gated fwd bias", (bias, bias))):
        yield name, functools.partial(triton.gated_linear_fwd, x, weight, weight, *biases, "silu", gate, up, h)
    for activation in ("gelu", "gelu_tanh", "silu"):
        outputs = (m(p, q, three) for _ in range(3))
        yield (
            f"gated dgrad {activation}",
            functools.partial(triton.gated_linear_dgrad, x, down, gate, up, activation, *outputs),
        )


def all_runs(capability: int) -> Iterator[Run]:
    """(name, call) of other layouts, alignments, dtypes and tiles, on any GPU: too much for every test run."""
    for dtype, layouts, shape in itertools.product((HALF, SINGLE), LAYOUTS, SHAPES):
        for name, run in linear(shape, dtype, layouts):
            yield f"{short(dtype)} {name} {' '.join(dict.fromkeys(layouts))}", run
    sizes, masks = (16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256), ((False, False), (True, False), (True, True))
    for dtype, size, (causal, window), packed in itertools.product((HALF, SINGLE), sizes, masks, (False, True)):
        if size <= 128 or dtype == HALF:
            yield attention(size, dtype, causal, window, packed)


@contextlib.contextmanager
def tiles_of(capability: int) -> Iterator[None]:
    """Inside, kernels choose tiles as on a GPU of that capability, whatever GPU is here."""
    from zbkern.kernels.triton import matmul_tile as triton_matmul_tile
    from zbkern.kernels.triton.replay import replay

    with contextlib.ExitStack() as stack:
        machine = capability, SMS[capability]
        stack.enter_context(mock.patch.object(triton_matmul_tile, "_machine", return_value=machine))
        for remembered in (triton_matmul_tile.plan.cache_clear, replay.forget):
            remembered()
            stack.callback(remembered)
        yield
