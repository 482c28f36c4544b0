"""The inputs of a probe: the library's own, of the kinds that a call has, with tokens that differ and some that recur.

Numbers that may be looked up in a table are ones that the call has, or that every embedding of the module has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.slices.sliced_batch import ENDS, OWN_ENDS
from zbkern.pipeline.transport.tensors import local_part, tensors_in

LONGEST = {"max_length_q", "max_length_k"}  # of a pack's sequences, as models of the transformers library take them
ROWS = 4  # at most
_DISTINCT = 64  # numbers of a table, at most


class Call(NamedTuple):
    """What a chunk is called with: inputs and side inputs, of so many tokens, in sequences of so many in all."""

    inputs: Any
    side: Mapping[str, Any]
    tokens: int
    total: int

    @property
    def rows(self) -> int:
        """At least 1: a rank without tokens of its own makes the probe that the others of its group make."""
        return next((max(1, len(leaf)) for leaf in tensors_in((self.inputs, dict(self.side))) if leaf.dim() > 1), 1)

    def by_name(self) -> dict[str, Any]:
        return {**(self.inputs if isinstance(self.inputs, dict) else {}), **self.side}

    def has_mask(self) -> bool:
        """Whether rows may be padded."""
        named = self.by_name().get("attention_mask")
        return any(
            leaf is named or leaf.dtype is torch.bool
            for leaf in tensors_in((self.inputs, dict(self.side)))
            if self.is_cut(leaf) and leaf.dim() == 2
        )

    def is_cut(self, leaf: Any) -> bool:
        """Whether it is of the call's tokens."""
        return isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == self.tokens

    def kind(self) -> tuple[object, ...]:
        """What a probe proves goes for all calls of this kind."""
        named = {name: None if name in LONGEST else value for name, value in self.side.items()}
        leaves, structure = pytree.tree_flatten_with_path((self.inputs, named))
        return (
            str(structure),
            has_other_numbers(self.by_name().get("attention_mask")),
            *(
                (leaf.dtype, leaf.dim(), self.is_cut(leaf), leaf.requires_grad, kind_of(leaf))
                if isinstance(leaf, Tensor)
                else kind_of(leaf)
                for _, leaf in leaves
            ),
        )

    def tells_tokens_apart(self, module: nn.Module) -> bool:
        """Whether its probe has tokens that differ: floating-point numbers, or several that can be looked up."""
        given = [leaf for leaf in tensors_in(self.inputs) if self.is_cut(leaf)]
        given = given or [leaf for leaf in tensors_in(dict(self.side)) if self.is_cut(leaf)]
        return any(leaf.is_floating_point() or len(_values(leaf, module)) > 1 for leaf in given) or not given


def kind_of(value: Any) -> object:
    """What an argument says that is no data: its type, a name or a truth, and of a number whether it is zero."""
    if isinstance(value, str | bool | None):
        return value
    is_number = type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu"  # no wait for a GPU
    return type(value).__name__, bool(value) if is_number or isinstance(value, int | float) else None


def has_other_numbers(mask: Any) -> bool:
    """Whether a mask has others than 0 and 1, as counts and the numbers of segments are; not asked of a GPU."""
    is_read = type(mask) is Tensor and mask.dtype is not torch.bool and mask.device.type == "cpu"
    return is_read and bool(((mask != 0) & (mask != 1)).any())


class Draw(NamedTuple):
    """How inputs are drawn. resampled: floating-point ones from the call's own, for what takes no others. shrinks:
    other dimensions as long as the sequence are the probe's length, too. recurs: many tokens are one, as words recur,
    and more alike than an expert with a capacity takes; else as many differ as can. number: of other tokens. rows: at
    most so many."""

    resampled: bool = False
    shrinks: bool = False
    recurs: bool = True
    number: int = 0
    rows: int = ROWS


def drawn_inputs(
    call: Call, module: nn.Module, count: int, draw: Draw, counted: Tensor | None = None, sequences: Sequence[int] = ()
) -> tuple[Any, dict[str, Any]]:
    """Inputs and side inputs of `count` tokens. counted: [rows, tokens], what is no padding. sequences: the lengths of
    those that are packed into a row, in the place of one."""
    generator = torch.Generator().manual_seed(11 + count + 1_000 * draw.number)
    rows = min(call.rows, draw.rows)
    masked = counted if counted is not None else torch.ones(rows, count, dtype=torch.bool)
    names = {id(value): name for name, value in call.by_name().items()}

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = names.get(id(leaf))
        if name == "position_ids" and call.is_cut(leaf):
            return _positions(leaf, masked if counted is not None else None, sequences or [count], rows)
        if not call.is_cut(leaf):
            return _narrowed(leaf.detach(), call, rows, count, draw)
        shape = [max(1, min(len(leaf), rows)), count, *leaf.shape[2:]]
        if draw.shrinks:
            shape[2:] = [count if size == call.total else size for size in shape[2:]]
        if name == "attention_mask" or leaf.dtype is torch.bool:
            return _mask(leaf, shape, masked)
        if type(leaf) is not Tensor:
            return leaf.detach()[:rows, torch.arange(count) % call.tokens].requires_grad_(leaf.requires_grad)
        if leaf.is_floating_point() or leaf.is_complex():
            made = _floating(leaf, shape, generator, draw.resampled)
        else:
            values = _values(leaf, module)
            some = values[torch.randperm(len(values), generator=generator)[: max(2, count // (1 + draw.recurs))]]
            steps = torch.randint(1, max(2, len(some)), shape, generator=generator)
            if not draw.recurs:
                steps[:, 1:] = 1
            made = some[steps.cumsum(1) % len(some)]  # neighbours differ
        for half in made.tensor_split(2, 1) if draw.recurs else ():
            half[:, ::2] = half[:1, :1].clone()
        return made.to(leaf).requires_grad_(leaf.requires_grad)

    inputs, side = pytree.tree_map(drawn, (call.inputs, dict(call.side)))
    return inputs, {name: value for name, value in side.items() if name not in ENDS | LONGEST}


def of_sequences(call: Call, lengths: Sequence[int], rows_are_packs: bool, rows: int = ROWS) -> dict[str, Any]:
    """The side inputs that tell of sequences, for those of these lengths in a row.

    rows_are_packs: False for a sequence by itself, which has none of the names by which models of the transformers
    library are told of packs.
    """
    sides: dict[str, Any] = {}
    for name, value in call.by_name().items():
        if name == "position_ids" and isinstance(value, Tensor):
            sides[name] = _positions(value, None, lengths, rows)
        elif name == OWN_ENDS or (name in ENDS and rows_are_packs):
            sides[name] = torch.as_tensor(value).new_tensor([*accumulate(lengths, initial=0)])
        elif name in LONGEST and rows_are_packs:
            sides[name] = max(lengths)
    return sides


def padding(rows: int, count: int, first: int) -> Tensor:
    """[rows, tokens]: padding on both sides of some rows, and in all of the first part and more in others."""
    counted = torch.zeros(rows, count, dtype=torch.bool)
    for row in range(rows):
        begin, end = (min(2, first), max(count - 2, first + 1)) if row % 2 == 0 else (min(first + 1, count - 1), count)
        counted[row, begin:end] = True
    return counted


def _positions(like: Tensor, counted: Tensor | None, lengths: Sequence[int], rows: int) -> Tensor:
    if counted is not None:
        return (counted.long().cumsum(1) - 1).clamp_min(0).to(like)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return positions.to(like).expand(min(len(like), rows), *like.shape[1:-1], len(positions))


def _mask(like: Tensor, shape: Sequence[int], counted: Tensor) -> Tensor:
    """What the call's mask has most, and the opposite for padding; or its numbers, where it has others than these."""
    kept = like.detach().float().mean().item() >= 0.5 if like.dtype is torch.bool else True
    mask = counted[: shape[0]] if kept else ~counted[: shape[0]]
    if like.dtype is not torch.bool:
        mask = _numbered(local_part(like.detach()).unique().cpu(), mask)
    return mask.view(*mask.shape, *[1] * (len(shape) - 2)).expand(shape).to(like)


def _numbered(numbers: Tensor, counted: Tensor) -> Tensor:
    """A mask of the numbers that a call's has, and 1, in rising order; its least is padding's where that is below 1."""
    padding = numbers[:1].clamp_max(0) if len(numbers) else torch.zeros(1)
    kept = numbers[numbers != padding]
    kept = torch.cat([kept, torch.ones(1).to(kept)]).unique()  # slices before may have had it
    places = torch.arange(counted.shape[1]) * len(kept) // counted.shape[1]
    return torch.where(counted, kept[places], padding)


def _floating(like: Tensor, shape: Sequence[int], generator: torch.Generator, resampled: bool) -> Tensor:
    values = local_part(like.detach()).cpu()
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    if resampled and values.numel():
        tokens = values.to(wide).flatten(0, 1)
        some = tokens[torch.randint(len(tokens), (shape[0] * shape[1],), generator=generator)]
        return some.view(shape) * (1 + 0.1 * torch.rand(shape, generator=generator, dtype=wide))
    numbers = (values.abs() if values.is_complex() else values).to(wide)
    size = numbers[torch.isfinite(numbers)].square().mean().sqrt().item()
    return torch.randn(shape, generator=generator, dtype=wide) * (size if 0 < size < float("inf") else 1.0)


def _narrowed(leaf: Tensor, call: Call, rows: int, count: int, draw: Draw) -> Tensor:
    """A tensor that is not of single tokens."""
    if leaf.dim() and len(leaf) == call.rows > rows:
        leaf = leaf[:rows]
    if draw.shrinks:
        for dim, size in enumerate(leaf.shape):
            if dim and size == call.total:
                leaf = leaf.narrow(dim, 0, count)
    return leaf


def _values(leaf: Tensor, module: nn.Module) -> Tensor:
    """Different numbers that may stand in the place of these."""
    own = local_part(leaf.detach()).unique().cpu()
    if len(own) >= _DISTINCT // 4:
        return own
    sizes = [getattr(part, "num_embeddings", None) for part in module.modules()]
    tables = [size for size in sizes if isinstance(size, int)]
    more = torch.arange(min([*tables, _DISTINCT]) if tables else 0, dtype=own.dtype)
    return torch.cat([own, more]).unique()
