"""Attention in Triton: the forward, and what both directions share. Contract: spec.py.

Scores are never in memory: a program keeps its rows' running maximum and sum (Dao, FlashAttention-2, arXiv 2307.08691).
Which keys a tile of queries must look at is three ranges of blocks: the middle one, nearly all of the work, is seen
whole and needs no mask.
"""

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zbkern.kernels import tiles
from zbkern.kernels.spec import AttentionOptions, largest_head
from zbkern.kernels.triton.attention_tiles import one_length, place, place_tiles
from zbkern.kernels.triton.common import Kernel, capped, dot
from zbkern.kernels.triton.matmul_tile import capability_of, precision

LOG2_E = math.log2(math.e)

COMPILER: tuple[int, int] = tuple(map(int, triton.__version__.split(".")[:2]))  # type: ignore[assignment]
"""Triton's version."""

LENGTHS = ["queries", "keys"]
"""Arguments that are never compiled in. Of a sequence of one key LLVM would know which operands of a product are 0, and
write such registers while the product before still reads them, or behind wgmma.fence."""

_MOST_ROWS = 128  # of a tile, whose offsets have 32 bits

_LN_2 = tl.constexpr(math.log(2))
_LOG2_E = tl.constexpr(LOG2_E)


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    y: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
) -> None:
    tokens, heads, size = q.shape
    if y.numel() == 0 or k.numel() == 0:
        y.zero_()
        lse.copy_(sinks.unsqueeze(1).expand_as(lse)) if sinks is not None else lse.fill_(-math.inf)
        return
    check_head_sizes(q, v)
    q, k, v, out = regular(q), regular(k), regular(v), regular(y, copy=False)
    q, exponent, bend = positive(q, options)
    tile = tile_of("fwd", q, v, options)
    places, grid, sequences = place_tiles(options, "queries", tile.queries, q, k)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2])
    streamed = describe((k, v), sequences, tile.keys)
    numbers = (options.window, exponent, bend, tokens, heads // k.shape[1])
    arguments = (q, *streamed, out, lse, sinks, *places, *numbers, *strides)
    sizes = (options.causal, *head_constants(size, v.shape[2]), tile.queries, tile.keys)
    constants = (*sizes, precision(q.dtype), streamed[0] is not k)
    _forward((grid, heads), arguments, constants, warps=tile.warps, stages=tile.stages)
    if out is not y:
        y.copy_(out)


def positive(factor: Tensor, options: AttentionOptions) -> tuple[Tensor, float, float | None]:
    """(a factor of the scores, log2(e) times their scale, bend), so that the scale is positive and the scores the same.

    A negative one would turn the largest score into the smallest, and zero would turn -inf into nan. bend: with a soft
    cap, what is multiplied by that scale is tanh(bend q k^T).
    """
    scale = options.scale
    if options.softcap is not None:
        return factor, options.softcap * LOG2_E, scale / options.softcap
    if scale > 0:
        return factor, scale * LOG2_E, None
    return factor * (-1 if scale else 0), (-scale or 1.0) * LOG2_E, None


def tile_of(launch: str, q: Tensor, v: Tensor, options: AttentionOptions) -> tiles.AttentionTile:
    """The tile of "fwd", "dq" or "dkdv"."""
    packed = one_length(options) is None
    dtype = str(q.dtype).removeprefix("torch.")
    size, capped = max(q.shape[2], v.shape[2]), options.softcap is not None
    return tiles.attention(launch, size, dtype, capability_of(q.device), packed, capped, COMPILER)


def check_head_sizes(q: Tensor, v: Tensor) -> None:
    size, limit = max(q.shape[2], v.shape[2]), largest_head(q.dtype)
    if size > limit:
        raise ValueError(
            f"attention: the Triton kernels take heads of up to {limit} in {q.dtype}; got {size}; use impl='torch'"
        )


def head_constants(size: int, value_size: int) -> tuple[int, int, int, int]:
    """D and SIZE of queries and keys, and of values."""
    return size, size_block(size), value_size, size_block(value_size)


def size_block(size: int) -> int:
    """The head size as the kernels see it: a power of two, the rest masked."""
    return max(16, triton.next_power_of_2(size))


def regular(tensor: Tensor, copy: bool = True) -> Tensor:
    """The tensor itself where heads begin at multiples of 16 elements, which is what Triton can know, and the rows of a
    tile lie within 2^31 elements; else a copy of which that is so (or, without `copy`, memory for one). One element at
    a time nothing is copied ahead, and registers spill."""
    row, head, inner = tensor.stride()
    aligned = inner == 1 and tensor.data_ptr() % 16 == 0 and all(s > 0 and s % 16 == 0 for s in (row, head))
    if aligned and row * _MOST_ROWS < 2**31:
        return tensor
    tokens, heads, size = tensor.shape
    new = tensor.new_empty(tokens, heads, triton.cdiv(size, 16) * 16)[..., :size]
    return new.copy_(tensor) if copy else new


def describe(tensors: tuple[Tensor, ...], sequences: int, rows: int) -> tuple[Tensor | TensorDescriptor, ...]:
    """Descriptors that load blocks of so many rows of one head by TMA; the tensors themselves before 9.0.

    Of [sequences, length, heads, D]: where all have one length, no block reads into the next sequence.
    """
    if capability_of(tensors[0].device) < 90:
        return tensors
    descriptors = []
    for tensor in tensors:
        tokens, heads, size = tensor.shape
        row, head, _ = tensor.stride()
        shape = [sequences, tokens // sequences, heads, size]
        strides = [shape[1] * row, row, head, 1]
        descriptors.append(TensorDescriptor(tensor, shape, strides, [1, rows, 1, size_block(size)]))
    return tuple(descriptors)


@triton.jit
def rows_of(base, sequence, first, length, head, row, head_stride, TMA: tl.constexpr):
    """Where the rows of one head of one sequence begin; a descriptor finds that by itself."""
    if TMA:
        return base
    else:
        return base + (tl.cast(sequence, tl.int64) * length + first) * row + tl.cast(head, tl.int64) * head_stride


@triton.jit
def load_rows(
    base, sequence, first, head, start, length, stride,
    ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, CLEAN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[ROWS, SIZE] from row `start` of a head [length, D], 0 beyond.

    base: the head's first row (`rows_of`), or a descriptor of [sequences, length, heads, D]. Where a table has all
    sequences in one, a descriptor reads on into the next; CLEAN leaves out what it finds there.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    if TMA:
        value = base.load([sequence, first + start, head, 0]).reshape(ROWS, SIZE)
        return tl.where(row < length - start, value, 0.0) if CLEAN else value
    else:
        pointers = base + tl.cast(start, tl.int64) * stride + row * stride + column
        mask = row < length - start
        return tl.load(pointers, mask & (column < D) if D < SIZE else mask, other=0)


@triton.jit
def store_rows(base, start, length, stride, value, ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    """Writes value [ROWS, SIZE] from row `start` of base [length, D], as far as that goes."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    pointers = base + tl.cast(start, tl.int64) * stride + row * stride + column
    tl.store(pointers, value.to(base.dtype.element_ty), (row < length - start) & (column < D))


@triton.jit
def key_ranges(first, queries, keys, window, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """(start, whole, partial, stop): the tile's queries see keys start..stop, all of them see whole..partial.

    `start` is a multiple of KEYS. Only the queries that exist count.
    """
    shift = keys - queries
    last = tl.minimum(first + QUERIES, queries) - 1
    start, whole, partial, stop = first * 0, first * 0, first * 0 + keys, first * 0 + keys
    if CAUSAL:
        stop = tl.maximum(tl.minimum(keys, last + shift + 1), 0)
        partial = tl.minimum(keys, first + shift + 1)
        if window is not None:
            start = tl.maximum(first + shift - window + 1, 0) // KEYS * KEYS
            whole = last + shift - window + 1
    return start, whole, partial, stop


@triton.jit
def sees(query, key, queries, keys, window, CAUSAL: tl.constexpr):
    """Where that query may look at that key, both counted within their sequence; the sequences' ends are lined up."""
    seen = key < keys
    if CAUSAL:
        last = query + (keys - queries)
        seen = seen & (key <= last)
        if window is not None:
            seen = seen & (key > last - window)
    return seen


@Kernel
@triton.jit(do_not_specialize=LENGTHS)
def _forward(
    q, k, v, y, lse, sinks, table, queries, keys, blocks, window, exponent, bend, tokens, group,
    q_row, q_head, k_row, k_head, v_row, v_head, y_row, y_head,
    CAUSAL: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, V_D: tl.constexpr, V_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """y = softmax(cap(scale q k^T) + mask) v and lse; q [T, Hq, D], k [T', Hk, D], v [T', Hk, V_D], y [T, Hq, V_D],
    lse [Hq, T]; sinks [Hq] or None: one more score, of a value that is 0.

    One program: QUERIES rows of one head against all keys they see. Programs of one head follow each other, so that
    its keys and values stay in the L2 cache. One loop over blocks, in which a BRANCH masks what needs a mask: one after
    the other for whole and partial blocks would keep the accumulators of each apart, and spill. Around large heads'
    scores it makes ptxas wait for every product (the report looks): there, except in packed sequences, all blocks are
    masked.
    """
    sequence, q_first, queries, k_first, keys, first, _ = place(table, queries, keys, blocks, QUERIES, CAUSAL)
    head = tl.program_id(1)
    q = rows_of(q, sequence, q_first, queries, head, q_row, q_head, False)
    y = rows_of(y, sequence, q_first, queries, head, y_row, y_head, False)
    k = rows_of(k, sequence, k_first, keys, head // group, k_row, k_head, TMA)
    v = rows_of(v, sequence, k_first, keys, head // group, v_row, v_head, TMA)
    held = load_rows(q, sequence, q_first, head, first, queries, q_row, QUERIES, D, SIZE, False, False)
    query = first + tl.arange(0, QUERIES)
    total = tl.zeros([QUERIES, V_SIZE], tl.float32)
    sums = tl.zeros([QUERIES], tl.float32)
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    start, whole, partial, stop = key_ranges(first, queries, keys, window, CAUSAL, QUERIES, KEYS)
    APART: tl.constexpr = TMA and table is not None  # a descriptor reads on into the next sequence
    BRANCH: tl.constexpr = (SIZE <= 128 and V_SIZE <= 128) or table is not None
    until = tl.minimum(stop, keys // KEYS * KEYS) if APART else stop
    for TAIL in tl.static_range(2 if APART else 1):
        begin, end = (tl.maximum(start, until), stop) if TAIL else (start, until)
        for block in tl.range(begin, end, KEYS):
            some_k = load_rows(k, sequence, k_first, head // group, block, keys, k_row, KEYS, D, SIZE, False, TMA)
            scores = capped(dot(held, tl.trans(some_k), tl.zeros([QUERIES, KEYS], tl.float32), PRECISION), bend)
            if not BRANCH or (block < whole) | (block + KEYS > partial):
                key = (block + tl.arange(0, KEYS))[None, :]
                scores = tl.where(sees(query[:, None], key, queries, keys, window, CAUSAL), scores, float("-inf"))
            higher = tl.maximum(largest, tl.max(scores, 1))
            # A query that has seen nothing yet: -inf - -inf would be nan.
            level = tl.where(higher == float("-inf"), 0.0, higher * exponent)
            weights = tl.exp2(scores * exponent - level[:, None])
            shrink = tl.exp2(largest * exponent - level)
            sums = sums * shrink + tl.sum(weights, 1)
            CLEAN: tl.constexpr = TAIL == 1
            some_v = load_rows(v, sequence, k_first, head // group, block, keys, v_row, KEYS, V_D, V_SIZE, CLEAN, TMA)
            total = dot(weights.to(some_v.dtype), some_v, total * shrink[:, None], PRECISION)
            largest = higher
    level = largest * exponent
    if sinks is not None:
        sink = tl.load(sinks + head) * _LOG2_E
        highest = tl.maximum(level, sink)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(level - highest)
        total, sums, level = total * shrink[:, None], sums * shrink + tl.exp2(sink - highest), highest
    some = sums != 0
    total = total / tl.where(some, sums, 1.0)[:, None]
    store_rows(y, first, queries, y_row, total, QUERIES, V_D, V_SIZE)
    log_sum = tl.where(some, (level + tl.log2(tl.where(some, sums, 1.0))) * _LN_2, float("-inf"))
    places = tl.cast(head, tl.int64) * tokens + sequence * queries + q_first + query
    tl.store(lse + places, log_sum, query < queries)
