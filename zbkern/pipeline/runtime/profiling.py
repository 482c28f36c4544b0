"""Measures `Costs` and `ModelCosts` on the machine at hand, by running real chunks or layers on their real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbkern.pipeline.runtime.measured_costs import chunk_costs, layer_costs
from zbkern.pipeline.runtime.options import StepOptions
from zbkern.pipeline.runtime.probe_steps import ProbeSteps
from zbkern.pipeline.simulation.costs import COPY_SIZE, Costs
from zbkern.pipeline.simulation.layers import ModelCosts
from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.connect import is_transport
from zbkern.pipeline.transport.local import LocalTransport


def profile(
    modules: Iterable[torch.nn.Module],
    placement: Sequence[int],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    inputs: Any = None,
    targets: Any = None,
    microbatches: int = 4,
    group: dist.ProcessGroup | Transport | None = None,
    device: torch.device | str | None = None,
    repeats: int = 3,
    side: Any = None,
    bytes_per_parameter: float | None = None,
    copy_size: int = COPY_SIZE,
    recompute: Sequence[str | type] = (),
) -> Costs:
    """Costs of this pipeline, the same on every rank: times in milliseconds, memory in bytes; collective.

    modules: this rank's chunks, converted. placement: the rank of each chunk in model order. The others are as for
    `Pipeline` and its `step`, with inputs, targets and side inputs of `microbatches` microbatches. Times are
    medians over microbatches and `repeats` steps after one to warm up, with all ranks busy: of F, B and W apart, of
    fused BW (`split_overhead`), and of W that are merged (`merge_saving`). communication is one number, or one per
    edge where one takes more than twice as long as another. bytes_per_parameter: of a weight, its gradient
    and optimizer states together (`static`), which a rank's memory includes; None for AdamW's two moments, all in the
    weight's dtype. copy_size: that of the `StepOptions` to come; in the costs it is what transfers of these activations
    have, which end with whole tensors. recompute: likewise, the parts of chunks that an R runs again, for the time of
    R and what an F keeps; else an R is a whole F, which keeps what it is given. In a chunk without such a part there is
    nothing to recompute. Gradients and the random state are left as they were; buffers that a forward updates (running
    statistics) are not. Under tensor parallelism, memory is that of this rank's part, and every pipeline measures times
    of its own: give all of them the schedule planned for one. Raises TypeError or ValueError as a `Pipeline` does.
    """
    _check("profile", placement, microbatches, repeats, bytes_per_parameter)
    steps = ProbeSteps(
        function="profile",
        placement=tuple(placement),
        loss_fn=loss_fn,
        inputs=inputs,
        targets=targets,
        side=side,
        microbatches=microbatches,
        repeats=repeats,
        group=_group(group) if len({*placement}) == 1 else group,
        device=device,
        bytes_per_parameter=bytes_per_parameter,
        options=StepOptions(record=True, copy_size=copy_size, recompute=recompute),
    )
    return chunk_costs(steps.run(modules))


def profile_layers(
    layers: Mapping[str, torch.nn.Module],
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    inputs: Any = None,
    targets: Any = None,
    microbatches: int = 4,
    group: dist.ProcessGroup | Transport | None = None,
    device: torch.device | str | None = None,
    repeats: int = 3,
    side: Any = None,
    bytes_per_parameter: float | None = None,
    recompute: Sequence[str | type] = (),
) -> ModelCosts:
    """Costs of every layer, from which `plan` cuts the model into chunks; the same on every rank; collective.

    layers: this rank's, by name, converted: each takes what the one before returns, across ranks, too, so that ranks
    hold any cut of the model; with one rank, all layers. The others are as for `profile`, targets and loss_fn for the
    rank of the last layer. latency and bandwidth are measured between every rank and the next, and the last and the
    first, with messages of one number and of the most that a layer sends: those of the slowest link where these take
    about as long on all, else one per rank (where one takes more than twice as long as another, as between nodes and
    inside one). Without a second rank there is no link, and messages take no time. forward_overhead is what a forward
    of one of `layer_chunks` takes besides its layer; the layers' times do not have it. Layers are tied
    (`LayerCosts.tied`) that declare a shared parameter, as `layer_chunks` do, on whichever ranks they are, or that
    share one on a rank. recompute: parts as for `profile`, which may be whole layers: their names here begin with the
    layer's own, unless the layer is one of `layer_chunks`, which have those of the model. For a model of the
    transformers library `layer_chunks` makes the layers. Raises TypeError or ValueError as `profile` does.
    """
    if not isinstance(layers, Mapping) or not layers:
        raise TypeError(
            f"profile_layers: layers must be a mapping with the module of every name, such as dict(model."
            f"named_children()); got {type(layers).__name__}"
        )
    group = _group(group)
    if is_transport(group):
        counts = group.gather(len(layers))
    else:
        counts = [0] * dist.get_world_size(group)
        dist.all_gather_object(counts, len(layers), group)
    placement = tuple(rank for rank, count in enumerate(counts) for _ in range(count))
    _check("profile_layers", placement, microbatches, repeats, bytes_per_parameter)
    steps = ProbeSteps(
        function="profile_layers",
        placement=placement,
        loss_fn=loss_fn,
        inputs=inputs,
        targets=targets,
        side=side,
        microbatches=microbatches,
        repeats=repeats,
        group=group,
        device=device,
        bytes_per_parameter=bytes_per_parameter,
        options=StepOptions(record=True, recompute=recompute),
        layers=tuple(layers),
    )
    return layer_costs(steps.run(layers.values()))


def _group(group: dist.ProcessGroup | Transport | None) -> dist.ProcessGroup | Transport | None:
    """One process alone needs no torch.distributed."""
    alone = group is None and not (dist.is_available() and dist.is_initialized())
    return LocalTransport.ring(1)[0] if alone else group


def _check(
    function: str, placement: Sequence[int], microbatches: int, repeats: int, bytes_per_parameter: float | None
) -> None:
    ranks = placement if isinstance(placement, Sequence) and not isinstance(placement, str) else [None]
    if not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        raise TypeError(
            f"{function}: placement must be a list of ranks, one per chunk in model order; got {placement!r}"
        )
    for name, value in (("microbatches", microbatches), ("repeats", repeats)):
        if not isinstance(value, int):
            raise TypeError(f"{function}: {name} must be an int; got {value!r}")
        if value < 1:
            raise ValueError(f"{function}: {name} must be at least 1; got {value}")
    if bytes_per_parameter is not None and not isinstance(bytes_per_parameter, (int, float)):
        raise TypeError(f"{function}: bytes_per_parameter must be a number or None; got {bytes_per_parameter!r}")
