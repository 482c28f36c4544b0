"""Which rank is where: the order of the groups that ranks form, which costs and programs have in common."""

from __future__ import annotations

ORDER = ("stage", "replica", "context", "tensor")
"""The dimensions of a mesh of all ranks. Those of the last are neighbours, in one node; they send most."""


def in_a_node(gpus_per_node: int, inside: int) -> float:
    """How many ranks of a group are in one node, where so many ranks are between two neighbours of it: those of the
    groups behind it in `ORDER`."""
    return max(1.0, gpus_per_node / inside)


def mesh(sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of a mesh in this order."""
    return {name: sizes[name] for name in ORDER if name in sizes}
