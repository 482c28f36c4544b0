"""export: the chunks of all ranks as safetensors files, which `from_pretrained` reads; each rank writes its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbkern.pipeline.models.chunk import Chunk
from zbkern.pipeline.models.layers import is_transformer
from zbkern.pipeline.models.weights import INDEX, SINGLE, library_converts, safetensors
from zbkern.pipeline.transport.rank_exchange import TIMEOUT, RankExchange


class Shard(NamedTuple):
    """A file that was written: its place in the model, and what is in it."""

    place: tuple[int, int]
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
    library its configuration is written, too, with the names and layouts that the library saves. Raises ImportError
    without safetensors, TypeError for other chunks, ValueError for chunks whose tensors have other names than the model
    that was cut (adapters around layers, say), OSError; on the other ranks PipelineError. Nothing is written then.
    """
    with RankExchange("export", group, timeout) as ranks:
        save_file = safetensors("export").torch.save_file
        mine = _chunks(chunks)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        writes = ranks.exchange("chunks listed", [chunk.layer_names for chunk in mine], _first_holders)
        optimizer = getattr(chunks, "optimizer", None)
        if optimizer is not None:
            optimizer.validate()  # before a weight is read
        shards: list[Shard] = []

        def finish(found: list[list[Any]]) -> None:
            _finish(folder, sorted(Shard(*shard) for of_rank in found for shard in of_rank), mine)

        with _deleting_on_error(folder, ranks.rank):
            for chunk in mine:
                for number, tensors in enumerate(_files_of(chunk, max_shard_bytes)):
                    if chunk.layer_names[0] not in writes:
                        continue  # a shard of another rank's tensor took part in gathering it
                    path = folder / f".{chunk.layer_names[0]}-{number}{_unfinished(ranks.rank)}"
                    save_file(tensors, path, metadata={"format": "pt"})
                    size = sum(tensor.nbytes for tensor in tensors.values())
                    order = chunk.all_layers.index(chunk.layer_names[0])
                    shards.append(Shard((order, number), str(path), sorted(tensors), size))
            ranks.exchange("tensors written", shards, finish)


def _unfinished(rank: int) -> str:
    """How the names of files end that a rank is writing."""
    return f"-of-rank-{rank}.safetensors"


@contextmanager
def _deleting_on_error(folder: Path, rank: int) -> Iterator[None]:
    """A disk that is full would stay so."""
    try:
        yield
    except BaseException:
        for path in folder.glob(f".*{_unfinished(rank)}"):
            path.unlink(missing_ok=True)
        raise


def _chunks(given: Any) -> list[Chunk]:
    modules = getattr(given, "modules", None)
    found = [*modules.values()] if isinstance(modules, Mapping) else given
    found = [found] if isinstance(found, nn.Module) or not isinstance(found, Iterable) else [*found]
    if not all(isinstance(chunk, Chunk) for chunk in found):
        raise TypeError(f"export: chunks must be those that cut has made, or a Pipeline of them; got {given!r}")
    for chunk in found:
        _check_names(chunk)
    return found


def _check_names(chunk: Chunk) -> None:
    """A reader of the files starts what it does not find in them at random, or refuses them."""
    names = chunk.state_dict().keys()
    others = sorted(names - chunk.tensor_names)
    missing = sorted(chunk.tensor_names - names)
    if others or missing:
        raise ValueError(
            f"export: chunks must have the tensors of the model that was cut, by its names; got {_few(others)}, which "
            f"it does not have, and lack {_few(missing)}: merge adapters into their layers, or take wrappers and "
            "parametrizations off, before you export; checkpoint.save writes the chunks as they are"
        )


def _few(names: list[str]) -> str:
    return (", ".join(map(repr, names[:3])) or "none") + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first_holders(held: list[list[list[str]]]) -> list[list[str]]:
    """Of every rank the first layers of the chunks that it writes: replicas write none."""
    taken: set[str] = set()
    writes = []
    for chunks in held:
        writes.append([layers[0] for layers in chunks if layers[0] not in taken])
        taken.update(writes[-1])
    return writes


def _files_of(chunk: Chunk, max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """This chunk's tensors, a file's at a time; collective over ranks that hold shards of them."""
    tensors: dict[str, Tensor] = {}
    for layer in _by_layer(chunk):
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in layer.items()}
        if is_transformer(chunk.whole) and library_converts():
            from transformers.core_model_loading import revert_weight_conversion

            whole = revert_weight_conversion(chunk.whole, whole)
        tensors.update({name: tensor.to("cpu").contiguous() for name, tensor in whole.items()})
        if sum(tensor.nbytes for tensor in tensors.values()) > max_bytes:
            yield tensors
            tensors = {}
    if tensors:
        yield tensors


def _by_layer(chunk: Chunk) -> Iterator[dict[str, Tensor]]:
    """Of every layer, and of what belongs to none, its tensors; a tied one under the name that it has first."""
    tied = {id(parameter) for parameter in chunk.tied_parameters.values()}
    others = {
        name
        for name, parameter in chunk.named_parameters(remove_duplicate=False)
        if id(parameter) in tied and name not in chunk.shared
    }
    state = {name: value for name, value in chunk.state_dict().items() if name not in others}
    for layer in chunk.layer_names:
        yield {name: state.pop(name) for name in [*state] if name.startswith(f"{layer}.")}
    yield state


def _finish(folder: Path, shards: list[Shard], chunks: list[Chunk]) -> None:
    """Gives the files their names, and writes what says where each tensor is; on rank 0."""
    for old in (folder / INDEX, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    where = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.replace(shard.path, folder / name)
        where.update(dict.fromkeys(shard.names, name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(shard.size for shard in shards)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for chunk in chunks[:1]:
        for kind in ("config", "generation_config"):
            settings: Any = getattr(chunk.whole, kind, None)
            if hasattr(settings, "save_pretrained"):
                settings.save_pretrained(folder)
