"""Storages of a microbatch's tensors that move to the host and back, each once however many tensors share it.

They move in groups: what was placed between two calls of `begin_offload`. On the way out a storage belongs to the first
group with a tensor in it, as it can go early; on the way back to the last one, as backward needs it first there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zbkern.data_parallel import parameter_groups, unsharded
from zbkern.pipeline.runtime.data_parallel import sharded_roots
from zbkern.pipeline.runtime.host_copies import Copy, CopyLanes

_HOST = torch.device("cpu")


class Storages:
    """The storages of tensors on a device, without the `resident` ones (by `key`), which always stay.

    nbytes: of those that are on the device now. group_bytes: of what was placed since the last `begin_offload`.
    """

    def __init__(self, device: torch.device, resident: Container[int]) -> None:
        self.nbytes = self.group_bytes = 0
        self._device = device
        self._resident = resident
        self._here: dict[int, _Moved] = {}  # by key, which another storage may have once the memory is given back
        self._group: list[_Moved] = []
        self._groups: list[list[_Moved]] = []

    def place(self, tensor: Tensor) -> Place | None:
        """Where this tensor is in one of these storages, which it adds to them; None for one that does not move."""
        tensor = wait_for(tensor)
        if is_traceable_wrapper_subclass(tensor):
            return self._place_wrapper(tensor)
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return None
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.numel() == 0:
            return None
        storage = key(tensor)
        if storage in self._resident:
            return None
        moved = self._here.get(storage)
        if moved is None:
            moved = self._here[storage] = _Moved(tensor)
            self.nbytes += moved.memory.nbytes
            self._add(moved)
        elif not moved.covers(tensor) and moved.other is not None:
            self._add(moved)  # its copy has begun, which may have been too early for this part of it: once more
        moved.group = len(self._groups)
        return _PlaceInStorage(moved, tensor)

    def begin_offload(self, lanes: CopyLanes) -> Transfer:
        """Begins the copy of the present group to the host; `end_offload` gives the device's memory back."""
        group, self._group, self.group_bytes = self._group, [], 0
        self._groups.append(group)
        return Transfer(group, lanes.out.begin([m.copy_to(_HOST, self._device.type == "cuda") for m in group]))

    def end_offload(self, transfer: Transfer) -> None:
        """Waits for the end of the copy: the tensors are in the host's memory."""
        leaving = [moved for moved in transfer.storages if not moved.away]
        transfer.end()
        for moved in leaving:
            del self._here[moved.key]
            moved.away = True
            self.nbytes -= moved.memory.nbytes

    def begin_load(self, lanes: CopyLanes) -> list[Transfer]:
        """Takes memory on the device and begins the copies to it, the last group first."""
        storages = {id(moved): moved for group in self._groups for moved in group}.values()
        transfers = []
        for index in reversed(range(len(self._groups))):
            group = [moved for moved in storages if moved.group == index]
            transfers.append(Transfer(group, lanes.back.begin([m.copy_to(self._device, False) for m in group])))
            for moved in group:
                moved.coming = transfers[-1]
                self.nbytes += moved.memory.nbytes
        return transfers

    def _add(self, moved: _Moved) -> None:
        if moved not in self._group:
            self._group.append(moved)
            self.group_bytes += moved.memory.nbytes

    def _place_wrapper(self, tensor: Any) -> Place | None:
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}  # not all are tensors: a DTensor names its mesh
        places = {name: self.place(part) if isinstance(part, Tensor) else None for name, part in inner.items()}
        moving = {name: place for name, place in places.items() if place is not None}
        return _PlaceInWrapper(tensor, inner, moving, context) if moving else None


class Travel:
    """The way of storages to the host and back: a transfer for every copy_size bytes, and one for the rest.

    began: called with every copy to the host, as it begins.
    """

    def __init__(self, storages: Storages, lanes: CopyLanes, copy_size: int, began: Callable[[Copy], None]) -> None:
        self.storages = storages
        self._lanes, self._copy_size, self._began = lanes, copy_size, began
        self._leaving: list[Transfer] = []

    def begin_if_full(self) -> bool:
        """Begins a transfer to the host where enough waits for it; whether it has."""
        full = self.storages.group_bytes >= self._copy_size
        if full:
            self.begin()
        return full

    def begin(self) -> None:
        """Begins the transfer to the host of what others have not taken."""
        self._leaving.append(self.storages.begin_offload(self._lanes))
        self._began(self._leaving[-1].copy)

    def end(self, but: int = 0) -> None:
        """Waits for all transfers to the host, but for the newest so many."""
        while len(self._leaving) > but:
            self.storages.end_offload(self._leaving.pop(0))

    def begin_load(self) -> list[Transfer]:
        """Begins the transfers to the device, the last first."""
        return self.storages.begin_load(self._lanes)

    def abandon(self) -> None:
        """Waits for copies to the host, whose memory may be given to others then."""
        for transfer in self._leaving:
            transfer.abandon()


class Transfer:
    """Storages that are copied together. copy: how it goes."""

    def __init__(self, storages: Sequence[_Moved], copy: Copy) -> None:
        self.storages = storages
        self.copy = copy

    def end(self) -> None:
        """Waits for the end of the copy; from then on the storages are where it went."""
        self.copy.wait()
        storages, self.storages = self.storages, ()
        for moved in storages:
            moved.move()

    def abandon(self) -> None:
        """Waits until the copy has ended, or has failed: nothing comes of it."""
        with suppress(Exception):
            self.copy.wait()


class Place:
    """Where a tensor is whose storage may move."""

    @property
    def away(self) -> bool:
        """Whether its memory was offloaded, and is loaded again or not: the tensor that was placed is not it then."""
        raise NotImplementedError

    @property
    def tensor(self) -> Tensor:
        """The tensor in the storage's present memory; waits for its load."""
        raise NotImplementedError


class _PlaceInStorage(Place):
    __slots__ = ("_dtype", "_moved", "_offset", "_shape", "_stride")

    def __init__(self, moved: _Moved, tensor: Tensor) -> None:
        self._moved = moved
        self._dtype, self._offset = tensor.dtype, int(tensor.storage_offset())
        self._shape, self._stride = tensor.shape, tensor.stride()

    @property
    def away(self) -> bool:
        return self._moved.away

    @property
    def tensor(self) -> Tensor:
        memory = self._moved.arrived()
        found = torch.empty(0, dtype=self._dtype, device=memory.device)
        return found.set_(memory.untyped_storage(), self._offset, self._shape, self._stride)


class _PlaceInWrapper(Place):
    """Of a tensor that wraps others, such as a DTensor. moving: the places of those that may move, by name."""

    def __init__(self, tensor: Any, inner: Mapping[str, Any], moving: Mapping[str, Place], context: Any) -> None:
        self._kind: Any = type(tensor)
        self._inner = {name: None if name in moving else part for name, part in inner.items()}
        self._moving, self._context = moving, context
        self._shape, self._stride = tensor.shape, tensor.stride()

    @property
    def away(self) -> bool:
        return any(place.away for place in self._moving.values())

    @property
    def tensor(self) -> Tensor:
        inner = {**self._inner, **{name: place.tensor for name, place in self._moving.items()}}
        return self._kind.__tensor_unflatten__(inner, self._context, self._shape, self._stride)


class _Moved:
    """One storage. memory: all of it as bytes, where it is at present; group: the last with a tensor in it."""

    __slots__ = ("_extent", "away", "coming", "group", "key", "memory", "other")

    def __init__(self, tensor: Tensor) -> None:
        self.key, self.group = key(tensor), 0
        self.memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.other: Tensor | None = None  # the copy under way
        self.coming: Transfer | None = None  # to the device
        self.away = False
        self._extent = _extent(tensor)

    def covers(self, tensor: Tensor) -> bool:
        """Whether the tensor is in the part of the storage that others have used; it has used its own from now on."""
        (low, high), (first, last) = self._extent, _extent(tensor)
        self._extent = min(low, first), max(high, last)
        return self._extent == (low, high)

    def copy_to(self, device: torch.device, pinned: bool) -> tuple[Tensor, Tensor]:
        if self.other is None:
            self.other = torch.empty(self.memory.shape, dtype=torch.uint8, device=device, pin_memory=pinned)
        return self.other, self.memory

    def move(self) -> None:
        """The copy is the storage from now on."""
        if self.other is not None:  # else it has moved with the first of two copies
            self.memory, self.other = self.other, None
        self.coming = None

    def arrived(self) -> Tensor:
        """Its memory, after the end of a load."""
        if self.coming is not None:
            self.coming.end()
        return self.memory


class Resident:
    """The keys of storages that stay on the device: of a chunk's parameters and buffers, and of the tensors given.

    FSDP2 makes the parameters that layers compute with in the first forward, so they are looked for when one is asked
    for that is not known.
    """

    def __init__(self, module: torch.nn.Module, tensors: Iterable[Tensor] = ()) -> None:
        self._keys = keys([*module.parameters(), *module.buffers(), *tensors])
        self._roots = list(sharded_roots(module))

    def __contains__(self, storage: object) -> bool:
        if self._roots and storage not in self._keys:
            groups = [group for root in self._roots for group in parameter_groups(root)]
            self._keys |= keys(parameter for group in groups for parameter in unsharded(group))
            if groups and all(len(unsharded(group)) == len(group.fsdp_params) for group in groups):
                self._roots = []  # all are known
        return storage in self._keys


def wait_for(tensor: Any) -> Tensor:
    """The tensor itself, whose memory can be read: a collective's AsyncCollectiveTensor has none of its own."""
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def parts(tensor: Any) -> Iterator[Tensor]:
    """The tensors that have this rank's memory of a tensor: itself, or those that it wraps, as a DTensor does."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, Tensor):
            yield from parts(part)


def key(tensor: Tensor) -> int:
    """A number that tensors have in common that share a storage."""
    return tensor.untyped_storage()._cdata


def keys(tensors: Iterable[Tensor]) -> set[int]:
    """The same of several, for all their parts that have a storage."""
    return {key(part) for tensor in tensors for part in parts(tensor) if part.layout is torch.strided}


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    last = first + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size
