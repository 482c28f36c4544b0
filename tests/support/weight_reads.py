"""How weights are read by functions that know nothing of an Optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import torch
from torch import Tensor, nn


def saved(chunk: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save([*chunk.parameters()], file)
    file.seek(0)
    return torch.load(file)


READS: dict[str, Callable[[nn.Module], list[Tensor]]] = {  # all parameters
    "state_dict": lambda chunk: list(map(copy.deepcopy(chunk.state_dict()).get, dict(chunk.named_parameters()))),
    "torch.save": saved,
    "deepcopy": lambda chunk: [*copy.deepcopy(chunk).parameters()],
    "clone": lambda chunk: [p.clone() for p in chunk.parameters()],
    ".data": lambda chunk: [p.data.clone() for p in chunk.parameters()],
    "NumPy": lambda chunk: [torch.tensor(p.numpy(force=True)) for p in chunk.parameters()],
    "a list of them": lambda chunk: [*torch._foreach_mul([*chunk.parameters()], 1.0)],
    "one vector": lambda chunk: [nn.utils.parameters_to_vector(chunk.parameters())],
}
