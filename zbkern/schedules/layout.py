"""Partitions as Megatron-LM writes them: `E|t*3|(tt|)*29,m|L`, and back.

A letter is a layer: E the embedding, t a block, m a block of multi-token prediction, L what comes after the blocks:
norm, head and loss, which stay together. `|` ends a chunk, `*3` repeats the letter or the brackets before it, and
commas and spaces mean nothing. A partition is the first layer of every chunk, beginning with 0; 4.5 is the second half
of layer 4, its MLP, which layouts do not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

LETTERS = "EtmL"
HALVES = (":attention", ":mlp")
"""What the names of a block's halves end in, where these are layers of their own."""


def numbers_of(names: Iterable[str]) -> list[float]:
    """What partitions have for the layers of these names, in model order: 0, 1, and 1.5 for the second half of 1."""
    numbers: list[float] = []
    for name in names:
        numbers.append(numbers[-1] + 0.5 if numbers and name.endswith(HALVES[1]) else int(max(numbers, default=-1)) + 1)
    return numbers


def layer_of(name: str) -> str:
    """The layer of which this is the name, or that of a half."""
    return name.removesuffix(HALVES[0]).removesuffix(HALVES[1])


def layout_to_partition(layout: str, layers: str) -> tuple[int, ...]:
    """The partition that `layout` describes, for a model whose layers have these letters, as in "EttttLL".

    Raises ValueError for what is no layout, or one of other layers.
    """
    _check_letters("layout_to_partition", layers)
    chunks = _expand(layout).split("|")
    if empty := [number for number, chunk in enumerate(chunks) if not chunk]:
        raise ValueError(
            f"layout_to_partition: every chunk must have a layer; got none in chunk {empty[0]} of {layout!r}"
        )
    one_tail = layers.rstrip("L") + ("L" if layers.endswith("L") else "")  # L is all of what follows the blocks
    if (got := "".join(chunks)) != one_tail:
        raise ValueError(
            f"layout_to_partition: layout must have the model's layers, {_runs(one_tail)!r}; got {_runs(got)!r} "
            f"in {layout!r}"
        )
    firsts, layer = [], 0
    for chunk in chunks:
        firsts.append(layer)
        layer += len(chunk)
    return tuple(firsts)


def partition_to_layout(partition: Sequence[float], layers: str) -> str:
    """The layout of a partition of a model whose layers have these letters.

    Raises ValueError for what is no partition of them, and where layers after the blocks are in several chunks.
    """
    _check_letters("partition_to_layout", layers)
    starts = check_partition("partition_to_layout", partition, len(layers))
    if halves := [first for first in starts if isinstance(first, float)]:
        raise ValueError(f"partition_to_layout: a layout has whole layers; got one that begins within one: {halves[0]}")
    tail = len(layers.rstrip("L"))
    if any(first > tail for first in starts):
        raise ValueError(
            f"partition_to_layout: a layout has norm, head and loss in one chunk; got one that begins at layer "
            f"{max(starts)}, after the first of them, {tail}"
        )
    chunks = [re.sub("L+$", "L", layers[first:end]) for first, end in pairwise([*map(int, starts), len(layers)])]
    *others, last = map(_runs, chunks)
    groups = [(chunk, len(list(same))) for chunk, same in groupby(others)]
    return "".join(f"({chunk}|)*{count}" if count > 1 else f"{chunk}|" for chunk, count in groups) + last


def check_partition(caller: str, partition: Sequence[float], layers: int) -> list[float]:
    """A partition of this many layers: ints, and floats for halves. Raises TypeError or ValueError for what is none."""
    listed = not isinstance(partition, str) and isinstance(partition, Sequence)
    if not listed or not all(type(each) in (int, float) and 2 * each % 1 == 0 for each in partition):
        raise TypeError(
            f"{caller}: partition must be the first layer of every chunk, whole numbers, or 4.5 for the second half of "
            f"layer 4; got {partition!r}"
        )
    if not partition or partition[0] != 0 or any(a >= b for a, b in pairwise(partition)) or partition[-1] >= layers:
        raise ValueError(
            f"{caller}: partition must begin with 0 and rise, and stay below the {layers} layers of the model; "
            f"got {list(partition)}"
        )
    return [each if each % 1 else int(each) for each in partition]


def _check_letters(caller: str, layers: str) -> None:
    if not isinstance(layers, str) or not layers or set(layers) - set(LETTERS):
        raise ValueError(
            f"{caller}: layers must be a letter of {LETTERS!r} for every layer of the model; got {layers!r}"
        )


def _expand(layout: str) -> str:
    """Without repetitions, commas and spaces."""
    plain = re.sub(r"[,\s]", "", layout)
    while match := re.search(rf"(?:([{LETTERS}|])|\(([{LETTERS}|]*)\))\*(\d+)|\(([{LETTERS}|]*)\)(?!\*)", plain):
        once = match[1] or match[2] or match[4] or ""
        plain = plain[: match.start()] + once * int(match[3] or 1) + plain[match.end() :]
    if wrong := re.search(rf"[^{LETTERS}|]", plain):
        raise ValueError(
            f"layout_to_partition: layout must be made of {LETTERS!r}, '|', '*' and a number, and brackets in pairs; "
            f"got {wrong[0]!r} in {layout!r}"
        )
    return plain


def _runs(letters: str) -> str:
    """ "ttt" as "t*3"."""
    counted = ((letter, len(list(same))) for letter, same in groupby(letters))
    return "".join(letter * count if count < 3 else f"{letter}*{count}" for letter, count in counted)
