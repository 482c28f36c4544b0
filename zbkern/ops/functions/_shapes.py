"""Shapes and dtypes that several functions agree on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def as_rows(tensor: Tensor) -> Tensor:
    """[..., N] as [M, N]."""
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(0).flatten(0, -2)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precisions keep their statistics and partial sums in float32."""
    return torch.promote_types(dtype, torch.float32)


class ShardLayout(NamedTuple):
    """How a DTensor of this shape is cut over the ranks of a mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @staticmethod
    def of(tensor: DTensor) -> ShardLayout:
        return ShardLayout(tensor.device_mesh, tensor.placements, tensor.shape)

    def tensor(self, part: Tensor) -> DTensor:
        """The DTensor of which `part` is this rank's; nothing is copied."""
        from torch.distributed.tensor import DTensor

        stride = tuple([math.prod(self.shape[dimension + 1 :]) for dimension in range(len(self.shape))])
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)
