"""Storages of tensors that move to the host and back together, each copied once however many tensors share it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from zbkern.pipeline.runtime.host_copies import Copy, CopyLanes


class Place(NamedTuple):
    """Where a tensor is in a storage that may move."""

    storage: Moved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def tensor(self) -> Tensor:
        """The tensor in the storage's present memory."""
        memory = self.storage.memory
        found = torch.empty(0, dtype=self.dtype, device=memory.device)
        return found.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


class Moved:
    """One storage: `memory` is all of it as bytes, where it is at present."""

    __slots__ = ("memory", "other")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.other: Tensor | None = None  # the copy under way

    def copy_to(self, device: torch.device, pinned: bool) -> tuple[Tensor, Tensor]:
        self.other = torch.empty(self.memory.shape, dtype=torch.uint8, device=device, pin_memory=pinned)
        return self.other, self.memory

    def move(self) -> None:
        """The copy is the storage from now on."""
        assert self.other is not None
        self.memory, self.other = self.other, None


class Storages:
    """The storages of a microbatch's tensors on a device, without those that always stay: `excluded`, by `key`.

    nbytes: of all of them, whether they are on the device or not.
    """

    def __init__(self, device: torch.device, excluded: Collection[int]) -> None:
        self.nbytes = 0
        self._device = device
        self._excluded = excluded
        self._moved: dict[int, Moved] = {}

    def place(self, tensor: Tensor) -> Place | None:
        """Where this tensor is in one of these storages, which it adds to them; None for one that does not move."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return None
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.numel() == 0:
            return None
        storage = key(tensor)
        if storage in self._excluded:
            return None
        if storage not in self._moved:
            self._moved[storage] = Moved(tensor)
            self.nbytes += tensor.untyped_storage().nbytes()
        return Place(self._moved[storage], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def begin_offload(self, lanes: CopyLanes) -> Copy:
        """Begins the copy to the host; after its end `move` gives the device's memory back."""
        host = torch.device("cpu")
        return lanes.out.begin([m.copy_to(host, self._device.type == "cuda") for m in self._moved.values()])

    def begin_load(self, lanes: CopyLanes) -> Copy:
        """Takes memory on the device and begins the copy to it; after its end `move` makes tensors be there."""
        return lanes.back.begin([m.copy_to(self._device, False) for m in self._moved.values()])

    def move(self) -> None:
        """After the end of a copy: the tensors are where it went."""
        for moved in self._moved.values():
            moved.move()


def key(tensor: Tensor) -> int:
    """A number that tensors have in common that share a storage."""
    return tensor.untyped_storage()._cdata


def keys(tensors: Iterable[Tensor]) -> set[int]:
    """The same of several, but for those that have no storage of their own (subclasses)."""
    return {key(tensor) for tensor in tensors if tensor.layout is torch.strided}
