"""A case: what is compared for a sequence and for its parts, and what a run of either finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from zbkern.pipeline.transport.tensors import tensors_in


class Case(NamedTuple):
    """What is compared. Side inputs of the whole are tried one after the other until it runs.

    lengths: of the parts, in tokens. parts: side inputs of each; None for slices, which have their carries alone.
    counted: [rows, tokens], those that are no padding; None for all. trains: gradients are compared, too.
    keeps_attributes: modules keep theirs from slice to slice, and else begin each as they are. divides: slices get
    equal shares of inputs that are of no tokens, as of a sum that goes from chunk to chunk, and else each the same.
    alike: all tokens are chosen alike; passes: and so many, from the first on, pass what they are compared with.
    may_end: with the whole, where nothing is chosen.
    """

    inputs: Any
    side: Mapping[str, Any]
    lengths: Sequence[int]
    wholes: Sequence[Mapping[str, Any]]
    parts: Sequence[Mapping[str, Any]] | None
    counted: Tensor | None = None
    trains: bool = True
    keeps_attributes: bool = False
    divides: bool = False
    alike: bool = False
    passes: int | None = None
    may_end: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def has_sums(self) -> bool:
        """Whether there are inputs of no tokens."""
        return any(self.is_sum(leaf) for leaf in tensors_in(self.inputs)) and self.parts is None

    def is_sum(self, leaf: Tensor) -> bool:
        return leaf.is_floating_point() and not is_of(leaf, (0, self.tokens))


class Unable(Exception):
    """Why nothing was compared; in_parts: it was one of these that failed."""

    def __init__(self, why: str, in_parts: bool = False) -> None:
        super().__init__(why)
        self.in_parts = in_parts


class Fault(RuntimeError):
    """What a probe itself does has failed, and nothing that the module does: no weaker comparison stands in for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"a probe has failed by a fault of its own ({type(error).__name__}: {error}); please report it, and use a "
            "schedule without slices, and batches without packs (packs=False)"
        )


class Found(NamedTuple):
    """Of a run: outputs of each part, gradients of inputs and of weights, and buffers."""

    outputs: list[list[Tensor]]
    of_inputs: list[Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def is_of(tensor: Tensor, place: tuple[int, int]) -> bool:
    """Whether a tensor is of the tokens of a place, as far as its shape tells."""
    return tensor.dim() > 1 and tensor.shape[1] == place[1] - place[0]
