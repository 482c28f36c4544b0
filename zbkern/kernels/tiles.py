"""How a matrix product is cut into tiles: a pure function of its shape, its dtype and the GPU.

`python -m zbkern.kernels.tiles M N K` prints the choice for the three products of a linear layer. `bench/tune.py`
measures on a GPU and writes `tiles.json` beside this file; what it has measured is preferred to the rules here.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

TABLE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True)
class Tile:
    """One program computes [m, n] of the output, k of the reduction at a time, `stages` of these in flight.

    group: tiles are visited in bands of `group` rows, so that neighbours in time share operands in L2. halves: parts
    in which the epilogue writes the tile, so that it fits into shared memory beside the operands in flight.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8

    @property
    def halves(self) -> int:
        return 2 if self.n >= 256 else 1


SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KB that one block may use, by compute capability (CUDA programming guide)."""

# The large tile first: 128x256x64 with 3 stages and 8 warps is what reaches cuBLAS on H100. Each smaller one moves more
# bytes per product (the factor behind it) and is taken when it fills the machine so much better.
_HALF = (
    (Tile(128, 256, 64, warps=8, stages=3), 1.0),
    (Tile(128, 128, 64, warps=8, stages=4), 1.15),
    (Tile(64, 128, 64, warps=4, stages=4), 1.4),
    (Tile(64, 64, 64, warps=4, stages=4), 1.9),
)
# float32 takes twice the bytes, and three products of tf32 parts (tf32x3) three times the registers for operands
_SINGLE = (
    (Tile(128, 128, 32, warps=8, stages=3), 1.0),
    (Tile(64, 64, 32, warps=4, stages=3), 1.7),
)


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
    num_sms: how many the launch may use, which may be fewer than the GPU has. bulk: operands come by bulk tensor
    copies (from 9.0 on, where alignment allows); else threads compute addresses, and a large tile leaves no registers.
    """
    bulk = bulk and capability >= 90
    measured = table().get(key(op, p, q, r, dtype, capability))
    if measured is not None and bulk and not others:
        return measured
    size = 4 if dtype == "float32" else 2
    limit = 1024 * SHARED_MEMORY.get(capability, 99)

    def cost(candidate: tuple[Tile, float]) -> float:
        tile, factor = candidate
        waves = -(-count(tile, (p, q), *others) // num_sms)
        return waves * tile.m * tile.n * factor

    def fits(tile: Tile) -> bool:
        return (bulk or tile.n < 256) and shared_memory(tile, op, size, capability) <= limit

    candidates = [
        (fitting[0], factor)
        for tile, factor in (_SINGLE if dtype == "float32" else _HALF)
        if (fitting := [t for s in range(tile.stages, 1, -1) if fits(t := replace(tile, stages=s))])
    ]
    return min(candidates, key=cost)[0]


def count(tile: Tile, *shapes: tuple[int, int]) -> int:
    """How many of these tiles cover outputs of these shapes."""
    return sum(-(-p // tile.m) * -(-q // tile.n) for p, q in shapes)


def shared_memory(tile: Tile, op: str, size: int, capability: int) -> int:
    """Bytes for the operands in flight, `size` bytes per element, and for an output that bulk copies take.

    wgrad stages float32: on sm_90 one half after the other, on sm_100 (where the tile comes from tensor memory) both.
    """
    operands = tile.stages * (tile.m + tile.n) * tile.k * size
    if capability < 90:
        return operands
    wide = 4 if op == "wgrad" else size
    parts = 1 if capability >= 100 else tile.halves
    return operands + tile.m * tile.n * wide // parts


def key(op: str, p: int, q: int, r: int, dtype: str, capability: int) -> str:
    """Shapes within the same powers of two share what was measured."""
    return f"sm{capability} {dtype} {op} {p.bit_length()} {q.bit_length()} {r.bit_length()}"


@functools.cache
def table() -> dict[str, Tile]:
    if not TABLE.exists():
        return {}
    return {key: Tile(*values) for key, values in json.loads(TABLE.read_text()).items()}


def main() -> int:
    """Prints the tiles of a linear layer with M rows, N outputs and K inputs."""
    if len(sys.argv) != 4 or not all(argument.isdigit() for argument in sys.argv[1:]):
        print("usage: python -m zbkern.kernels.tiles M N K", file=sys.stderr)
        return 2
    m, n, k = map(int, sys.argv[1:])
    for capability, num_sms in ((80, 108), (90, 132), (100, 148)):
        for dtype in ("bfloat16", "float32"):
            for op, (p, q, r) in {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}.items():
                print(f"sm_{capability} {dtype:<8} {op:<5} {choose(op, p, q, r, dtype, capability, num_sms)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
