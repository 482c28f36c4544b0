"""The norm of a rank's gradients, plain tensors and shards, and clipping by the norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from zbkern.pipeline.transport.tensors import local_part


def check_max_norm(caller: str, max_norm: Any) -> None:
    """Raises TypeError for what is not a number, and ValueError for one that is not above 0."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
        raise TypeError(f"{caller}: max_norm must be a number above 0; got {max_norm!r}; pass the largest norm allowed")
    if not float(max_norm) > 0:
        raise ValueError(f"{caller}: max_norm must be above 0; got {max_norm}; pass math.inf to clip nothing")


def sum_of_squares(gradients: Sequence[Tensor], uncounted: Sequence[Tensor] = ()) -> Tensor:
    """The sum of the squares of all elements, fp64 [], on the device of the gradients; not finite when one is not.

    uncounted: tensors that are not part of the sum, except that it is not finite when one of them is not.
    Also infinite when a single gradient's norm is beyond the range of fp32. Not finite on every rank of a mesh when one
    of them alone has such a value in what all of them hold alike, or else they would not validate the same steps.
    """
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for counted, gradient in (*((True, gradient) for gradient in gradients), *((False, each) for each in uncounted)):
        where = None
        if isinstance(gradient, DTensor):
            if any(placement.is_partial() for placement in gradient.placements):
                summed = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
                gradient = gradient.redistribute(placements=summed)
            where = gradient.device_mesh, gradient.placements
            gradient = gradient.to_local()
        kinds.setdefault((where, counted), []).append(gradient)
    whole, cut = [], []
    for (where, counted), alike in kinds.items():
        total = _squared_norm(alike) if counted else _unless_finite(_squared_norm(alike))
        if where is None or all(placement.is_replicate() for placement in where[1]):
            whole.append(total)
        else:
            cut.append((total, where))
    if not whole and not cut:
        return torch.zeros((), dtype=torch.float64)
    device = whole[0].device if whole else cut[0][0].device
    result = sum((value.to(device) for value in whole), torch.zeros((), dtype=torch.float64, device=device))
    found = _unless_finite(result)  # what the sums over shards bring to the other ranks
    for part, (mesh, placements) in cut:
        sums = [placement if placement.is_replicate() else Partial() for placement in placements]  # replicas count once
        shards = DTensor.from_local(part + found.to(part.device), mesh, sums, run_check=False)
        result = result + shards.full_tensor().to(device)
    return result


def _squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of all elements, fp64 [], on the first one's device.

    The norms of single tensors are taken in fp32 at least: infinite where one is beyond that.
    """
    alike: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
        alike.setdefault((gradient.device, torch.promote_types(gradient.dtype, torch.float32)), []).append(gradient)
    device, _ = next(iter(alike))
    norms = [torch.stack(torch._foreach_norm(found, 2, dtype=wide)) for (_, wide), found in alike.items()]
    return torch.cat([norm.to(device, torch.float64) for norm in norms]).square().sum()


def _unless_finite(value: Tensor) -> Tensor:
    """An infinite value or NaN, 0 for all others."""
    return torch.where(value.isfinite(), 0.0, value)


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What gradients of this norm are multiplied by: at most 1; as torch.nn.utils.clip_grad_norm_ has it, in fp32.

    Never grows with the norm: what says "clip" for a part of the gradients says so for all of them.
    """
    if max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, (max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6)).item())


def scale_gradients_(gradients: list[Tensor], factor: float) -> None:
    """Multiplies the gradients in place; of a DTensor, in any placement, its local part."""
    if factor == 1 or not gradients:
        return
    with torch.no_grad():
        torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)
