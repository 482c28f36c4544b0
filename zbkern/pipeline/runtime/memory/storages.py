"""Storages of a unit's tensors, each once however many tensors share it: counted, and moved to the host and back.

A storage moves as it is: its memory is given back and taken again, and the tensors in it stay what they are. One that
somebody else holds, too, stays on the device. Storages move in transfers: on the way out each belongs to the first with
a tensor in it, as it can go early; on the way back to the last one, as backward needs it first there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zbkern.data_parallel import parameter_groups, unsharded
from zbkern.pipeline.runtime.memory.host_copies import Copy, Lanes
from zbkern.pipeline.runtime.replicas.data_parallel import sharded_roots
from zbkern.pipeline.transport.tensors import arrived
from zbkern.wgrad.storages import storage_key


class Storage:
    """One storage. tensors: those in it that are known; transfer: the number of the last with a tensor in it."""

    __slots__ = ("_extent", "_host", "_memory", "coming", "nbytes", "tensors", "transfer")

    def __init__(self, tensor: Tensor) -> None:
        self._memory = tensor.untyped_storage()
        self._host: Tensor | None = None
        self._extent = _extent(tensor)
        self.nbytes, self.transfer = self._memory.nbytes(), 0
        self.tensors: list[weakref.ref[Tensor]] = []
        self.coming: Copy | None = None  # to the device

    @property
    def away(self) -> bool:
        """Whether its memory was given back."""
        return self._memory.nbytes() < self.nbytes

    def known_tensors(self) -> int:
        """How many of `tensors` are still alive."""
        return len({id(tensor) for reference in self.tensors if (tensor := reference()) is not None})

    def covers(self, tensor: Tensor) -> bool:
        """Whether the tensor is in the part of the storage that others have used; it has used its own from now on."""
        (low, high), (first, last) = self._extent, _extent(tensor)
        self._extent = min(low, first), max(high, last)
        return self._extent == (low, high)

    def to_host(self) -> tuple[Tensor, Tensor]:
        """Destination and source of a copy."""
        if self._host is None:
            pinned = self._memory.device.type == "cuda"
            self._host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._host, self._bytes()

    def give_back(self) -> bool:
        """Frees the device's memory, unless somebody holds it whose tensors are not known."""
        users = torch._C._storage_Use_Count(self._memory._cdata) - 1  # without this
        if not self._memory.resizable() or users > self.known_tensors():
            return False
        self._memory.resize_(0)
        return True

    def to_device(self) -> tuple[Tensor, Tensor]:
        """Takes memory again. Destination and source of a copy."""
        assert self._host is not None
        self._memory.resize_(self.nbytes)
        return self._bytes(), self._host

    def arrive(self) -> None:
        """Waits for its load."""
        if self.coming is not None:
            self.coming.wait()
            self.coming = self._host = None

    def _bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._memory.device).set_(self._memory)


class Saved:
    """One tensor that autograd saves; None while it waits to be recomputed. storages: those of it that may be away."""

    __slots__ = ("storages", "tensor", "version")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.storages: Sequence[Storage] = ()
        self.version = 0

    def fill(self, tensor: Tensor) -> Tensor:
        # detached: a function that saves its own output would be kept alive by it, for ever where no backward runs
        self.tensor = arrived(tensor).detach()
        self.version = self.tensor._version
        return self.tensor

    def get(self) -> Tensor:
        """The tensor, once it has been loaded. Raises RuntimeError where it was modified, as autograd does, which
        leaves the check to those who save tensors themselves."""
        if self.tensor is None:
            raise RuntimeError(
                "backward asks for a tensor that is recomputed later: a chunk that runs a backward within its forward "
                "cannot be recomputed"
            )
        for storage in self.storages:
            storage.arrive()
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was modified in place after its "
                "forward; modify a copy"
            )
        return self.tensor


class Storages:
    """The storages of one unit on a device, without the `resident` ones (by their keys), which always stay.

    began: called with every copy to the host; None where nothing goes there. nbytes: of those that are on the device
    now. loads: the copies back.
    """

    def __init__(self, lanes: Lanes, resident: Container[int], began: Callable[[Copy], object] | None = None) -> None:
        self.nbytes = 0
        self.loads: list[Copy] = []
        self.lanes, self.began, self._resident = lanes, began, resident
        self._known: dict[int, Storage] = {}  # by key, which no other storage has while this one lives
        self._next: list[Storage] = []  # of the next transfer to the host
        self._transfers = 0  # begun
        self._leaving: list[tuple[Sequence[Storage], Copy]] = []
        self._copied: list[Storage] = []  # and not given back, because others hold them, too

    @property
    def sizes(self) -> list[int]:
        """Bytes of every storage, in the order in which they came."""
        return [storage.nbytes for storage in self._known.values()]

    def add(self, tensor: Tensor) -> list[Storage]:
        """The storages that a tensor is in, without those that stay."""
        storages = []
        for part in parts(tensor):
            if (
                part.layout is torch.strided
                and part.device == self.lanes.device
                and storage_key(part) not in self._resident
            ):
                storages.append(self._add(part))
        return storages

    def save(self, tensor: Tensor, streams: bool = False) -> Saved:
        """Takes what autograd saves. streams: a full transfer waits for the one before it, so that no more than two
        are on the device: the one that is filled and the one that is copied."""
        # before this one is added, when whatever wrote the others has ended
        if self.begin_if_full() and streams:
            self.end_offload(but=1)
        saved = Saved()
        saved.storages = self.add(saved.fill(tensor))
        return saved

    def drop_unused(self) -> None:
        """Drops those without a tensor, as of parts of a graph that lead to no output, of which nothing has gone."""
        if not self._transfers:
            self._known = {key: storage for key, storage in self._known.items() if storage.known_tensors()}
            self._next = [*self._known.values()]
            self.nbytes = sum(self.sizes)

    def begin_if_full(self) -> bool:
        """Begins a transfer to the host where enough waits for it; whether it has."""
        full = self.began is not None and sum(storage.nbytes for storage in self._next) >= self.lanes.copy_size
        if full:
            self.begin_offload()
        return full

    def begin_offload(self) -> None:
        """Begins the transfer to the host of what others have not taken; no-op where storages are counted only."""
        if self.began is not None:
            group, self._next = self._next, []
            self._leaving.append((group, self.lanes.out.begin([storage.to_host() for storage in group])))
            self._transfers += 1
            self.began(self._leaving[-1][1])

    def end_offload(self, but: int = 0) -> None:
        """Waits for all transfers to the host except the newest so many, and gives the device's memory back."""
        while len(self._leaving) > but:
            group, copy = self._leaving.pop(0)
            copy.wait()
            new = [storage for storage in group if storage not in self._copied]
            self._copied += new
            self.nbytes -= sum(storage.nbytes for storage in new)
        self.give_back()

    def give_back(self) -> None:
        """Gives back the memory of what has been copied and nobody else holds any more, a message under way, say."""
        if self._copied:
            again = {*self._next, *(storage for group, _ in self._leaving for storage in group)}
            self._copied = [storage for storage in self._copied if storage in again or not storage.give_back()]

    def begin_load(self, began: Callable[[Copy], object]) -> None:
        """Takes memory on the device and begins the copies to it, the last transfer first."""
        self.nbytes += sum(storage.nbytes for storage in self._copied)  # which have stayed
        self._copied = []
        away = [storage for storage in self._known.values() if storage.away]
        for index in reversed(range(self._transfers)):
            if group := [storage for storage in away if storage.transfer == index]:
                copy = self.lanes.back.begin([storage.to_device() for storage in group])
                self.nbytes += sum(storage.nbytes for storage in group)
                self.loads.append(copy)
                for storage in group:
                    storage.coming = copy
                began(copy)

    def arrive(self, tensor: Tensor) -> None:
        """Waits for the loads of what a tensor is in."""
        for key in keys([tensor]) & self._known.keys():
            self._known[key].arrive()

    def abandon(self) -> None:
        """Waits until all copies have ended, or have failed: nothing comes of them."""
        for copy in (*self.loads, *(copy for _, copy in self._leaving)):
            with suppress(Exception):
                copy.wait()

    def _add(self, tensor: Tensor) -> Storage:
        key = storage_key(tensor)
        storage = self._known.get(key)
        if storage is None:
            storage = self._known[key] = Storage(tensor)
            self.nbytes += storage.nbytes
            self._next.append(storage)
        elif not storage.covers(tensor) and storage not in self._next:
            # its copy has begun, which may have been too early for this part of it: once more
            self._next.append(storage)
        storage.tensors.append(weakref.ref(tensor))
        storage.transfer = self._transfers
        return storage


class Resident:
    """The keys of storages that stay on the device: of a chunk's parameters and buffers, of the tensors given, and
    those in `carried`, which come in a forward.

    FSDP2 makes the parameters that layers compute with in the first forward, so they are looked for when one is asked
    for that is not known.
    """

    def __init__(self, module: torch.nn.Module, tensors: Iterable[Tensor], carried: Container[object]) -> None:
        self._carried = carried
        self._keys = keys([*module.parameters(), *module.buffers(), *tensors])
        self._roots = list(sharded_roots(module))

    def __contains__(self, storage: object) -> bool:
        if self._roots and storage not in self._keys:
            groups = [group for root in self._roots for group in parameter_groups(root)]
            self._keys |= keys(parameter for group in groups for parameter in unsharded(group))
            if groups and all(len(unsharded(group)) == len(group.fsdp_params) for group in groups):
                self._roots = []  # all are known
        return storage in self._keys or storage in self._carried


def parts(tensor: Any) -> Iterator[Tensor]:
    """The tensors that have this rank's memory of a tensor: itself, or those that it wraps, as a DTensor does.

    Waits for a collective that fills them: a DTensor may wrap what is still to arrive.
    """
    tensor = arrived(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, Tensor):
            yield from parts(part)


def keys(tensors: Iterable[Tensor]) -> set[int]:
    """The keys of the storages that tensors are in, wrapped ones included."""
    return {storage_key(part) for tensor in tensors for part in parts(tensor) if part.layout is torch.strided}


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    last = first + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size
