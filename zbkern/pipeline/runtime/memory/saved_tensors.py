"""What autograd saves of one microbatch in one chunk, in a place of our own: it can be offloaded, or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zbkern.pipeline.runtime.memory.storages import Storage, Storages
from zbkern.pipeline.transport.tensors import wait_for


class Saved:
    """One saved tensor; None while it waits to be recomputed. storages: those of it that may be elsewhere."""

    __slots__ = ("__weakref__", "storages", "tensor", "version")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.storages: Sequence[Storage] = ()
        self.version = 0

    def fill(self, tensor: Tensor) -> Tensor:
        # detached: a function that saves its own output would be kept alive by it, for ever where no backward runs
        self.tensor = wait_for(tensor).detach()
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


class SavedTensors:
    """Inside `saving`, whatever autograd saves, and in `storages` its memory, with what else a microbatch keeps.

    Where storages are offloaded, a transfer begins as soon as enough has been saved for one. streams: the forward
    itself waits for them, so that it holds no more than two at once: the one that it fills and the one that is copied.
    """

    def __init__(self, storages: Storages, streams: bool = False) -> None:
        self.storages = storages
        self._streams = streams

    def saving(self) -> AbstractContextManager[object]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, Saved.get)

    def _pack(self, tensor: Tensor) -> Saved:
        # before this one is added, when whatever wrote the others has ended
        if self.storages.begin_if_full() and self._streams:
            self.storages.end_offload(but=1)
        saved = Saved()
        saved.storages = self.storages.add(saved.fill(tensor))
        return saved
