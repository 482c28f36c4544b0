"""What models of the transformers library take from the length of a whole sequence, in slices and in packs.

Rotary frequencies of longrope and of dynamic NTK are others beyond a limit, and so is Doge's mask. The library reads a
length from the largest position that it sees: that of a slice, or of the longest sequence packed into a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class _Limit(NamedTuple):
    """A length beyond which sequences are computed in another way.

    Longrope has one way for all that are longer, dynamic NTK and masks one for each length. is_told: whether its module
    is told the length of the sequence of a slice.
    """

    kind: str
    tokens: int
    is_told: bool = False

    def differs_in_packs(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of these lengths are computed in another way together than each alone."""
        if max(lengths) <= self.tokens:
            return False
        one_way = min(lengths) > self.tokens if self.kind == "longrope" else min(lengths) == max(lengths)
        return self.kind == "mask" or not one_way

    def differs_in_slices(self, carry: Any) -> bool:
        """Whether a slice, or an earlier one of its sequence, is computed in another way than all of it."""
        if self.kind == "longrope":
            return not (self.is_told and carry.length) and carry._place[0][1] <= self.tokens < carry.end
        return max(carry.length or 0, carry.end) > self.tokens


class WholeLengths:
    """The limits of a model; and hooks that tell its rotary embeddings how long the sequence of a slice is."""

    def __init__(self, whole: Any, layers: Iterable[str]) -> None:
        self._name, self._length = type(whole).__name__, 0
        self._limits: list[_Limit] = []
        for name, module in whole.named_modules():
            is_beside = not any(name.startswith(f"{layer}.") for layer in layers)  # else a checkpoint runs it again
            if limits := [*_limits_of_rotary(module, is_beside)]:
                self._limits += limits
                module.register_forward_pre_hook(self._lengthen, with_kwargs=True)
                module.register_forward_hook(self._shorten)
        if (window := getattr(whole.config, "keep_window_size", None)) is not None:
            self._limits.append(_Limit("mask", window))

    def begin(self, side: dict[str, Any], carry: Any) -> dict[str, Any]:
        """Before a forward. Raises ValueError where it would compute a sequence in another way than a whole one."""
        self._length = 0
        found: _Limit | None = None
        positions: Any = side.get("position_ids")
        if not self._limits:
            return side
        if carry is not None and (positions is None or _count_on(positions, carry)):
            found = next((limit for limit in self._limits if limit.differs_in_slices(carry)), None)
            self._length = carry.length or 0
        elif carry is not None:  # a pack's, say, of which other slices have the rest
            found = next((limit for limit in self._limits if int(positions.max()) >= limit.tokens), None)
        elif lengths := _lengths_of_pack(positions, side.get("attention_mask")):
            found = next((limit for limit in self._limits if limit.differs_in_packs(lengths)), None)
        if found is not None:
            what = "another mask" if found.kind == "mask" else f"other rotary frequencies ({found.kind})"
            raise ValueError(
                f"cut: {self._name} has {what} for sequences of more than {found.tokens} tokens, by the length of the "
                f"whole sequence, which {'slices' if carry is not None else 'packed sequences'} do not show: give "
                "whole sequences, one in a row, or shorter ones"
            )
        return side

    def end(self) -> None:
        self._length = 0

    def _lengthen(self, module: nn.Module, inputs: Any, keywords: Any) -> Any:
        """With one position more, the sequence's last."""
        if not self._length:
            return None
        positions = keywords["position_ids"] if "position_ids" in keywords else inputs[1]
        last = positions.new_full((*positions.shape[:-1], 1), self._length - 1)
        longer = torch.cat([positions, last], -1)
        if "position_ids" in keywords:
            return inputs, {**keywords, "position_ids": longer}
        return (inputs[0], longer, *inputs[2:]), keywords

    def _shorten(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self._length:
            return output
        return pytree.tree_map_only(Tensor, lambda tensor: tensor[..., :-1, :], output)


def _limits_of_rotary(module: nn.Module, is_told: bool) -> Iterator[_Limit]:
    """Those of a rotary embedding of the library, which may have a kind for each kind of layer."""
    kinds = getattr(module, "rope_type", None)
    settings = getattr(getattr(module, "config", None), "rope_parameters", None)
    if kinds is None or settings is None:
        return
    for name, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        own = settings if name is None else settings[name]
        if kind == "longrope":
            yield _Limit(kind, own["original_max_position_embeddings"], is_told)
        elif isinstance(kind, str) and "dynamic" in kind:
            yield _Limit("dynamic", module.original_max_seq_len)  # type: ignore[arg-type]


def _count_on(positions: Tensor, carry: Any) -> bool:
    """Whether the positions of a slice are those of its tokens in each row, as the library counts them itself."""
    return positions.shape[-1] == carry.end - carry.start and bool(
        (positions == torch.arange(carry.start, carry.end, device=positions.device)).all()
    )


def _lengths_of_pack(positions: Any, mask: Any) -> list[int]:
    """Of the sequences in rows whose positions begin anew; none where none do. One token has nothing to be far from."""
    if mask is not None or not isinstance(positions, Tensor) or positions.dim() != 2:
        return []
    ends = nn.functional.pad(positions[:, 1:] <= positions[:, :-1], (0, 1), value=True)
    if int(ends.sum()) == len(positions):
        return []
    return [length for length in (positions[ends] + 1).tolist() if length > 1]
