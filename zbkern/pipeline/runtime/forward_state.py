"""What forwards change besides activations, saved before forwards that may have to be run again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch


class ForwardState:
    """What forwards change besides activations: buffers, written in place or replaced, and random numbers."""

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        self._entries = [(part._buffers, dict(part._buffers)) for module in modules for part in module.modules()]
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        self._copies = [buffer.clone() for buffer in self._buffers]
        self._random = torch.get_rng_state(), random.getstate()
        self._cuda = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None

    def restore(self) -> None:
        for present, entries in self._entries:
            present.update(entries)
        with torch.no_grad():
            for buffer, copy in zip(self._buffers, self._copies, strict=True):
                buffer.copy_(copy)
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        if self._cuda is not None:
            device, state = self._cuda
            torch.cuda.set_rng_state(state, device)
