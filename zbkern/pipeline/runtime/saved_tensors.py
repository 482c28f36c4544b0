"""What autograd saves of one microbatch in one chunk, in a place of our own: it can be offloaded, or computed again."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zbkern.pipeline.runtime.host_copies import Copy, CopyLanes
from zbkern.pipeline.runtime.storages import Place, Storages


class _Saved:
    """One saved tensor: itself, or where it is once its storage has moved; neither while it waits to be recomputed."""

    __slots__ = ("place", "tensor", "version")

    def __init__(self, tensor: Tensor | None, place: Place | None) -> None:
        self.fill(tensor, place)

    def fill(self, tensor: Tensor | None, place: Place | None) -> None:
        # detached: a function that saves its own output would be kept alive by it, for ever where no backward runs
        self.tensor, self.place = None if tensor is None else tensor.detach(), place
        self.version = 0 if tensor is None else tensor._version

    def check(self) -> None:
        """Raises as autograd does, which leaves the check to those who save tensors themselves."""
        if self.tensor is not None and self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was modified in place after its "
                "forward; modify a copy"
            )


class SavedTensors:
    """Inside `saving`, whatever autograd saves; excluded: storages that stay (parameters, buffers, the batch).

    nbytes: of what is saved on the device now.
    """

    def __init__(self, device: torch.device, excluded: Collection[int]) -> None:
        self.storages = Storages(device, excluded)
        self._saved: list[_Saved] = []
        self._away = False

    @property
    def nbytes(self) -> int:
        return 0 if self._away else self.storages.nbytes

    def saving(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def begin_offload(self, lanes: CopyLanes) -> Copy:
        return self.storages.begin_offload(lanes)

    def offloaded(self) -> None:
        """The copy to the host has ended: the tensors on the device are given up."""
        for saved in self._saved:
            saved.check()
            if saved.place is not None:
                saved.tensor = None
        self.storages.move()
        self._away = True

    def begin_load(self, lanes: CopyLanes) -> Copy:
        self._away = False
        return self.storages.begin_load(lanes)

    def loaded(self) -> None:
        """The copy to the device has ended."""
        self.storages.move()

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self.storages.place(tensor))
        self._saved.append(saved)
        return saved


class RecomputedTensors:
    """The same for a forward that saves nothing: inside `saving` only places are kept, which `filling` fills in order.

    inputs: what the chunk was given, and what is kept meanwhile.
    """

    def __init__(self, device: torch.device, excluded: Collection[int]) -> None:
        self.kept = Storages(device, excluded)
        self._storages = Storages(device, excluded)
        self._saved: list[_Saved] = []
        self._filled = 0

    @property
    def nbytes(self) -> int:
        return self._storages.nbytes if self._filled else self.kept.nbytes

    def saving(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._leave, _unpack)

    def filling(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._fill, _unpack)

    def check(self) -> None:
        """Raises RuntimeError where the second forward has saved other tensors than the first."""
        if self._filled != len(self._saved):
            raise RuntimeError(
                f"the forward saved {len(self._saved)} tensors for backward, and {self._filled} when it ran again: "
                "a module whose forward depends on anything but its inputs, parameters and torch's random numbers "
                "cannot be recomputed"
            )

    def _leave(self, tensor: Tensor) -> _Saved:
        self._saved.append(_Saved(None, None))
        return self._saved[-1]

    def _fill(self, tensor: Tensor) -> _Saved:
        self._storages.place(tensor)
        self._filled += 1
        if self._filled > len(self._saved):
            return _Saved(tensor, None)
        saved = self._saved[self._filled - 1]
        saved.fill(tensor, None)
        return saved


def _unpack(saved: _Saved) -> Tensor:
    saved.check()
    if saved.tensor is not None:
        return saved.tensor
    if saved.place is None:
        raise RuntimeError(
            "backward asks for a tensor that is recomputed later: a chunk that runs a backward within its forward "
            "cannot be recomputed"
        )
    return saved.place.tensor
