"""Device meshes of CPU ranks, each made once: torch keeps its groups, and their threads wake up all the time."""

from __future__ import annotations

import functools

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def named_mesh(**sizes: int) -> DeviceMesh:
    """Of all ranks: `named_mesh(stage=2, tensor=2)`."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@functools.cache
def cpu_mesh() -> DeviceMesh:
    """Of all ranks, in one dimension without a name."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))
