"""Measures `Costs` and `ModelCosts` on the machine at hand, by running real chunks or layers on their real ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zbkern.pipeline.runtime.measure.measured_costs import chunk_costs, layer_costs
from zbkern.pipeline.runtime.measure.probe_steps import ProbeSteps
from zbkern.pipeline.runtime.options import ProfileOptions
from zbkern.pipeline.runtime.slices.sliced_batch import LossFn
from zbkern.pipeline.transport.base import Transport
from zbkern.pipeline.transport.connect import or_alone
from zbkern.pipeline.transport.distributed import meet
from zbkern.planning.costs.chunks import Costs
from zbkern.planning.costs.layers import ModelCosts

Group = dist.ProcessGroup | Transport | None


def profile(
    modules: torch.nn.Module | Iterable[torch.nn.Module],
    placement: Sequence[int],
    loss_fn: LossFn | None,
    inputs: Any = None,
    targets: Any = None,
    microbatches: int = 4,
    group: Group = None,
    device: torch.device | str | None = None,
    side: Any = None,
    options: ProfileOptions | None = None,
) -> Costs:
    """Costs of this pipeline, the same on every rank: times in milliseconds, memory in bytes; collective.

    Args:
        modules: this rank's chunks, converted.
        placement: the rank of each chunk in model order.
        loss_fn, group, device: as for `Pipeline`.
        inputs, targets, side: as for its `step`, of `microbatches` microbatches.
        options: how it is measured (`ProfileOptions`).

    Times are medians over microbatches and steps, with all ranks busy: of F, B and W apart, of fused BW
    (`split_overhead`), and of W that are merged (`merge_saving`); rank 0 logs a warning where they spread too far to
    plan with. communication is one number, or one per edge where one takes more than twice as long as another.
    Gradients, buffers (running statistics) and random numbers are left as they were. Under tensor parallelism, memory
    is that of this rank's part, and every pipeline measures times of its own: give all of them the schedule planned for
    one. Raises TypeError or ValueError as a `Pipeline` does.
    """
    group = or_alone(group) if len({*placement}) == 1 else group
    batch = inputs, targets, side
    steps = ProbeSteps("profile", batch, microbatches, loss_fn, group, device, options or ProfileOptions())
    return chunk_costs(steps.run(modules, tuple(placement)))


def profile_layers(
    layers: Mapping[str, torch.nn.Module],
    loss_fn: LossFn | None = None,
    inputs: Any = None,
    targets: Any = None,
    microbatches: int = 4,
    group: Group = None,
    device: torch.device | str | None = None,
    side: Any = None,
    options: ProfileOptions | None = None,
) -> ModelCosts:
    """Costs of every layer, from which `plan` cuts the model into chunks; the same on every rank; collective.

    Args:
        layers: this rank's, by name, converted: each takes what the one before returns, across ranks, too, so that
            ranks hold any cut of the model; with one rank, all layers. For a model of the transformers library
            `layer_chunks` makes them.
        loss_fn, targets: for the rank of the last layer.
        inputs, microbatches, group, device, side, options: as for `profile`. Parts that are recomputed may be whole
            layers: their names here begin with the layer's own, unless the layer is one of `layer_chunks`, which have
            those of the model.

    latency and bandwidth are measured between every rank and the next, with messages of one number and of the most that
    a layer sends, and are those of the slowest link. Without a second rank there is no link, and messages take no time.
    forward_overhead is what a forward of one of `layer_chunks` takes besides its layer; the layers' times do not have
    it. Layers with the same classes, settings, parameters and size of output take equally long, the median of their
    times; the first and the last, which gives no gradient of its input and which computes the loss, are apart. Where
    ranks take 5% longer or shorter for such layers than the median rank does, speeds has that of every rank, and layers
    have the times of a rank of speed 1. Layers are tied (`LayerCosts.tied`) that declare a shared parameter, as
    `layer_chunks` do, on whichever ranks they are, or that share one on a rank. Raises TypeError or ValueError as
    `profile` does.
    """
    group = or_alone(group)
    batch = inputs, targets, side
    steps = ProbeSteps("profile_layers", batch, microbatches, loss_fn, group, device, options or ProfileOptions())
    counts = group.gather(len(layers)) if isinstance(group, Transport) else meet(group, len(layers))
    placement = tuple(rank for rank, count in enumerate(counts) for _ in range(count))
    return layer_costs(steps.run(layers.values(), placement, tuple(layers)))
