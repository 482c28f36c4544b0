"""The norm of a rank's gradients, plain tensors and shards, and clipping by the norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def squared_norms(groups: Sequence[Sequence[Tensor]], uncounted: Sequence[Tensor] = ()) -> Tensor:
    """The squared norm of each gradient, fp64 [groups, gradients], 0 in the rows of other groups; on their device.

    Shards have one column for all of a placement. groups: the gradients of each norm. uncounted: tensors that are part
    of no norm. A row has a value that is not finite when an element of its gradients or of an uncounted tensor is not.
    Also infinite when a single gradient's norm is beyond fp32. Not finite on every rank of a mesh when one of them
    alone has such a value in what all of them hold alike, or else they would not validate the same steps.
    """
    places: dict[Any, list[list[Tensor]]] = {}  # where gradients are: those of each norm, then the uncounted
    for index, gradients in enumerate((*groups, uncounted)):
        for gradient in gradients:
            where = None
            if isinstance(gradient, DTensor):
                if any(placement.is_partial() for placement in gradient.placements):
                    summed = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
                    gradient = gradient.redistribute(placements=summed)
                where = gradient.device_mesh, gradient.placements
                gradient = gradient.to_local()
            places.setdefault(where, [[] for _ in range(len(groups) + 1)])[index].append(gradient)
    whole, cut = [], []
    for where, lists in places.items():
        device = next(gradient.device for gradients in lists for gradient in gradients)
        *counted, others = (_squares(gradients, device) for gradients in lists)
        found = _unless_finite(others.sum()).expand(len(groups), 1)
        if where is None or all(placement.is_replicate() for placement in where[1]):
            whole += [torch.block_diag(*(each[None] for each in counted)), found]
        else:
            cut.append((torch.stack([each.sum() for each in counted])[:, None] + found, where))
    if not whole and not cut:
        return torch.zeros(len(groups), 0, dtype=torch.float64)
    device = whole[0].device if whole else cut[0][0].device
    columns = [value.to(device) for value in whole]
    # what the sums over shards bring to the other ranks
    found = _unless_finite(sum((each.sum() for each in columns), torch.zeros((), dtype=torch.float64, device=device)))
    for part, (mesh, placements) in cut:
        sums = [placement if placement.is_replicate() else Partial() for placement in placements]  # replicas count once
        shards = DTensor.from_local(part + found.to(part.device), mesh, sums, run_check=False)
        columns.append(shards.full_tensor().to(device))
    return torch.cat(columns, 1)


def exact_sum(squares: Sequence[float]) -> float:
    """The sum, rounded once: the same for any order, and so for any cut of the model into stages."""
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def _squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared norm of each, fp64 [gradients], on this device.

    The norms of single tensors are taken in fp32 at least: infinite where one is beyond that.
    """
    alike: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
        alike.setdefault((gradient.device, torch.promote_types(gradient.dtype, torch.float32)), []).append(gradient)
    norms = [torch.stack(torch._foreach_norm(found, 2, dtype=wide)) for (_, wide), found in alike.items()]
    squares = [norm.to(device, torch.float64) for norm in norms]
    return torch.cat(squares or [torch.zeros(0, dtype=torch.float64, device=device)]).square()


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
