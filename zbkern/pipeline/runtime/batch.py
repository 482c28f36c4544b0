"""The batch of a step: split into what each unit is given on this rank, and compared between ranks."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.replicas.tied_weights import digest_of
from zbkern.pipeline.runtime.slices.sliced_batch import (
    LossFn,
    Target,
    adds_up,
    check_takes_packs,
    cut,
    cut_target,
    edges,
    length_of,
    tells_ends,
)
from zbkern.pipeline.transport.tensors import remedy_of_dataclass, tensors_in
from zbkern.schedules.schedule import Schedule

logger = logging.getLogger("zbkern")


class UnitArguments(NamedTuple):
    """What a unit, a microbatch or a slice of one, is given on this rank."""

    inputs: Any
    target: Target | None  # where this rank has the last chunk
    side: dict[str, Any]
    versions: list[tuple[Tensor, int]]  # of the side inputs, as the step began
    tokens: int | None = None  # of a slice, where this rank was given any
    length: int | None = None  # of its sequence, likewise

    def checked_side(self, unit: object) -> Mapping[str, Any]:
        """The side inputs. Raises RuntimeError, which names the unit, where they are not what they were."""
        if self.versions and any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                f"side inputs of {unit}, {sorted(self.side)}, were modified in place by a forward "
                "before; others read them, too: modify a copy"
            )
        return self.side


def split_batch(
    call: str, arguments: tuple[Any, Any, Any], schedule: Schedule, modules: Mapping[int, Any], loss_fn: LossFn | None
) -> list[UnitArguments]:
    """Inputs, targets and side inputs of `call` in units, for this rank's modules, by chunk.

    Raises TypeError or ValueError as `split` does, and for sequences that cannot be cut into slices.
    """
    count, last = schedule.microbatches, len(schedule.placement) - 1
    firsts, sides = _inputs(call, _as_dict(arguments[0]), arguments[2], count, modules)
    if call == "step" and schedule.ranks > 1:
        _check_no_gradients(sides)
    if not isinstance(arguments[0], list) and not isinstance(arguments[2], list):
        _check_rows(call, firsts, sides)
    takes_targets = last in modules and not (call == "forward" and arguments[1] is None)
    targets = split(call, "targets", arguments[1], count) if takes_targets else [None] * count
    if takes_targets:
        if call != "forward" and any(map(tells_ends, sides)):
            check_takes_packs(call, loss_fn)
        targets = [Target(target, 1 / count) for target in targets]
    if not schedule.is_sliced:
        return [UnitArguments(*own, _versions(own[2])) for own in zip(firsts, targets, sides, strict=True)]
    cuts_targets = adds_up(loss_fn) and call != "forward"
    batch: list[UnitArguments] = []
    for number, (first, target, side) in enumerate(zip(firsts, targets, sides, strict=True)):
        whole = [_as_dict(value[number] if isinstance(value, list) else value) for value in arguments]
        if not cuts_targets:
            del whole[1]  # targets of whole sequences may have other lengths
        tokens = length_of(*whole) or 0  # any rank may know; where none does nothing is to be cut
        slices = schedule.slices_of(number)
        if len(slices) == 1:
            batch.append(UnitArguments(first, target, side, _versions(side)))
            continue
        places = edges(f"Pipeline.{call}", tokens, slices) if tokens else [(0, 0)] * len(slices)
        parts = [target] * len(places)
        if target is not None and cuts_targets:
            parts = [Target(part, target.weight) for part in cut_target(call, target.value, tokens, places)]
        for place, part in zip(places, parts, strict=True):
            own = cut(side, tokens, place)
            length = place[1] - place[0] or None
            batch.append(UnitArguments(cut(first, tokens, place), part, own, _versions(own), length, tokens or None))
    return batch


def _check_no_gradients(sides: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for side inputs that take gradients: every rank would have a part of them, of its chunks."""
    for name, value in (item for side in sides for item in side.items()):
        if any(tensor.requires_grad for tensor in tensors_in(value)):
            raise ValueError(
                f"Pipeline.step: side input {name!r} takes a gradient, of which every rank would get the part of its "
                f"own chunks; give chunks the parameter, with tied={{{name!r}: parameter}} on their ranks, or detach it"
            )


def _as_dict(value: Any) -> Any:
    """A mapping, such as the transformers library's, as a dict, which torch looks into; of a list, each."""
    if isinstance(value, list):
        return [_as_dict(part) for part in value]
    return dict(value) if isinstance(value, Mapping) else value


def _check_rows(call: str, inputs: Sequence[Any], sides: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError for side inputs of one row where the microbatch has several: they would go for all of them."""
    rows = max((len(x) for x in tensors_in(inputs[:1]) if x.dim()), default=1)
    single = [name for name, x in sides[0].items() if isinstance(x, Tensor) and x.dim() and len(x) == 1]
    if rows > 1 and single:
        raise ValueError(
            f"Pipeline.{call}: {single} of side must have as many rows as inputs, or be a list of microbatches; "
            f"got one row for the {rows} of a microbatch"
        )


def _versions(side: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
    """The tensors, with a number that grows when one is modified."""
    if not side:  # which a walk would take microseconds to find
        return []
    return [(tensor, tensor._version) for tensor in tensors_in(dict(side)) if not tensor.is_inference()]


def _inputs(
    call: str, inputs: Any, side: Any, count: int, modules: Mapping[int, Any]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Each microbatch's inputs of the first chunk, and side inputs, to which goes what every chunk needs of inputs that
    have names.

    Which that is, modules tell in `split_batch`, as those of `cut` do. Raises as `split` does.
    """
    sides = [{}] * count if side is None else split(call, "side", side, count)
    if side is not None and not all(isinstance(part, Mapping) for part in sides):
        raise TypeError(
            f"Pipeline.{call}: side must be {{name: tensor}}, or a list with one such dict per microbatch, which "
            f"chunks get as keyword arguments; got {type(side).__name__}"
        )
    sides = [*map(dict, sides)]
    splitter = next((module.split_batch for module in modules.values() if hasattr(module, "split_batch")), None)
    parts = inputs if isinstance(inputs, list) else [inputs]
    if splitter is not None and parts and all(isinstance(part, dict) for part in parts):
        firsts, shared = zip(*map(splitter, split(call, "inputs", inputs, count)), strict=True)
        if twice := sorted({name for one, other in zip(sides, shared, strict=True) for name in one if name in other}):
            raise TypeError(f"Pipeline.{call}: {twice} must be in inputs or in side; got both")
        return [*firsts], [{**one, **other} for one, other in zip(sides, shared, strict=True)]
    if inputs is None and any(sides):
        return [()] * count, sides
    return split(call, "inputs", inputs, count) if 0 in modules else [None] * count, sides


def identity(value: Any) -> bytes:
    """A number for what a rank was given, equal for equal tensors; empty where there is nothing to compare."""
    tensors = tensors_in(_as_dict(value))
    return b"".join(digest_of(leaf) or b"" for leaf in tensors if leaf.layout is torch.strided and not leaf.is_nested)


_OF_ONE_RANK = "only those of the rank that needs them count (others may pass None)"
_GIVEN = {"inputs": _OF_ONE_RANK, "targets": _OF_ONE_RANK, "side inputs": "each rank's chunks take its own"}


def check_same_batch(identities: Sequence[Sequence[bytes]], told: Container[str] = ()) -> set[str]:
    """Warns where ranks were given a batch that differs, as by a loader that shards it over all ranks.

    identities: of inputs, targets and side inputs, by rank. No error, since all but one rank's may be anything. Returns
    which of these differ; `told` are those that have before.
    """
    found = set[str]()
    for name, numbers in zip(_GIVEN, zip(*identities, strict=True), strict=True):
        ranks = [rank for rank, number in enumerate(numbers) if number]
        if name not in told and len({numbers[rank] for rank in ranks}) > 1:
            found.add(name)
            logger.warning(
                "Pipeline.step: the %s of ranks %s differ, and %s: the ranks of one pipeline need one batch, so a "
                "DataLoader must not be sharded over them, and what draws rows needs a generator of its own with one "
                "seed: after dropout the default ones of ranks differ",
                *(name, ranks, _GIVEN[name]),
            )
    return found


def rows_of(value: Any) -> int:
    """Of a batch that is to be split; 0 where there is nothing to split."""
    tensors = [] if isinstance(value, list) else [leaf for leaf in tensors_in(_as_dict(value)) if leaf.dim()]
    return len(tensors[0]) if tensors else 0


def warn_of_single_targets(inputs: int, targets: int, microbatches: int) -> None:
    """Says where a microbatch has several rows of inputs and one of targets, which a loss may take for all of them."""
    if inputs > targets == microbatches:
        logger.warning(
            "Pipeline.step: inputs have %d rows and targets %d, which is one for a microbatch: a loss that broadcasts "
            "takes it for all rows; give as many targets as inputs, unless the loss is one of several rows",
            *(inputs, targets),
        )


def split(call: str, name: str, value: Any, count: int) -> list[Any]:
    """A pytree of tensors in `count` equal parts along dimension 0; a list must have the parts already.

    None in a tree is an argument left out, of every part. call, name: of the Pipeline's method and of the argument, for
    errors. Raises ValueError or TypeError for what cannot be split.
    """
    if value is None:
        hint = "; a loss_fn that needs none takes any tensor of as many rows" if name == "targets" else ""
        raise ValueError(f"Pipeline.{call}: {name} must be given on this rank; got None{hint}")
    if isinstance(value, list):
        if len(value) != count:
            raise ValueError(
                f"Pipeline.{call}: {name} is a list of {len(value)} microbatches and the schedule has {count}; "
                "pass one entry per microbatch, one tensor to be split, or schedule= for that number"
            )
        return value
    leaves, spec = ([value], None) if isinstance(value, Tensor) else pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if leaf is not None]
    others = [leaf for leaf in tensors if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.is_nested]
    if not leaves or others:
        wrong = (others or [value])[0]
        remedy = remedy_of_dataclass(wrong) or "a list with one entry per microbatch may hold anything"
        raise TypeError(
            f"Pipeline.{call}: {name} must hold tensors with a batch dimension, as a tokenizer's return_tensors='pt' "
            f"gives them; got {reprlib.repr(wrong)}; {remedy}"
        )
    for tensor in tensors:
        if tensor.shape[0] % count:
            raise ValueError(
                f"Pipeline.{call}: dimension 0 of {name} must be a multiple of the {count} microbatches; got "
                f"{list(tensor.shape)}; change the batch size or pass a list of microbatches"
            )
    parts = [[None] * count if leaf is None else leaf.tensor_split(count) for leaf in leaves]
    if spec is None:
        return [*parts[0]]
    return [pytree.tree_unflatten(list(part), spec) for part in zip(*parts, strict=True)]


def name_with_side(call: str, side: Any, count: str) -> str:
    """The call, with names and rows of its side inputs: ranks that were given others make another call.

    None is an input left out. Rows that differ between microbatches, as those of a list may, are named one by one.
    count: "elements" for slices, of which ranks could have cut others.
    """
    parts = [part if isinstance(part, Mapping) else {} for part in (side if isinstance(side, list) else [side])]
    named = []
    for name in sorted({name for part in parts for name in part}, key=str):
        sizes = [_size(part.get(name), count) for part in parts]
        if any(size is not None for size in sizes):
            counts = [size or 0 for size in sizes]
            text = str(sum(counts)) if len({*counts}) == 1 else "+".join(map(str, counts))
            named.append(f"{name} ({text} {count})")
    return f"{call} with side {', '.join(named)}" if named else call


def _size(value: Any, count: str) -> int | None:
    """Rows or elements of the tensors in a value, 1 for whatever else is in it; None where nothing is."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if leaf is not None]
    if not leaves:
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    return len(leaves) - len(tensors) + sum(len(tensor) if count == "rows" else tensor.numel() for tensor in tensors)
