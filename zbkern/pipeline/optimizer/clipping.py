"""Gradient norms over all stages of a pipeline, and clipping by them; weights that several ranks hold count once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from zbkern.pipeline.optimizer.params import local_part
from zbkern.pipeline.transport.connect import check_tied, tied_names
from zbkern.wgrad.accumulation import gradient_of


def grad_norm(
    parameters: Tensor | Iterable[Tensor], group: Any = None, tied: Mapping[str, Tensor] | None = None
) -> float:
    """The 2-norm of the gradients of all ranks' parameters, as if they were one vector; collective.

    parameters: this rank's. group: the pipeline's ranks: a Pipeline, a Transport, a process group, or None for all.
    tied: {name: parameter} of weights that several ranks hold with the same gradient; by default those of which a
    Pipeline has made this the case. They count once, as in one process. Gradients are read from `main_grad` where a
    parameter has one; the norms of single ones are taken in fp32 at least and added up in fp64. Shards (DTensor) count
    as the whole they belong to. NaN or infinite when a gradient is.
    """
    return _grad_norm("grad_norm", _listed("grad_norm", parameters), group, tied)


def _grad_norm(caller: str, parameters: list[Tensor], group: Any, tied: Mapping[str, Tensor] | None) -> float:
    _check_group(caller, group)
    check_tied(caller, tied)
    shared = tied_names(parameters, tied)
    found = [(id(parameter), gradient) for parameter, gradient in _gradients(parameters)]
    own = [gradient for key, gradient in found if key not in shared]
    names = {shared[key]: float(sum_of_squares([gradient])) for key, gradient in found if key in shared}
    tied_ones = [gradient for key, gradient in found if key in shared]
    shards = [gradient for _, gradient in found if isinstance(gradient, DTensor)]
    total, seen, with_shards = 0.0, {}, []
    for value, named, has_shards in _gather((float(sum_of_squares(own, tied_ones)), names, bool(shards)), group):
        total += value
        seen.update(named)
        with_shards.append(has_shards)
    total += sum(seen.values())
    if any(with_shards):  # all ranks of a mesh are to hear of a total that is not finite on one of them
        total += float(_unless_finite(sum_of_squares(shards, [torch.tensor(total, dtype=torch.float64)])))
        if not all(with_shards):
            total = next((value for value in _gather(total, group) if not math.isfinite(value)), total)
    return math.sqrt(total)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    group: Any = None,
    tied: Mapping[str, Tensor] | None = None,
) -> float:
    """Scales the gradients so that their norm over all ranks is at most `max_norm`; returns the norm it was.

    The twin of torch.nn.utils.clip_grad_norm_ for parameters that are spread over the ranks of a pipeline; arguments as
    for `grad_norm`; collective. Gradients whose norm is not finite stay as they are. Raises ValueError for a max_norm
    that is not above 0.
    """
    check_max_norm("clip_grad_norm_", max_norm)
    parameters = _listed("clip_grad_norm_", parameters)
    norm = _grad_norm("clip_grad_norm_", parameters, group, tied)
    scale_gradients_([gradient for _, gradient in _gradients(parameters)], clip_coefficient(norm, max_norm))
    return norm


def check_max_norm(caller: str, max_norm: Any) -> None:
    """Raises TypeError for what is not a number, and ValueError for one that is not above 0."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
        raise TypeError(f"{caller}: max_norm must be a number above 0; got {max_norm!r}; pass the largest norm allowed")
    if not float(max_norm) > 0:
        raise ValueError(f"{caller}: max_norm must be above 0; got {max_norm}; pass math.inf to clip nothing")


def _check_group(caller: str, group: Any) -> None:
    if group is not None and not hasattr(group, "gather"):
        raise TypeError(
            f"{caller}: group must be a Pipeline, a Transport, a process group of the pipeline's ranks, or None for "
            f"all ranks; got {type(group).__name__}"
        )


def _listed(caller: str, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    found = [parameters] if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable) else [*parameters]
    for parameter in found:
        if not isinstance(parameter, Tensor):
            raise TypeError(
                f"{caller}: parameters must be this rank's, as module.parameters() gives them; got "
                f"{type(parameter).__name__} (a Pipeline goes in as group=)"
            )
    return [*{id(parameter): parameter for parameter in found}.values()]  # one may be in several chunks of a rank


def _gradients(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is not None:
            yield parameter, gradient


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
    for part, where in cut:
        result = result + _over_shards(part + found.to(part.device), *where).to(device)
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


def _over_shards(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The sum over the shards of a mesh; replicas count once."""
    sums = [placement if placement.is_replicate() else Partial() for placement in placements]
    return DTensor.from_local(part, mesh, sums, run_check=False).full_tensor()


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


def _gather(value: Any, group: Any) -> list[Any]:
    if group is not None and not isinstance(group, dist.ProcessGroup):  # which has another `gather`, of tensors
        return group.gather(value)
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
