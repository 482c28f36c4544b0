"""export: the chunks of all ranks as safetensors files, which `from_pretrained` reads; each rank writes its own."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbkern.pipeline.models.adapters import (
    ADAPTER,
    ADAPTER_CONFIG,
    adapter_tensors,
    config_of,
    config_of_all,
    holder_of,
    merged,
    plain_names,
)
from zbkern.pipeline.models.chunk import Chunk
from zbkern.pipeline.models.layers import is_transformer
from zbkern.pipeline.models.weights import INDEX, SINGLE, safetensors
from zbkern.pipeline.transport.rank_exchange import TIMEOUT, RankExchange
from zbkern.schedules.units import some

_OURS = re.compile(r"model(-\d{5}-of-\d{5}(\.\d+)?)?\.safetensors")
"""The names that exports have; others in the folder stay."""


class Shard(NamedTuple):
    """A file that was written: its place in the model, and what is in it."""

    place: tuple[float, int]
    path: str
    names: list[str]
    size: int


def export(
    folder: str | os.PathLike,
    chunks: Any,
    *,
    group: dist.ProcessGroup | None = None,
    max_shard_bytes: int = 5 << 30,
    timeout: float = TIMEOUT,
) -> None:
    """Writes the model into a folder, as the transformers library's `save_pretrained` does; collective.

    folder: on a file system that all ranks share. chunks: a Pipeline of chunks that `cut` made, whose Optimizer
    validates its last step first; or these chunks, with which you call `optimizer.validate()` yourself. group: the
    ranks that take part, None for all; where several hold a chunk, the first writes it. max_shard_bytes: a file is
    ended when it has more. Each rank holds a copy of one file on the CPU at a time. For a model of the transformers
    library its configuration is written, too, with the names and layouts that the library saves, and adapters of the
    peft library are merged into what is written (`export_adapter` writes them alone). Raises ImportError
    without safetensors, TypeError for other chunks, ValueError for chunks whose tensors have other names than the model
    that was cut, or that the library would build (wrappers around layers, say), OSError; on the other ranks
    PipelineError. Nothing is written then. Whenever it is killed, the folder has the old model or the new one.
    """

    def files_of(chunk: Chunk) -> Iterator[dict[str, Tensor]]:
        _check_names(chunk)
        return _files_of(chunk, max_shard_bytes)

    _write("export", folder, chunks, files_of, _finish, group, timeout)


def export_adapter(
    folder: str | os.PathLike,
    chunks: Any,
    *,
    name: str = "default",
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Writes an adapter of the peft library alone, as its `save_pretrained` does; collective.

    name: the adapter's, as peft has it, which was put into the model before `cut`, or into every chunk after it
    (`inject_adapter_in_model`). Other arguments and errors are those of `export`, which writes the whole model with its
    adapters merged. Raises ValueError where no chunk has an adapter of this name.
    """
    config: dict[str, Any] = {}  # on rank 0

    def join(of_ranks: list[list[dict[str, Any]]]) -> None:
        config.update(config_of_all([*chain(*of_ranks)], name))

    def files_of(chunk: Chunk) -> Iterator[dict[str, Tensor]]:
        if (holder := holder_of(chunk, name)) is not None:
            yield _on_the_cpu(_whole(adapter_tensors(holder, name)))

    def finish(folder: Path, shards: list[Shard], _: list[Chunk]) -> None:
        _finish_adapter(folder, shards, config)

    with RankExchange("export_adapter", group, timeout, transport=_transport_of(chunks)) as ranks:
        holders = [holder_of(chunk, name) for chunk in _chunks("export_adapter", chunks)]
        configs = [config_of(holder, name) for holder in holders if holder is not None]
        ranks.exchange("adapters listed", configs, join)
    _write("export_adapter", folder, chunks, files_of, finish, group, timeout)


def full_weights(pipe: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of the whole model on every rank, as an inference engine reads them; collective.

    >>> engine.load_weights(full_weights(pipe))    # doctest: +SKIP

    pipe: a Pipeline of chunks that `cut` made, whose Optimizer validates its last step first. Every rank reads to the
    end, and makes no other call of the Pipeline meanwhile. Names, layouts and errors are those of `export`: adapters
    are merged, a tied weight comes once, shards as whole tensors, on the Pipeline's device. A layer comes once all
    ranks have the one before it, so that a rank holds two at most. What is of the rank's own chunks may be the weight
    itself: copy what is to stay.
    """
    if not isinstance(getattr(pipe, "modules", None), Mapping):
        raise TypeError(f"full_weights: pipe must be a Pipeline of chunks that cut has made; got {type(pipe).__name__}")
    mine = dict(zip(pipe.modules, _chunks("full_weights", pipe), strict=True))
    if pipe.optimizer is not None:
        pipe.optimizer.validate()
    for number, rank in enumerate(pipe.schedule.placement):
        layers = _checked_layers(mine[number]) if number in mine else iter(())
        while layer := pipe._calls.broadcast(rank, functools.partial(next, layers, {})):
            yield from layer.items()


def _checked_layers(chunk: Chunk) -> Iterator[dict[str, Tensor]]:
    _check_names(chunk)
    yield from _whole_layers(chunk)


def _write(
    caller: str,
    folder: str | os.PathLike,
    chunks: Any,
    files_of: Callable[[Chunk], Iterator[dict[str, Tensor]]],
    finish: Callable[[Path, list[Shard], list[Chunk]], None],
    group: dist.ProcessGroup | None,
    timeout: float,
) -> None:
    """Every rank writes what files_of gives for its chunks, and finish makes of these files on rank 0 what is read."""
    with RankExchange(caller, group, timeout, transport=_transport_of(chunks)) as ranks:
        save_file = safetensors(caller).torch.save_file
        mine = _chunks(caller, chunks)
        files = [files_of(chunk) for chunk in mine]  # which first looks at names
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        writes = ranks.exchange("chunks listed", [chunk.begins_at for chunk in mine], _first_holders)
        optimizer = getattr(chunks, "optimizer", None)
        if optimizer is not None:
            optimizer.validate()  # before a weight is read
        shards: list[Shard] = []

        def finish_all(found: list[list[Any]]) -> None:
            finish(folder, sorted(Shard(*shard) for of_rank in found for shard in of_rank), mine)
            _delete_unfinished(folder, "*")  # of exports that were killed, too

        try:
            for chunk, its_files in zip(mine, files, strict=True):
                for number, tensors in enumerate(its_files):
                    if chunk.begins_at not in writes:
                        continue  # a shard of another rank's tensor took part in gathering it
                    path = folder / f".{chunk.begins_at}-{number}-of-rank-{ranks.rank}.safetensors"
                    save_file(tensors, path, metadata={"format": "pt"})
                    size = sum(tensor.nbytes for tensor in tensors.values())
                    shards.append(Shard((chunk.begins_at, number), str(path), sorted(tensors), size))
            ranks.exchange("tensors written", shards, finish_all)
        except BaseException:  # a disk that is full would stay so
            _delete_unfinished(folder, ranks.rank)
            raise


def _delete_unfinished(folder: Path, rank: int | str) -> None:
    """What this rank was writing, or "*"."""
    for path in folder.glob(f".*-of-rank-{rank}.safetensors"):
        path.unlink(missing_ok=True)


def _chunks(caller: str, given: Any) -> list[Chunk]:
    modules = getattr(given, "modules", None)
    found = [*modules.values()] if isinstance(modules, Mapping) else given
    found = [found] if isinstance(found, nn.Module) or not isinstance(found, Iterable) else [*found]
    if not all(isinstance(chunk, Chunk) for chunk in found):
        raise TypeError(f"{caller}: chunks must be those that cut has made, or a Pipeline of them; got {given!r}")
    return found


def _transport_of(given: Any) -> Any:
    """That of a Pipeline, None of chunks alone."""
    return given._calls.transport if hasattr(given, "_calls") else None


def _check_names(chunk: Chunk) -> None:
    """A reader of the files starts what it does not find in them at random, or refuses them."""
    names = plain_names(chunk)
    others = sorted(names - chunk.tensor_names)
    missing = sorted(chunk.tensor_names - names)
    if others or missing:
        raise ValueError(
            f"export: chunks must have the tensors of the model that was cut, by its names; got {some(others, 3)}, "
            f"which it does not have, and lack {some(missing, 3)}: merge adapters into their layers, or take wrappers "
            "and parametrizations off, before you export; checkpoint.save writes the chunks as they are"
        )
    foreign = sorted(names - _names_of_the_class(chunk.whole)) if is_transformer(chunk.whole) else []
    if foreign:
        raise ValueError(
            f"export: chunks must have the tensors that from_pretrained looks for; got {some(foreign, 3)}, which a "
            f"{type(chunk.whole).__name__} of its configuration does not have: merge adapters into their layers "
            "(merge_and_unload) before you cut the model; checkpoint.save writes the chunks as they are"
        )


def _names_of_the_class(whole: Any) -> set[str]:
    """The names that a model of its class and configuration has; its own where none can be built."""
    with contextlib.suppress(Exception), torch.device("meta"):
        return set(type(whole)(whole.config).state_dict())
    return set(whole.state_dict())


def _first_holders(held: list[list[float]]) -> list[list[float]]:
    """Of every rank the first layers of the chunks that it writes: replicas write none."""
    taken: set[float] = set()
    writes = []
    for firsts in held:
        writes.append([first for first in firsts if first not in taken])
        taken.update(writes[-1])
    return writes


def _files_of(chunk: Chunk, max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """This chunk's tensors, a file's at a time; collective over ranks that hold shards of them."""
    tensors: dict[str, Tensor] = {}
    for layer in _whole_layers(chunk):
        tensors.update(_on_the_cpu(layer))
        if sum(tensor.nbytes for tensor in tensors.values()) > max_bytes:
            yield tensors
            tensors = {}
    if tensors:
        yield tensors


def _whole_layers(chunk: Chunk) -> Iterator[dict[str, Tensor]]:
    """The tensors of each layer that has any, as the files have them, where they are; collective as above."""
    tied = chunk.tied_parameters.values()
    for layer in _by_layer(chunk):
        whole = _whole(merged(chunk, layer, tied))
        if is_transformer(chunk.whole):
            whole = _as_the_library_saves(chunk.whole, whole)
        if whole:
            yield whole


def _as_the_library_saves(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    if getattr(model, "_hf_peft_config_loaded", False):  # of an adapter that it has read, the library keeps those names
        model = copy.copy(model)
        model._weight_conversions = None
    return revert_weight_conversion(model, tensors)


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def _on_the_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu").contiguous() for name, tensor in tensors.items()}


def _by_layer(chunk: Chunk) -> Iterator[dict[str, Tensor]]:
    """The tensors of each layer, then those that belong to none. A tied one is there once, under its first name."""
    tied = {id(parameter) for parameter in chunk.tied_parameters.values()}
    once = {name for name, _ in chunk.named_parameters()}
    others = {
        name
        for name, parameter in chunk.named_parameters(remove_duplicate=False)
        if name not in once or (id(parameter) in tied and name not in chunk.shared_names)
    }
    state = {name: value for name, value in chunk.state_dict().items() if name not in others}
    for layer in chunk.layer_names:
        yield {name: state.pop(name) for name in [*state] if name.startswith(f"{layer}.")}
    yield state


def _finish(folder: Path, shards: list[Shard], chunks: list[Chunk]) -> None:
    """Gives the files their names, and writes what says where each tensor is; on rank 0.

    What is there before is whole until the new model is, in one change: of the one file, or of the index. So new files
    do not have names of older ones.
    """
    old = {path.name for path in folder.glob("model*.safetensors") if _OURS.fullmatch(path.name)}
    names = _free_names(len(shards), old)
    for shard, name in zip(shards, names, strict=True):
        os.replace(shard.path, folder / name)
    if len(shards) > 1:
        where = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard.names}
        index = {"metadata": {"total_size": sum(shard.size for shard in shards)}, "weight_map": where}
        beside = folder / f".{INDEX}"
        beside.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        os.replace(beside, folder / INDEX)
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for name in old.difference(names):
        (folder / name).unlink(missing_ok=True)
    for chunk in chunks[:1]:
        for kind in ("config", "generation_config"):
            settings: Any = getattr(chunk.whole, kind, None)
            if hasattr(settings, "save_pretrained"):
                _of_the_files(settings, chunk).save_pretrained(folder)


def _finish_adapter(folder: Path, shards: list[Shard], config: dict[str, Any]) -> None:
    """One file of those of all chunks, as peft reads one, and the configuration beside it; on rank 0."""
    files = safetensors("export_adapter").torch
    beside = folder / f".{ADAPTER}"
    together = {name: tensor for shard in shards for name, tensor in files.load_file(shard.path).items()}
    files.save_file(together, beside, metadata={"format": "pt"})
    os.replace(beside, folder / ADAPTER)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _free_names(count: int, taken: set[str]) -> list[str]:
    """Names for so many files of a model, none of which is taken. One file alone may be replaced."""
    if count == 1:
        return [SINGLE]
    for again in range(len(taken) + 1):
        ending = f".{again}" * (again > 0)
        names = [f"model-{number:05d}-of-{count:05d}{ending}.safetensors" for number in range(1, count + 1)]
        if not taken.intersection(names):
            break
    return names


def _of_the_files(settings: Any, chunk: Chunk) -> Any:
    """A copy that names the model's class, and has the dtype of the weights as they are now."""
    settings = copy.deepcopy(settings)
    floating = next((value.dtype for value in chunk.parameters() if value.is_floating_point()), None)
    if floating is not None:
        settings.dtype = floating
    if hasattr(settings, "architectures"):  # cut builds this class again
        settings.architectures = [type(chunk.whole).__name__]
    if getattr(settings, "quantization_config", None) is not None:  # of the files that were read: these have numbers
        del settings.quantization_config
    return settings
