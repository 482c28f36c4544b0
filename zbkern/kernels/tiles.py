"""How a matrix product or attention is cut into tiles: pure functions of shape, dtype and GPU.

`bench/tune.py` measures products on a GPU and writes `tiles.json` beside this file, which is preferred to the rules.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True)
class Tile:
    """One program computes [m, n] of the output, k of the reduction at a time, `stages` of these in flight.

    group: tiles are visited in bands of `group` rows, so that neighbours in time share operands in L2. parts: in how
    many the epilogue writes it; 0 for as many as `epilogue_parts` finds. share: how many programs run on one SM at a
    time, each by half a tile later than the one before, so that one multiplies while the other writes.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    parts: int = 0
    share: int = 1

    def epilogue_parts(self, bulk: bool = True) -> int:
        """In how many the epilogue writes it: a part has room in registers beside what it is added to or multiplied by
        (and, without bulk copies, beside addresses), and in shared memory beside the operands in flight."""
        return (self.parts or (2 if self.m * self.n >= 64 * 32 * self.warps else 1)) * (1 if bulk else 2)


SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KB that one block may use, by compute capability (CUDA programming guide)."""

_Rated = tuple[Tile, float, int]  # what a product takes with it: for each term of the reduction, and in terms

# The large tile first: 128x256x64 with 3 stages and 8 warps is what reaches cuBLAS on H100. Each smaller one moves more
# bytes per product (the factor behind it) and is taken when it fills the machine so much better.
_HALF = (
    (Tile(128, 256, 64, warps=8, stages=3), 1.0, 0),
    (Tile(128, 128, 64, warps=8, stages=4), 1.15, 0),
    (Tile(64, 128, 64, warps=4, stages=4), 1.4, 0),
    (Tile(64, 64, 64, warps=4, stages=4), 1.9, 0),
)
# W of one weight on 9.0. Its epilogue adds float32, and takes as long as the last number of terms of the reduction. Six
# stages fetch the next tile meanwhile. The numbers are fitted to both large tiles on an H200, at 1,024, 2,048 and 4,096
# tokens. Weights that share a launch lose by it: 8 experts 10 %, all weights of a layer 7 %.
_HALF_W: tuple[_Rated, ...] = (
    (Tile(128, 256, 64, warps=8, stages=3), 1.0, 610),
    (Tile(128, 128, 64, warps=8, stages=6), 1.11, 260),
    (Tile(64, 128, 64, warps=4, stages=4), 1.4, 260),
    (Tile(64, 64, 64, warps=4, stages=4), 1.9, 260),
)
# float32 takes twice the bytes, and three products of tf32 parts (tf32x3) three times the registers for operands
_SINGLE = (
    (Tile(128, 128, 32, warps=8, stages=3), 1.0, 0),
    (Tile(64, 64, 32, warps=4, stages=3), 1.7, 0),
)
# mma.sync takes both operands from registers: 32 deep, a forward with an activation spills 328 bytes a thread on sm_80
_SINGLE_MMA = ((Tile(128, 128, 16, warps=8, stages=4), 1.0, 0), _SINGLE[1])


def choose(
    op: str,
    p: int,
    q: int,
    r: int,
    dtype: str,
    capability: int,
    num_sms: int,
    bulk: bool = True,
    others: tuple[tuple[int, int], ...] = (),
) -> Tile:
    """The tile for out [p, q] = sum over r, and for `others` [p, q] in the same launch.

    op: "fwd", "dgrad" or "wgrad". dtype: of the inputs, "bfloat16", "float16" or "float32". capability: 90 for 9.0.
    num_sms: how many the GPU has. bulk: all goes by bulk tensor copies (from 9.0 on, where alignment allows); else
    threads compute addresses, and a large tile leaves no registers.
    """
    bulk = bulk and capability >= 90
    measured = table().get(key(op, p, q, r, dtype, capability, 1 + len(others)))
    if measured is not None and bulk and all(other == (p, q) for other in others):
        return measured
    size = 4 if dtype == "float32" else 2
    limit = 1024 * SHARED_MEMORY.get(capability, 99)

    def fits(tile: Tile) -> bool:
        wide = bulk and unit(capability) != "mma"  # mma.sync has operands in registers, too
        return (wide or tile.n < 256) and shared_memory(tile, op, size, capability) <= limit

    def fitted(tile: Tile) -> Tile | None:
        """With as many stages as fit. Two on 10.x, of which one is on its way while a B200 multiplies the other in 510
        cycles, are four of half the depth: then three quarters of the same memory are on their way."""
        fitting = next((t for s in range(tile.stages, 1, -1) if fits(t := replace(tile, stages=s))), None)
        if fitting is not None and fitting.stages == 2 and unit(capability) == "tcgen05":
            return replace(fitting, k=fitting.k // 2, stages=4)
        return fitting

    family: tuple[_Rated, ...]
    if dtype == "float32":
        family = _SINGLE_MMA if unit(capability) == "mma" else _SINGLE
    else:
        alone = op == "wgrad" and unit(capability) == "wgmma" and bulk and not others
        family = _HALF_W if alone else _HALF
    tried = ((fitted(tile), factor, epilogue) for tile, factor, epilogue in family)
    candidates = [(tile, factor, epilogue) for tile, factor, epilogue in tried if tile is not None]
    return min(candidates, key=lambda rated: _cost(rated, ((p, q), *others), r, num_sms))[0]


def _cost(rated: _Rated, shapes: Sequence[Sequence[int]], r: int, num_sms: int) -> float:
    tile, factor, epilogue = rated
    waves = -(-count(tile, *shapes) // num_sms)
    return waves * tile.m * tile.n * (factor * max(r, 1) + epilogue)


def share_a_launch(
    op: str, shapes: Sequence[Sequence[int]], r: int, dtype: str, capability: int, num_sms: int, bulk: bool
) -> bool:
    """Whether outputs of these shapes are as fast in one launch as in one each; arguments as of `choose`.

    W of large layers on 9.0 may be faster apart, where each fills the machine and few terms are summed.
    """
    if op != "wgrad" or dtype == "float32" or unit(capability) != "wgmma" or not bulk:
        return True
    (p, q), *others = ((p, q) for p, q in shapes)
    tile = choose(op, p, q, r, dtype, capability, num_sms, bulk, tuple(others))
    together = next((rated for rated in _HALF_W if (rated[0].m, rated[0].n) == (tile.m, tile.n)), None)
    if together is None:  # of the table, which has it for these outputs together
        return True
    apart = sum(min(_cost(rated, [shape], r, num_sms) for rated in _HALF_W) for shape in shapes)
    return _cost(together, shapes, r, num_sms) <= apart


def unit(capability: int) -> str:
    """The tensor cores there: "mma" reads registers, "wgmma" shared memory, "tcgen05" tensor memory as well."""
    return "wgmma" if capability == 90 else "tcgen05" if 100 <= capability < 120 else "mma"


def count(tile: Tile, *shapes: Sequence[int]) -> int:
    """How many of these tiles cover outputs of these shapes."""
    return sum(-(-p // tile.m) * -(-q // tile.n) for p, q in shapes)


def shared_memory(tile: Tile, op: str, size: int, capability: int) -> int:
    """Bytes for the operands in flight, `size` bytes per element, and for an output that bulk copies take, or that is
    laid out anew for stores.

    mma.sync multiplies out of registers: of its stages one is there. wgrad stages float32: one half after the other, on
    10.x (where the tile comes from tensor memory) both.
    """
    buffers = tile.stages - 1 if unit(capability) == "mma" else tile.stages
    operands = buffers * (tile.m + tile.n) * tile.k * size
    if capability < 90:
        return operands + tile.m * tile.n
    wide = 4 if op == "wgrad" else size
    parts = 1 if unit(capability) == "tcgen05" else tile.epilogue_parts()
    return operands + tile.m * tile.n * wide // parts


@dataclass(frozen=True)
class AttentionTile:
    """queries x keys that one program multiplies at a time: it holds one side and streams the other.

    stages: blocks in flight of what is streamed. split: dk and dv are launches of their own, where both accumulators
    together do not fit into registers; the scores are then computed once more.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    split: bool = False


# By what multiplies matrices: mma.sync before 9.0 (and from 12.0 on), wgmma on 9.0, tcgen05 on 10.x; float32 is three
# products of tf32 parts on all of them. Within each, for heads of up to 64, 128 and 256: the largest of a dozen tries
# that does not spill, with any mask. An accumulator of 128 x 256 is 128 of the 255 registers of a thread: dkdv, which
# has two, is split there where they hold accumulators. Of float32, three parts of a row of 256 do not fit.
_HEADS = (64, 128, 256)
_Row = tuple[Any, ...]  # an AttentionTile
_ATTENTION: dict[tuple[str, str], tuple[_Row, ...]] = {
    ("mma", "fwd"): ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
    ("mma", "dq"): ((128, 64, 8, 3), (128, 32, 8, 2), (64, 32, 8, 2)),
    ("mma", "dkdv"): ((32, 128, 8, 3), (64, 64, 8, 2), (32, 64, 8, 2, True)),
    ("wgmma", "fwd"): ((128, 64, 8, 3), (128, 128, 8, 3), (128, 64, 8, 2)),
    ("wgmma", "dq"): ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2)),
    ("wgmma", "dkdv"): ((64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 2, True)),
    ("tcgen05", "fwd"): ((128, 64, 8, 3), (128, 128, 8, 3), (128, 64, 8, 2)),
    ("tcgen05", "dq"): ((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2)),
    ("tcgen05", "dkdv"): ((64, 128, 8, 3), (64, 128, 8, 2), (32, 64, 8, 2)),
    ("tf32x3", "fwd"): ((32, 16, 4, 2), (32, 16, 4, 2)),
    ("tf32x3", "dq"): ((64, 16, 8, 2), (16, 16, 8, 2)),
    ("tf32x3", "dkdv"): ((16, 16, 4, 2, True), (16, 16, 8, 2, True)),
}
# Where that is not so, the last that applies. "99 KB": of shared memory (8.6, 8.9, 12.x). "12.x": beside bulk copies
# mma.sync has fewer registers than on 8.x. "packed": from 9.0 on, where descriptors read on into the next sequence,
# sequences of different lengths have code for the end of each, and fewer registers left. With Triton 3.9 a forward of
# 128 x 128 spills (9.0, 10.0), as does dq of heads of 64 with 64 keys (10.0), where 3.6 does not. "packed, 3.9": from
# that Triton on, where dk spills with 8 warps; with 3.6 it does with 4. "capped": the derivative of the cap holds a
# second block of scores, and one of 64 keys spills with Triton 3.9.
_ATTENTION_EXCEPT: dict[tuple[str, str, int, str], _Row] = {
    ("mma", "fwd", 64, "packed"): (128, 64, 8, 3),
    ("mma", "dkdv", 64, "99 KB"): (32, 128, 8, 2),
    ("mma", "dkdv", 256, "99 KB"): (16, 64, 4, 2, True),
    ("mma", "dkdv", 256, "99 KB, capped"): (16, 64, 8, 2, True),
    ("mma", "dq", 64, "12.x"): (128, 32, 8, 3),
    ("mma", "dq", 128, "12.x"): (64, 32, 8, 3),
    ("mma", "dq", 256, "packed"): (32, 16, 8, 2),
    ("mma", "dkdv", 64, "packed"): (32, 64, 4, 3),
    ("mma", "dkdv", 256, "packed"): (32, 32, 8, 2, True),
    ("wgmma", "fwd", 128, "packed"): (128, 64, 8, 3),
    ("wgmma", "fwd", 256, "packed"): (64, 64, 8, 2),
    ("wgmma", "dq", 256, "capped"): (64, 32, 8, 2),
    ("wgmma", "dkdv", 128, "packed"): (32, 128, 8, 3),
    ("wgmma", "dkdv", 256, "packed"): (16, 64, 8, 2, True),
    ("wgmma", "dkdv", 256, "packed, 3.9"): (16, 64, 4, 2, True),
    ("tcgen05", "fwd", 64, "packed"): (128, 64, 4, 3),
    ("tcgen05", "fwd", 128, "packed"): (128, 64, 8, 3),
    ("tcgen05", "dq", 64, "packed"): (128, 32, 8, 3),
    ("tcgen05", "dkdv", 256, "packed"): (32, 64, 8, 2, True),
    ("tf32x3", "fwd", 128, "12.x"): (32, 16, 8, 2),
    ("tf32x3", "dq", 64, "packed"): (32, 16, 8, 2),
    ("tf32x3", "dq", 128, "12.x"): (16, 16, 8, 1),
    ("tf32x3", "dkdv", 64, "12.x"): (16, 16, 8, 2, True),
}


def attention(
    launch: str,
    size: int,
    dtype: str,
    capability: int,
    packed: bool = False,
    capped: bool = False,
    compiler: tuple[int, int] = (3, 6),
) -> AttentionTile:
    """The tile of a launch, "fwd", "dq" or "dkdv", for heads of `size` <= 256, of float32 <= 128.

    packed: sequences of different lengths. capped: with soft-capping. compiler: Triton's version. Other arguments as
    `choose`.
    """
    how = "tf32x3" if dtype == "float32" else unit(capability)
    longest = next((longest for longest in _HEADS if size <= longest), size)
    packed = packed and capability >= 90
    narrow = SHARED_MEMORY.get(capability, 99) == 99
    applies = {
        "99 KB": narrow,
        "99 KB, capped": narrow and capped,
        "12.x": capability >= 120,
        "packed": packed,
        "packed, 3.9": packed and compiler >= (3, 9),
        "capped": capped,
    }
    rows = [_ATTENTION_EXCEPT.get((how, launch, longest, case)) for case, holds in applies.items() if holds]
    tile = AttentionTile(*[_ATTENTION[how, launch][_HEADS.index(longest)], *filter(None, rows)][-1])
    streamed = "queries" if launch == "dkdv" else "keys"
    limit = 1024 * SHARED_MEMORY.get(capability, 99)
    while attention_shared_memory(tile, launch, longest, 4 if dtype == "float32" else 2) > limit:
        rows = getattr(tile, streamed)
        fewer = tile.stages > 2 or rows == 16
        tile = replace(tile, stages=tile.stages - 1) if fewer else replace(tile, **{streamed: rows // 2})
    return tile


def attention_shared_memory(tile: AttentionTile, launch: str, size: int, itemsize: int) -> int:
    """Bytes for what a program holds and what is in flight."""
    held, streamed = {
        "fwd": (tile.queries, 2 * tile.keys),
        "dq": (2 * tile.queries, 2 * tile.keys),
        "dkdv": (2 * tile.keys, 2 * tile.queries),
    }[launch]
    return (held + tile.stages * streamed) * size * itemsize


def key(op: str, p: int, q: int, r: int, dtype: str, capability: int, outputs: int = 1) -> str:
    """Shapes within the same powers of two share what was measured. outputs: of that shape, in one launch."""
    shape = f"{p.bit_length()} {q.bit_length()} {r.bit_length()}" + f" x {outputs}" * (outputs > 1)
    return f"sm{capability} {dtype} {op} {shape}"


@functools.cache
def table() -> dict[str, Tile]:
    return {key: Tile(*row) for key, row in json.loads(TABLE.read_text()).items()} if TABLE.exists() else {}
