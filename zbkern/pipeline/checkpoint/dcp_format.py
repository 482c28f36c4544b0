"""The files of one checkpoint: torch.distributed.checkpoint's, and an index in JSON with a checksum of every tensor.

`.metadata` is for torch's tools, and pickled; nothing here reads it. Tensors are read with `weights_only`, after their
checksums: no file can run code at load.
"""

from __future__ import annotations

import io
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pickled in each `.metadata`: its name cannot change
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from zbkern.pipeline.transport.tensors import local_part

INDEX = "zbkern.json"
_VERSION = 2  # 1 had one tensor for every other entry of an optimizer's state


class Piece(NamedTuple):
    """A part of a tensor: its place there, bytes `start` to `start + length` of `file`, and their CRC-32."""

    offset: Sequence[int]
    size: Sequence[int]
    file: str
    start: int
    length: int
    crc32: int


class Stored(NamedTuple):
    """What is stored of a tensor: one piece, or one of every shard."""

    dtype: str  # of torch, without "torch."
    size: Sequence[int]
    pieces: Sequence[Piece]

    def same_as(self, other: Stored) -> bool:
        """Whether both are equal, as far as their checksums say; also where they were cut in different ways."""
        parts = [[(p.offset, p.size) for p in stored.pieces] for stored in (self, other)]
        sums = [[p.crc32 for p in stored.pieces] for stored in (self, other)]
        return parts[0] != parts[1] or sums[0] == sums[1]

    def empty(self) -> Tensor:
        return torch.empty(list(self.size), dtype=getattr(torch, self.dtype))


class Index(NamedTuple):
    """What a checkpoint holds, by key. checksum: of the index itself."""

    tensors: dict[str, Stored]
    checksum: int


def part_of(tensor: Tensor) -> tuple[list[int], list[int]]:
    """(offset, size) of what this rank holds of a tensor: a shard of a DTensor, all of another."""
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()
        return [*chunk.offsets], [*chunk.sizes]
    return [0] * tensor.dim(), [*tensor.shape]


def share_out(ranks: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The keys that each rank writes. What several ranks hold alike is for the one that writes least so far.

    ranks: {key: (size, offset, size of the part)} of every rank. Raises ValueError where parts of a tensor are missing.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, parts in enumerate(ranks):
        for key, (_, offset, _) in parts.items():
            holders.setdefault((key, tuple(offset)), []).append(rank)
    keys: list[list[str]] = [[] for _ in ranks]
    written = [0] * len(ranks)
    missing: dict[str, int] = {}
    for (key, _), having in holders.items():
        size, _, part = ranks[having[0]][key]
        writer = min(having, key=written.__getitem__)
        keys[writer].append(key)
        written[writer] += math.prod(part)
        missing[key] = missing.get(key, math.prod(size)) - math.prod(part)
    for key, count in missing.items():
        if count:
            raise ValueError(
                f"checkpoint.save: the parts of {key!r} that ranks hold differ from the whole by {count} elements; all "
                "ranks that have shards of it must take part: see group="
            )
    return keys


def write_tensors(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> list[tuple[str, str, list[int], Piece]]:
    """Writes this rank's file to the disk. Returns (key, dtype, size, piece) of every tensor."""
    name = f"__{rank}_0.distcp"
    written = []
    with _written(folder / name) as file:
        for key, tensor in tensors.items():
            stream = io.BytesIO()
            torch.save(_compact(tensor), stream)
            data = stream.getbuffer()
            piece = Piece(*part_of(tensor), name, file.tell(), len(data), zlib.crc32(data))
            file.write(data)
            written.append((key, str(tensor.dtype).removeprefix("torch."), [*tensor.shape], piece))
    return written


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A new file, on the disk at the end. Raises OSError with its name, also where the device is full."""
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror}; older checkpoints are as they were", str(path)) from error


def finish(folder: Path, ranks: Sequence[Sequence[tuple[str, str, list[int], Any]]]) -> None:
    """Writes torch's metadata and the index. ranks: what `write_tensors` has returned, by rank.

    Raises ValueError where a rank's file is not here, or not with what that rank has written.
    """
    tensors: dict[str, Any] = {}
    for rank, of_rank in enumerate(ranks):
        path, expected = folder / f"__{rank}_0.distcp", 0
        for key, dtype, size, piece in of_rank:
            tensors.setdefault(key, {"dtype": dtype, "size": size, "pieces": []})["pieces"].append(piece)
            expected += Piece(*piece).length
        seen = path.stat().st_size if path.exists() else None
        if seen != expected:
            raise ValueError(
                f"checkpoint.save: rank {rank} has written {expected} bytes to {path}, where rank 0 finds "
                f"{'no file' if seen is None else f'{seen} bytes'}; folder must be one place shared by all ranks"
            )
    content = {"version": _VERSION, "tensors": tensors}
    _write_metadata(folder, _tensors_of(content))
    with _written(folder / INDEX) as file:
        file.write(json.dumps({"crc32": _checksum(content), "content": content}).encode())


def _write_metadata(folder: Path, tensors: Mapping[str, Stored]) -> None:
    described: dict[str, Any] = {}
    results = []
    for key, stored in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.size)) for p in stored.pieces]
        properties = TensorProperties(dtype=getattr(torch, stored.dtype))
        described[key] = TensorStorageMetadata(properties, torch.Size(stored.size), chunks)
        for number, piece in enumerate(stored.pieces):
            place = _StorageInfo(piece.file, piece.start, piece.length)
            results.append(WriteResult(MetadataIndex(key, piece.offset, number), piece.length, place))
    dcp.FileSystemWriter(folder).finish(Metadata(described), [results])


def read_index(folder: Path) -> Index:
    """Raises ValueError where it is damaged, of another version, or where there is none."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if not folder.exists():
            raise _deleted(path) from None
        raise ValueError(
            f"checkpoint.load: {folder} has no {INDEX}, which checkpoint.save writes last and which has the checksums; "
            "load it with torch.distributed.checkpoint, if you trust it, and save it again"
        ) from None
    try:
        whole = json.loads(data)
        content, checksum = whole["content"], whole["crc32"]
        if checksum != _checksum(content):
            raise ValueError("its checksum does not fit")
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']!r}, this zbkern reads {_VERSION}")
        return Index(_tensors_of(content), checksum)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"checkpoint.load: {path} is damaged: {type(error).__name__}: {error}") from error


def read(folder: Path, index: Index, targets: Mapping[str, Tensor], verify: bool = False) -> None:
    """Fills the tensors of these keys: each of them whole, or the part that a shard is. verify: changes nothing.

    Raises ValueError that names file and tensor where one is not what was saved.
    """
    places = {key: part_of(target) for key, target in targets.items()}
    pieces = [
        (piece, key)
        for key in targets
        for piece in index.tensors[key].pieces
        if _overlap(piece, *places[key]) is not None
    ]
    pieces.sort(key=lambda pair: (pair[0].file, pair[0].start))
    try:
        for name, of_file in groupby(pieces, key=lambda pair: pair[0].file):
            with open(folder / name, "rb") as file:
                for piece, key in of_file:
                    data = _read(file, folder / name, piece, key)
                    if not verify:
                        _copy(data, piece, targets[key], *places[key])
    except FileNotFoundError as error:
        raise _deleted(error.filename) from None


def _deleted(path: Any) -> ValueError:
    return ValueError(
        f"checkpoint.load: {path} was deleted while it was read, or is lost; load again, and where another job saves "
        "into this folder, have its saves keep more checkpoints: keep="
    )


def _overlap(piece: Piece, offset: list[int], size: list[int]) -> list[tuple[int, int]] | None:
    """(start, stop) in the whole tensor, by dimension; None where a piece and a target have nothing in common."""
    dimensions = zip(piece.offset, piece.size, offset, size, strict=True)
    ranges = [(max(a, b), min(a + m, b + n)) for a, m, b, n in dimensions]
    return ranges if all(start < stop for start, stop in ranges) else None


def _copy(data: bytes, piece: Piece, target: Tensor, offset: list[int], size: list[int]) -> None:
    stored = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    target = local_part(target).detach()
    for dimension, (start, stop) in enumerate(_overlap(piece, offset, size) or ()):
        if stop - start < stored.shape[dimension]:  # a tensor in codes and scales cannot be narrowed
            stored = stored.narrow(dimension, start - piece.offset[dimension], stop - start)
        if stop - start < target.shape[dimension]:
            target = target.narrow(dimension, start - offset[dimension], stop - start)
    target.copy_(stored)


def _read(file: BinaryIO, path: Path, piece: Piece, key: str) -> bytes:
    file.seek(piece.start)
    data = file.read(piece.length)
    if len(data) != piece.length or zlib.crc32(data) != piece.crc32:
        raise ValueError(
            f"checkpoint.load: {key!r} in {path} is damaged: its checksum does not fit; "
            "an older checkpoint may be whole: pass step="
        )
    return data


def _compact(tensor: Tensor) -> Tensor:
    """This rank's part on the CPU, without what else its storage holds: torch.save writes whole storages."""
    tensor = local_part(tensor).detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _tensors_of(content: Any) -> dict[str, Stored]:
    tensors = {}
    for key, entry in content["tensors"].items():
        pieces = [Piece(*piece) for piece in entry["pieces"]]
        tensors[key] = Stored(entry["dtype"], entry["size"], pieces)
        if not isinstance(getattr(torch, entry["dtype"]), torch.dtype):
            raise ValueError(f"{key!r} has the dtype {entry['dtype']!r}")
        for piece in pieces:
            if Path(piece.file).name != piece.file:
                raise ValueError(f"{key!r} is said to be in {piece.file!r}, outside of the checkpoint")
    return tensors
