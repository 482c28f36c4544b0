"""cut: this rank's chunks of a model, and no more of it; layer_chunks: its layers one by one, to measure them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbkern.pipeline.models import weights as loading
from zbkern.pipeline.models.chunk import Chunk
from zbkern.pipeline.models.halves import Halves, halves_of
from zbkern.pipeline.models.layers import Divided, Layer, check_encoder, divided, halves_of_layer, listed
from zbkern.pipeline.models.residual import WholeBlock
from zbkern.pipeline.models.skips import last_users
from zbkern.pipeline.models.stand_ins import After, Before, Entry, Flow, Skipped, Zeros, like_parameter, outside
from zbkern.pipeline.transport.process_groups import place_in
from zbkern.schedules.layout import check_partition, layer_of, layout_to_partition, numbers_of
from zbkern.schedules.schedule import Schedule


def cut(
    model: nn.Module | Any,
    plan: Any,
    partition: Sequence[float] | str | None = None,
    *,
    layers: Sequence[str] | Mapping[str, str] | None = None,
    skips: Mapping[str, str] | None = None,
    weights: str | os.PathLike | None = None,
    init: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    rank: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> list[Chunk]:
    """This rank's chunks of a model, in model order, as `Pipeline` takes them (convert them first); not collective.

    Args:
        model: a model of the transformers library or its configuration, or any module; on the meta device
            (`with torch.device("meta")`) no rank holds more than its chunks, otherwise the chunks share its parameters.
        plan: a `Plan`, or a `Schedule`.
        partition: the first layer of every chunk (`layers_of` numbers them), 4.5 for the MLP of block 4, whose
            attention is in the chunk before; or Megatron's layout, as in "Ett|ttL"; None for the plan's, or an even
            one.
        layers: as for `layers_of`.
        skips: {layer: the last layer that uses its output}, of layers whose output more than the next one uses, as a
            U-Net's: it is sent from chunk to chunk up to there, and its gradient comes back.
        weights: a folder of safetensors files, as `from_pretrained` reads it, for a model on the meta device; this
            rank's tensors alone are read.
        init: for such a model without weights, init(module) sets the parameters of a module; None for the model's own
            way.
        seed: of these, with the name of the module: weights do not depend on the partition.
        rank: None for this process's in `group`.
        device: of parameters that were on the meta device, None for the CPU, "meta" to leave them there.

    A chunk runs the model's own forward, with placeholders for what other ranks compute, under the names of the whole
    model, so that checkpoints load with any partition. It declares the weights that it shares with other chunks. What
    the forward needs of the batch besides its first argument is a side input, `pipe.step(inputs, targets, side={...})`.
    Raises TypeError and ValueError for arguments that do not fit, and for models that cannot be cut, naming the layer.
    """
    schedule = plan if isinstance(plan, Schedule) else getattr(plan, "schedule", None)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"cut: plan must be a Plan or a Schedule; got {type(plan).__name__}")
    whole = divided("cut", model, layers)
    found, names = listed(whole), [*whole.kinds]
    partition = _partition(plan, partition, found, len(schedule.placement))
    halves = _halves(whole.model, found, partition)
    check_encoder("cut", whole.model, names, partition)
    bounds = [*pairwise(partition), (partition[-1], len(found))]
    mine = schedule.chunks_of(_rank(rank, group, schedule))
    used = last_users("cut", skips, names)
    chunks = [_chunk(whole, *bounds[number], used, halves) for number in mine]
    if device is None or torch.device(device).type != "meta":
        loading.fill(whole.model, chunks, weights, init, seed, torch.device(device or "cpu"))
    return chunks


def layer_chunks(
    model: nn.Module | Any,
    *,
    layers: Sequence[str] | Mapping[str, str] | None = None,
    skips: Mapping[str, str] | None = None,
    halves: bool = False,
    weights: str | os.PathLike | None = None,
    init: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    rank: int | None = None,
    ranks: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Chunk]:
    """This rank's share of a model's layers, each a chunk of its own, as `profile_layers` takes them; not collective.

    The names are those of `layers_of`, with `halves` also of half blocks, and all ranks together have every layer once,
    as many each as can be: `plan` with the measured costs returns a partition that `cut` takes. rank, ranks: which
    share of how many; None for this process's in `group`, and all layers without torch.distributed. Other arguments and
    errors are those of `cut`.

    For measuring: what the model computes besides its layers (masks, rotary embeddings) is in the time of each of
    these, but once in that of a chunk with several layers.
    """
    if rank is None and (place := place_in(group)) is not None:
        rank, ranks = place
    rank, ranks = rank or 0, ranks or 1
    whole = divided("layer_chunks", model, layers)
    names = [layer.name for layer in listed(whole, halves)]
    if not 0 <= rank < ranks <= len(names):
        raise ValueError(
            f"layer_chunks: rank must be one of ranks, and ranks at most the {len(names)} layers; got {rank} of {ranks}"
        )
    check_encoder("layer_chunks", whole.model, names, range(len(names)))
    mine = range(len(names) * rank // ranks, len(names) * (rank + 1) // ranks)
    bounds = [*pairwise([*numbers_of(names), len(whole.kinds)])]
    used = last_users("layer_chunks", skips, [*whole.kinds])
    found = {names[index]: _chunk(whole, *bounds[index], used, {}) for index in mine}
    loading.fill(whole.model, [*found.values()], weights, init, seed, torch.device(device or "cpu"))
    return found


def even_partition(layers: Sequence[Layer], chunks: int) -> tuple[int, ...]:
    """Blocks spread evenly over the chunks; what is before them is in the first, what follows in the last."""
    blocks = [index for index, layer in enumerate(layers) if layer.kind == "block"]
    if len(blocks) < chunks:
        raise ValueError(
            f"cut: a partition must be given where there are fewer blocks than chunks; got {len(blocks)} blocks and "
            f"{chunks} chunks" + ("; a schedule with fewer must be taken" if len(layers) < chunks else "")
        )
    return (0, *(blocks[len(blocks) * number // chunks] for number in range(1, chunks)))


def _partition(plan: Any, given: Sequence[float] | str | None, layers: Sequence[Layer], chunks: int) -> Sequence[float]:
    if isinstance(given, str):
        given = layout_to_partition(given, "".join(layer.letter for layer in layers))
    partition = given if given is not None else getattr(plan, "partition", None)
    if partition is None:
        return even_partition(layers, chunks)
    partition = check_partition("cut", partition, len(layers))
    if given is None:
        _check_names(getattr(plan, "layers", None) or (), partition, [layer.name for layer in layers])
    if len(partition) != chunks:
        raise ValueError(
            f"cut: partition must have the {chunks} chunks of the schedule; got {len(partition)}: {list(partition)}"
        )
    return partition


def _halves(model: nn.Module, layers: Sequence[Layer], partition: Sequence[float]) -> dict[str, Halves]:
    """Of the layers that are in two chunks."""
    found = {}
    for first in partition:
        layer = layers[int(first)]
        try:
            if first % 1:
                found[layer.name] = halves_of_layer(model, layer)
        except WholeBlock as reason:
            raise ValueError(
                f"cut: partition must have {layer.name!r} in one chunk, and not begin one at {first}: it cannot be cut "
                f"between attention and MLP: {reason}; layers_of(model, halves=True) lists what can be"
            ) from reason
    return found


def _check_names(planned: Sequence[str], partition: Sequence[float], names: Sequence[str]) -> None:
    """A plan may count layers that the model does not have; one whose layers have names of its own counts alone."""
    counted = dict(zip(numbers_of(planned), map(layer_of, planned), strict=True))
    if not {*counted.values()} & {*names}:
        return
    for number, first in enumerate(partition):
        if counted[first] != names[int(first)]:
            raise ValueError(
                f"cut: chunk {number} must begin with {counted[first]!r}, as the plan counts them; in the model that "
                f"is {names[int(first)]!r}: plan with the costs of this model's layers, or give the partition yourself"
            )


def _rank(rank: int | None, group: dist.ProcessGroup | None, schedule: Schedule) -> int:
    if rank is None and (place := place_in(group)) is not None:
        rank = place[0]
    if rank is not None:
        if rank not in range(schedule.ranks):
            raise ValueError(
                f"cut: rank must be a place in the pipeline, from 0 to {schedule.ranks - 1}; got {rank!r}: with "
                'replicas or tensor parallelism pass rank=mesh.get_local_rank("stage"), or make the schedule for as '
                "many ranks as there are"
            )
        return rank
    if schedule.ranks > 1:
        raise ValueError(
            f"cut: rank must be given where torch.distributed is not initialised; the schedule has {schedule.ranks}"
        )
    return 0


def _chunk(whole: Divided, start: float, end: float, used: Mapping[str, int], known: Mapping[str, Halves]) -> Chunk:
    """Layers from start to before end: a copy of the model that shares their parameters, without the other layers, and
    without the other half of one that begins or ends within it. used: {layer: number of the last that uses its output},
    of skips. known: halves of layers."""
    model, names, owners, ties = whole.model, [*whole.kinds], whole.owners, whole.ties
    flow = Flow()
    memo: dict[int, Any] = {}
    first, last = int(start), ceil(end)
    for index, name in enumerate(names):
        if not first <= index < last:
            before = Skipped if start - 1 < used.get(name, 0) else Before
            kind = After if index >= last else Entry if index == start - 1 else before
            layer = model.get_submodule(name)
            memo[id(layer)] = kind(layer, name, flow)
    cut_blocks: dict[str, Halves] = {}
    for bound, absent in ((start, 0), (end, 1)):
        if bound % 1:
            block = model.get_submodule(names[int(bound)])
            halves = cut_blocks[names[int(bound)]] = known.get(names[int(bound)]) or halves_of(block)
            for part in halves.parts[absent]:
                name, module = f"{names[int(bound)]}.{part}", block.get_submodule(part)
                memo[id(module)] = Zeros(module, name, flow, halves.outputs[part])
    _check_apart(whole, range(first, last), start, end)
    elsewhere: dict[str, str] = {}
    for name, owner in owners.items():
        if not start <= owner < end:
            module = model.get_submodule(name)
            if name and not any(other.startswith(f"{name}.") for other in names):
                memo[id(module)] = outside(module, name, flow)
                elsewhere[name] = names[owner]
    memo.update({id(parameter): parameter for parameter in model.parameters()})
    replaced = set(memo)  # deepcopy adds all that it copies
    copied = copy.deepcopy(model, memo)
    for name, owner in owners.items():
        if not start <= owner < end and id(model.get_submodule(name)) not in replaced:
            elsewhere.update(dict.fromkeys(_drop_own(copied.get_submodule(name), name), names[owner]))
    shared: dict[str, str] = {}
    for name in names[first:last]:
        shared = {**ties.get(name, {}), **shared}
    others = {label for name in (*names[:first], *names[last:]) for label in ties.get(name, ())}
    tied_elsewhere = [name for label, name in shared.items() if label in others]
    sent = [name for name, last in used.items() if names.index(name) <= end - 1 < last]
    return Chunk(copied, flow, names, start, end, shared, elsewhere, cut_blocks, tied_elsewhere, sent)


def _check_apart(whole: Divided, mine: Sequence[int], start: float, end: float) -> None:
    """Raises ValueError where a module of a layer also stands beside the layers, and one of these is in another chunk:
    a placeholder would take the place of both."""
    model, names = whole.model, [*whole.kinds]
    inside = {
        module: (f"{name}.{part}", index)
        for index, name in enumerate(names)
        for part, module in model.get_submodule(name).named_modules()
    }
    for name, owner in whole.owners.items():
        part, index = inside.get(model.get_submodule(name), ("", 0))
        if part and (index in mine) != (start <= owner < end):
            raise ValueError(
                f"cut: {part!r} and {name!r} are one module, and the second stands beside the layers, in the chunk of "
                f"{names[owner]!r}: cut so that this chunk has both, or make them two modules, which may share "
                f"parameters, such as model.{name}.weight = model.{part}.weight"
            )


def _drop_own(module: nn.Module, prefix: str) -> list[str]:
    """Puts placeholders in the place of the parameters of a module that holds layers, and returns their names.

    Such a module is on every rank, and another chunk has its parameters.
    """
    dropped = []
    for name, parameter in [*module._parameters.items()]:
        del module._parameters[name]
        if parameter is not None:
            dropped.append(f"{prefix}.{name}".lstrip("."))
            module.register_buffer(name, like_parameter(parameter, dropped[-1]), persistent=False)
    module._non_persistent_buffers_set.update(module._buffers)
    return dropped
