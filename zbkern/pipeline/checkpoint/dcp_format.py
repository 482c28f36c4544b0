"""The files of one checkpoint: torch.distributed.checkpoint's, and an index in JSON with a checksum of every tensor.

`.metadata` is for torch's tools, and pickled; nothing here reads it. Tensors are read with `weights_only`, after their
checksums: no file can run code at load.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

INDEX = "zbkern.json"
_VERSION = 1


class Piece(NamedTuple):
    """Where a tensor, or a shard of one, lies: bytes `start` to `start + length` of `file`, and their CRC-32."""

    key: MetadataIndex
    file: str
    start: int
    length: int
    crc32: int


class Index(NamedTuple):
    """What a checkpoint holds. checksum: of the index itself."""

    metadata: Metadata  # storage_data: {MetadataIndex: Piece}
    checksum: int

    @property
    def tensors(self) -> dict[str, Any]:
        """By name, what has `.size` and `.properties.dtype`."""
        return self.metadata.state_dict_metadata

    def checksums(self, key: str) -> list[tuple[Any, int]]:
        """(offset, CRC-32) of every piece of a tensor: two tensors with the same are equal."""
        return [(at.offset, piece.crc32) for at, piece in self.metadata.storage_data.items() if at.fqn == key]


def write_tensors(folder: Path, rank: int, plan: SavePlan, planner: SavePlanner) -> list[Piece]:
    """Writes this rank's part, one file, to the disk; checksums are taken on the way."""
    name = f"__{rank}_0.distcp"
    pieces, start = [], 0
    with open(folder / name, "wb") as file:
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)  # everything else was packed into one
            stream = _Summing(file)
            try:
                torch.save(_compact(tensor), stream)  # type: ignore[arg-type]  # it calls write and flush
            except RuntimeError as error:  # of its C++, which goes on after what the stream has raised
                raise stream.error or error from None
            pieces.append(Piece(item.index, name, start, stream.length, stream.crc32))
            start += stream.length
        file.flush()
        os.fsync(file.fileno())
    return pieces


def finish(folder: Path, metadata: Metadata, pieces: Iterable[Sequence[Piece]]) -> None:
    """Writes the index and torch's metadata. pieces: by rank.

    Raises ValueError where a rank's file is not here, or not with what that rank has written.
    """
    pieces = list(pieces)
    for rank, of_rank in enumerate(pieces):
        for name, parts in groupby(of_rank, key=lambda piece: piece.file):
            expected, found = sum(piece.length for piece in parts), _size(folder / name)
            if found != expected:
                raise ValueError(
                    f"checkpoint.save: rank {rank} has written {expected} bytes to {folder / name}, where rank 0 finds "
                    f"{'no file' if found is None else f'{found} bytes'}; folder must be one place shared by all ranks"
                )
    results = [
        [WriteResult(p.key, p.length, _StorageInfo(p.file, p.start, p.length)) for p in parts] for parts in pieces
    ]
    dcp.FileSystemWriter(folder).finish(metadata, results)
    tensors: dict[str, Any] = {}
    for piece in (piece for parts in pieces for piece in parts):
        described: Any = metadata.state_dict_metadata[piece.key.fqn]
        chunk = described.chunks[piece.key.index]
        dtype = str(described.properties.dtype).removeprefix("torch.")
        entry = tensors.setdefault(piece.key.fqn, {"dtype": dtype, "size": [*described.size], "pieces": []})
        entry["pieces"].append([[*chunk.offsets], [*chunk.sizes], *piece[1:]])
    content = {"version": _VERSION, "tensors": tensors}
    with open(folder / INDEX, "wb") as file:
        file.write(json.dumps({"crc32": _checksum(content), "content": content}).encode())
        file.flush()
        os.fsync(file.fileno())


def read_index(folder: Path) -> Index:
    """Raises ValueError where it is damaged, of another version, or where there is none."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except FileNotFoundError:
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
        return Index(_metadata(content["tensors"]), checksum)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"checkpoint.load: {path} is damaged: {type(error).__name__}: {error}") from error


class TensorReader:
    """Reads a checkpoint into tensors, by key: each of them whole, or the part that a shard is.

    is_coordinator: of torch's planner, rank 0. Methods raise ValueError that names file and tensor where one is not
    what was saved.
    """

    def __init__(self, folder: Path, index: Index, targets: dict[str, Any], is_coordinator: bool = True) -> None:
        self._folder, self._index = folder, index
        self._planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(targets, index.metadata, is_coordinator=is_coordinator)
        self._items = self._planner.finish_plan(self._planner.create_local_plan()).items

    def read(self, which: Callable[[str], bool]) -> None:
        """Fills the tensors of these keys."""
        for item, data in self._verified(which):
            stored = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dimension, offset, length)
            target = self._planner.resolve_tensor(item).detach()
            target.copy_(stored)
            self._planner.commit_tensor(item, target)

    def verify(self, which: Callable[[str], bool]) -> None:
        """Reads what `read` would, and changes nothing."""
        for _ in self._verified(which):
            pass

    def _verified(self, which: Callable[[str], bool]) -> Iterator[tuple[ReadItem, bytes]]:
        """What has to be read, in the order of the files, and its bytes, whose checksum fits."""
        found = [(self._index.metadata.storage_data[item.storage_index], item) for item in self._items]
        found = [(piece, item) for piece, item in found if which(piece.key.fqn)]
        in_order = sorted(found, key=lambda pair: (pair[0].file, pair[0].start))
        for name, of_file in groupby(in_order, key=lambda pair: pair[0].file):
            with open(self._folder / name, "rb") as file:
                for piece, item in of_file:
                    yield item, _read(file, self._folder / name, piece)


def read_whole(folder: Path, index: Index, key: str) -> Tensor:
    """One tensor, on the CPU. Raises ValueError as a `TensorReader` does."""
    described = index.tensors[key]
    whole = torch.empty(described.size, dtype=described.properties.dtype)
    TensorReader(folder, index, {key: whole}).read(lambda _: True)
    return whole


def _read(file: BinaryIO, path: Path, piece: Piece) -> bytes:
    file.seek(piece.start)
    data = file.read(piece.length)
    if len(data) != piece.length or zlib.crc32(data) != piece.crc32:
        raise ValueError(
            f"checkpoint.load: {piece.key.fqn!r} in {path} is damaged: its checksum does not fit; "
            "an older checkpoint may be whole: pass step="
        )
    return data


class _Summing:
    """A stream to write to that counts and sums what goes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.length = self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.length += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _compact(tensor: Tensor) -> Tensor:
    """On the CPU, without what else its storage holds: torch.save writes whole storages."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _metadata(tensors: dict[str, Any]) -> Metadata:
    """What torch's planners read, from what `finish` wrote."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Piece] = {}
    for key, entry in tensors.items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{key!r} has the dtype {entry['dtype']!r}")
        chunks: list[ChunkStorageMetadata] = []
        for offsets, sizes, file, start, length, crc32 in entry["pieces"]:
            if Path(file).name != file:
                raise ValueError(f"{key!r} is said to be in {file!r}, outside of the checkpoint")
            position = MetadataIndex(key, offsets, len(chunks))
            places[position] = Piece(position, file, start, length, crc32)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        described[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry["size"]), chunks)
    return Metadata(described, storage_data=places)
