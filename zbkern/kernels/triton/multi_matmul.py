"""Sums of matmuls as one Triton kernel: what W of weights and microbatches, and dx of several layers, run on.

One launch takes up to eight pairs of operands: eight matmuls, or one matmul that sums over eight, or two over four.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels import tiles
from zbkern.kernels.triton import matmul_tile
from zbkern.kernels.triton.common import Kernel, rows_dense, widen
from zbkern.kernels.triton.matmul_tile import (
    Matrix,
    as_operand,
    has_bulk_copies,
    load,
    multiply,
    pause,
    pieces,
    plan,
    precision,
    prefetch_to_l2,
    share_a_launch,
    store,
    tile_index,
)

SLOTS = 8
"""Pairs of operands that one launch takes; more run as further launches."""

ROWS = 8192
"""What a tile sums over at most where programs must end early: 0.1 ms of an H100's SM at two thirds of its peak."""


@triton.jit
def store_tile(
    value, p, q, out, P, Q, o_stride,
    ACCUMULATE: tl.constexpr, REDUCE: tl.constexpr, O_DESCRIPTOR: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Writes or adds a tile. REDUCE: the addition happens on its way to memory, in L2."""
    if REDUCE:
        out.atomic_add([p, q], value)
    else:
        if ACCUMULATE:
            value += widen(load(out, p, q, P, Q, o_stride, M, N, O_DESCRIPTOR))
        store(out, value, p, q, P, Q, o_stride, M, N, O_DESCRIPTOR)


def _sums(
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7, r0, r1, r2, r3, r4, r5, r6, r7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    p0, p1, p2, p3, p4, p5, p6, p7, q0, q1, q2, q3, q4, q5, q6, q7,
    a_stride, b_stride, o_stride, added_to, added_stride, late, late_of,
    PRODUCTS: tl.constexpr, SEGMENTS: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr,
    DESCRIPTORS: tl.constexpr, O_DESCRIPTOR: tl.constexpr, ACCUMULATE: tl.constexpr, REDUCE: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out_i [P_i, Q_i] (+)= sum over the segments s of matmul i and rows r < r_s of A_s[p, r] B_s[r, q].

    added_to: a pointer to the output where that is one and is added to, for a tile of it to be in L2 by then.
    late: nanoseconds by which each late_of programs begin after those before, so that not all write at one time.
    Segments SEGMENTS i to SEGMENTS (i + 1) are matmul i's. One program computes every num_programs-th tile [M, N],
    through all matmuls without a pause. Tiles, segments and steps are one loop: each step picks its operands by its
    number, so copies run ahead across the borders of segments and tiles, and an output is read and written once. (As
    nested loops the compiler fuses tiles and steps only where all tiles take as many; `turn` must come first, and from
    a choice, not a branch, or no copy runs ahead at all: build_tools/kernels looks.)
    """
    if late is not None:
        pause(tl.program_id(0) // late_of * late)
    a_s = (a0, a1, a2, a3, a4, a5, a6, a7)
    b_s = (b0, b1, b2, b3, b4, b5, b6, b7)
    r_s = (r0, r1, r2, r3, r4, r5, r6, r7)
    outs = (o0, o1, o2, o3, o4, o5, o6, o7)
    p_s = (p0, p1, p2, p3, p4, p5, p6, p7)
    q_s = (q0, q1, q2, q3, q4, q5, q6, q7)
    # Tuples grow by addition: Triton has no unpacking.
    steps = (max(tl.cdiv(r0, K), 1),)  # the step after the last of each segment, counted through all matmuls
    for s in tl.static_range(1, PRODUCTS * SEGMENTS):
        least = 1 if s % SEGMENTS == 0 else 0  # a matmul of no rows takes one step, which writes zeros
        steps = steps + (steps[s - 1] + max(tl.cdiv(r_s[s], K), least),)  # type: ignore[assignment]  # noqa: RUF005
    ends = (tl.cdiv(p0, M) * tl.cdiv(q0, N),)  # the tile after the last of each matmul
    for i in tl.static_range(1, PRODUCTS):
        ends = ends + (ends[i - 1] + tl.cdiv(p_s[i], M) * tl.cdiv(q_s[i], N),)  # type: ignore[assignment]  # noqa: RUF005
    begin, length = 0, steps[SEGMENTS - 1]
    total = tl.cdiv(max(ends[0] - tl.program_id(0), 0), tl.num_programs(0)) * length  # steps of this program's tiles
    if PRODUCTS > 1:
        total = 0
        for tile in range(tl.program_id(0), ends[PRODUCTS - 1], tl.num_programs(0)):
            steps_of_tile = steps[SEGMENTS - 1]
            for i in tl.static_range(1, PRODUCTS):
                if tile >= ends[i - 1]:
                    steps_of_tile = steps[SEGMENTS * (i + 1) - 1] - steps[SEGMENTS * i - 1]
            total += steps_of_tile
    out, P, Q, p, q = o0, p0, q0, 0, 0
    a, b, rows = a0, b0, r0
    tile = tl.program_id(0) - tl.num_programs(0)
    turn = length - 1
    accumulator = tl.zeros((M, N), tl.float32)
    for _ in range(total):
        turn = tl.where(turn == length - 1, 0, turn + 1)
        if turn == 0:
            tile += tl.num_programs(0)
            first = 0
            if PRODUCTS > 1:
                out, P, Q = o0, p0, q0
                a, b, rows = a0, b0, r0
                begin, length = 0, steps[SEGMENTS - 1]
            for i in tl.static_range(1, PRODUCTS):
                if tile >= ends[i - 1]:
                    out, P, Q = outs[i], p_s[i], q_s[i]
                    a, b, rows = a_s[SEGMENTS * i], b_s[SEGMENTS * i], r_s[SEGMENTS * i]
                    first, begin = ends[i - 1], steps[SEGMENTS * i - 1]
                    length = steps[SEGMENTS * (i + 1) - 1] - steps[SEGMENTS * i - 1]
            p, q = tile_index(tile - first, P, Q, M, N, GROUP)
        if added_to is not None:
            prefetch_to_l2(added_to, p, q, P, Q, added_stride, turn, length, M, N, K)
        offset = turn
        if SEGMENTS > 1:
            a, b, rows, before = a0, b0, r0, 0
            for s in tl.static_range(1, PRODUCTS * SEGMENTS):
                if begin + turn >= steps[s - 1]:
                    a, b, rows, before = a_s[s], b_s[s], r_s[s], steps[s - 1]
            offset = begin + turn - before
        accumulator, _ = multiply(
            accumulator, a, b, p, q, offset * K, P, Q, rows, a_stride, b_stride,
            A_T, B_T, DESCRIPTORS, PRECISION, M, N, K,
        )  # fmt: skip
        if turn == length - 1:
            parts = pieces(accumulator, M, N, PARTS)
            for i in tl.static_range(PARTS):
                store_tile(
                    parts[i], p, q + i * (N // PARTS), out, P, Q, o_stride,
                    ACCUMULATE, REDUCE, O_DESCRIPTOR, M, N // PARTS,
                )  # fmt: skip
            accumulator = tl.zeros((M, N), tl.float32)


# What changes from one microbatch to the next is never compiled in: the rows that W sums over, those that dx has.
_numbers = ["added_stride", "late", "late_of"]
_over_rows = Kernel(triton.jit(_sums, do_not_specialize=[*(f"r{i}" for i in range(SLOTS)), *_numbers]))
_of_rows = Kernel(triton.jit(_sums, do_not_specialize=[*(f"p{i}" for i in range(SLOTS)), *_numbers]))


_Pair = TypeVar("_Pair", bound=tuple)


class SumOfProducts(NamedTuple):
    """out [P, Q] = sum of a b over pairs (a [P, R_i], b [R_i, Q])."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    out: Tensor


class _Part(NamedTuple):
    """The part of a matmul that one launch computes."""

    factors: list[tuple[Matrix, Matrix]]
    result: Matrix
    add: bool


class _Kind(NamedTuple):
    """Equal for parts that may share a launch."""

    segments: int
    dtypes: tuple[torch.dtype, torch.dtype]
    left: tuple
    right: tuple
    result: int
    add: bool
    reads: bool
    writes: bool


def run(op: str, products: Sequence[SumOfProducts], accumulate: bool, max_tiles: int = 0) -> None:
    """Every matmul, or (accumulate) added to what its output has. Outputs are not empty, and share no memory.
    Parts of one kind share launches.

    max_tiles: a program ends after so many tiles, each of ROWS rows or of one pair, 0 for no bound; there are then more
    programs, and between two of them an SM is free for another stream's work.
    """
    originals = products
    products = [product._replace(out=rows_dense(product.out, copy=accumulate)) for product in originals]
    rounds: list[dict[_Kind, list[_Part]]] = []  # the second part of a matmul adds to what the first has written
    for product in products:
        for turn, part in enumerate(_parts(product, accumulate, max_tiles * ROWS)):
            if turn == len(rounds):
                rounds.append({})
            rounds[turn].setdefault(_kind(part), []).append(part)
    for groups in rounds:
        for kind, parts in groups.items():
            slots = SLOTS // 2 if kind.dtypes[0] == torch.float32 else SLOTS  # of float32, eight matmuls spill
            together = max(1, slots // kind.segments)
            for first in range(0, len(parts), together):
                batch = parts[first : first + together]
                for launched in [batch] if _share(op, kind, batch) else [[part] for part in batch]:
                    _launch(op, kind, launched, max_tiles)
    for product, original in zip(products, originals, strict=True):
        if product.out is not original.out:
            original.out.copy_(product.out)


def _parts(product: SumOfProducts, add: bool, max_rows: int) -> Iterable[_Part]:
    """Factors of one layout at a time, SLOTS and `most` rows of them (0: any) at most; the first part writes (unless it
    adds), the others add."""
    rest, result = [(as_operand(a), as_operand(b)) for a, b in product.pairs], Matrix(product.out)
    while rest:
        same = of_one_layout(rest)
        sums = itertools.accumulate(a.tensor.shape[1] for a, _ in same)
        same = same[: max(1, sum(rows <= max_rows for rows in sums))] if max_rows else same
        yield _Part(same, result, add)
        rest = [pair for pair in rest if pair not in same] if len(same) < len(rest) else []
        add = True


def of_one_layout(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Those that are laid out as the first, as many as one launch takes."""
    left, right = pairs[0][0].layout, pairs[0][1].layout
    return [pair for pair in pairs if pair[0].layout == left and pair[1].layout == right][:SLOTS]


def _kind(part: _Part) -> _Kind:
    left, right = part.factors[0]
    out, bulk = part.result.tensor, has_bulk_copies(part.result.tensor.device)
    reads = bulk and left.describable and right.describable
    writes = bulk and part.result.describable
    return _Kind(
        _power_of_2(len(part.factors)),
        (left.tensor.dtype, out.dtype),
        (left.transposed,) if reads else left.layout,  # descriptors carry the strides
        (right.transposed,) if reads else right.layout,
        1 if writes else out.stride(0),
        part.add,
        reads,
        writes,
    )


def _share(op: str, kind: _Kind, parts: Sequence[_Part]) -> bool:
    """Whether these are one launch, and not one each."""
    if len(parts) == 1:
        return True
    shapes = [part.result.tensor.shape for part in parts]
    rows = max(sum(a.tensor.shape[1] for a, _ in part.factors) for part in parts)
    device = parts[0].result.tensor.device
    return share_a_launch(op, shapes, rows, kind.dtypes[0], device, kind.reads and kind.writes)


def _launch(op: str, kind: _Kind, parts: Sequence[_Part], max_tiles: int) -> None:
    segments, dtypes, _, _, _, add, reads, writes = kind
    left, right = parts[0].factors[0]
    shapes = [tuple(part.result.tensor.shape) for part in parts]
    rows = [[a.tensor.shape[1] for a, _ in part.factors] for part in parts]
    p, q = shapes[0]
    device, others = left.tensor.device, tuple(shapes[1:])
    tile, programs = plan(op, p, q, max(map(sum, rows)), dtypes[0], device, reads and writes, others)
    if max_tiles:
        programs = max(programs, -(-tiles.count(tile, *shapes) // max_tiles))

    slots: list[tuple[Any, Any, int]] = []  # a, b, r
    targets: list[tuple[Any, ...]] = []  # output, p, q
    for part, counts, shape in zip(parts, rows, shapes, strict=True):
        pairs = [(a.argument(tile.m, tile.k, reads)[0], b.argument(tile.k, tile.n, reads)[0]) for a, b in part.factors]
        slots += [(a, b, count) for (a, b), count in zip(pairs, counts, strict=True)]
        slots += [(*pairs[0], 0)] * (segments - len(pairs))  # segments of no rows
        targets.append((part.result.argument(tile.m, tile.n // tile.epilogue_parts(), writes)[0], *shape))
    count = _power_of_2(len(parts))
    targets += [(targets[0][0], 0, q)] * (count - len(parts))  # matmuls of no rows
    slots += [(*slots[0][:2], 0)] * (segments * count - len(slots))

    strides = (1, 1, kind.result) if reads else (left.stride, right.stride, kind.result)
    reduces = writes and add and dtypes[1] == torch.float32
    output = parts[0].result
    added = (output.tensor, output.stride) if add and count == 1 else (None, 1)
    flags = (count, segments, left.transposed, right.transposed, reads, writes, add, reduces)
    late = matmul_tile.late_start(tile, max(map(sum, rows)), device)
    arguments = (*columns(slots), *columns(targets), *strides, *added, *late)
    sizes = (tile.m, tile.n, tile.k, tile.group, tile.epilogue_parts(writes))
    kernel = _over_rows if op == "wgrad" else _of_rows
    kernel(programs, arguments, (*flags, precision(dtypes[0]), *sizes), tile.warps, tile.stages)


def columns(entries: Sequence[tuple]) -> list[Any]:
    """The kernel's arguments: all first values, then all second values, SLOTS of each."""
    padding = [None] * (SLOTS - len(entries))
    arguments: list[Any] = []
    for column in zip(*entries, strict=True):
        arguments += column
        arguments += padding
    return arguments


def _power_of_2(count: int) -> int:
    """The next one; Triton's own, which kernels can call, takes 12 us."""
    return 1 << (count - 1).bit_length()
