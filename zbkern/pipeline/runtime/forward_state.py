"""What forwards change besides activations, saved before forwards that may have to be run again, or are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch


class RandomState:
    """The random numbers that come next: torch's on the CPU and on one device, and Python's."""

    def __init__(self, device: torch.device) -> None:
        self._random = torch.get_rng_state(), random.getstate()
        self._cuda = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        if self._cuda is not None:
            device, state = self._cuda
            torch.cuda.set_rng_state(state, device)


class ForwardState:
    """What forwards change besides activations: buffers, written in place or replaced, and random numbers."""

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        self._entries = [(part._buffers, dict(part._buffers)) for module in modules for part in module.modules()]
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        self._copies = [buffer.clone() for buffer in self._buffers]
        self._versions = [buffer._version for buffer in self._buffers]
        self._random = RandomState(device)

    def restore_after_recompute(self) -> None:
        """The same for a forward that ran again; only buffers that it wrote, which no backward waits to read."""
        for present, entries in self._entries:
            present.update(entries)
        with torch.no_grad():
            for buffer, copy, version in zip(self._buffers, self._copies, self._versions, strict=True):
                if buffer._version != version:
                    buffer.copy_(copy)
        self._random.restore()

    def restore(self) -> None:
        """Everything as it was when this was made; casts of weights by autocast are made anew."""
        for present, entries in self._entries:
            present.update(entries)
        with torch.no_grad():
            for buffer, copy in zip(self._buffers, self._copies, strict=True):
                buffer.copy_(copy)
        self._random.restore()
        torch.clear_autocast_cache()
