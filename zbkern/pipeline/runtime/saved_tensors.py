"""What autograd saves of one microbatch in one chunk, in a place of our own: it can be offloaded, or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zbkern.pipeline.runtime.storages import Place, Storages, Travel


class Saved:
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
    """Inside `saving`, whatever autograd saves, and in `storages` its memory, with what else a microbatch keeps."""

    travel: Travel | None = None  # of those that are offloaded

    def __init__(self, storages: Storages) -> None:
        self.storages = storages

    @property
    def nbytes(self) -> int:
        """Of what is saved on the device now."""
        return self.storages.nbytes

    def saving(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: Tensor) -> Saved:
        return Saved(tensor, self.storages.place(tensor))


class OffloadedTensors(SavedTensors):
    """The same of a forward whose tensors go to the host, as soon as enough have been saved for a transfer.

    streams: the forward itself waits for transfers, so that it holds no more than two at once: the one that it fills
    and the one that is copied.
    """

    def __init__(self, travel: Travel, streams: bool) -> None:
        super().__init__(travel.storages)
        self.travel: Travel = travel
        self._streams = streams
        self._saved: list[Saved] = []  # those on the device

    def end_offload(self, but: int = 0) -> None:
        """Waits for all transfers to the host but so many, and gives up the tensors on the device."""
        self.travel.end(but)
        here, self._saved = self._saved, []
        for saved in here:
            if saved.place is None or not saved.place.away:
                self._saved.append(saved)
            else:
                saved.check()
                saved.tensor = None

    def _pack(self, tensor: Tensor) -> Saved:
        if self.travel.begin_if_full() and self._streams:  # before this one, when whatever wrote the others has ended
            self.end_offload(but=1)
        self._saved.append(super()._pack(tensor))
        return self._saved[-1]


class Filling:
    """Inside `filling`, what autograd saves fills the places that were left for it, in their order."""

    def __init__(self, places: Sequence[Saved], storages: Storages) -> None:
        self._places, self._storages = places, storages
        self._filled = 0

    def filling(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._fill, unpack)

    def check(self, forward: str) -> None:
        """Raises RuntimeError where the second forward has saved other tensors than the first."""
        if self._filled != len(self._places):
            raise RuntimeError(
                f"{forward} saved {len(self._places)} tensors for backward, and {self._filled} when it ran again: "
                "a module whose forward depends on anything but its inputs, parameters and torch's random numbers "
                "cannot be recomputed"
            )

    def _fill(self, tensor: Tensor) -> Saved:
        self._storages.place(tensor)
        self._filled += 1
        if self._filled > len(self._places):
            return Saved(tensor, None)
        saved = self._places[self._filled - 1]
        saved.fill(tensor, None)
        return saved


class RecomputedTensors:
    """The same for a forward that saves nothing: inside `saving` only places are kept, which `filling` fills.

    kept: what the chunk was given, meanwhile; storages: for what is computed again.
    """

    travel = None

    def __init__(self, kept: Storages, storages: Storages) -> None:
        self._kept, self._storages = kept, storages
        self._saved: list[Saved] = []
        self._filling: Filling | None = None

    @property
    def nbytes(self) -> int:
        return (self._kept if self._filling is None else self._storages).nbytes

    def saving(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._leave, unpack)

    def filling(self) -> AbstractContextManager[None]:
        self._filling = Filling(self._saved, self._storages)
        return self._filling.filling()

    def check(self) -> None:
        """Raises RuntimeError where the second forward has saved other tensors than the first."""
        assert self._filling is not None
        self._filling.check("the forward")

    def _leave(self, tensor: Tensor) -> Saved:
        self._saved.append(Saved(None, None))
        return self._saved[-1]


def unpack(saved: Saved) -> Tensor:
    saved.check()
    if saved.tensor is not None:
        return saved.tensor
    if saved.place is None:
        raise RuntimeError(
            "backward asks for a tensor that is recomputed later: a chunk that runs a backward within its forward "
            "cannot be recomputed"
        )
    return saved.place.tensor
