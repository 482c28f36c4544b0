"""From the timelines of measured steps, and what the ranks know of their chunks, to costs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import mean, median, median_low
from typing import NamedTuple

import torch

from zbkern.pipeline.runtime.measure.links import Link
from zbkern.pipeline.runtime.slices.sliced_batch import edges
from zbkern.planning.costs.chunks import COMPUTED, Costs
from zbkern.planning.costs.flat import Growth, Growths
from zbkern.planning.costs.layers import LayerCosts, ModelCosts
from zbkern.planning.simulation import step_costs
from zbkern.planning.simulation.timeline import Timeline

AS_FAST = 0.05  # ranks whose speeds differ by less are equal: times vary as much
SLICES = (1, 7, 8)  # of 16 tokens and more: the first tells the overhead, the others attention
# in which layers of one kind are equal
_TIMES = (*COMPUTED, "network_forward", "network_backward")


class MeasuredChunk(NamedTuple):
    """What a chunk's rank knows of it: bytes, the name of a layer, and of what it shares with others; times."""

    activation: int
    held: float
    static: float
    output: int
    transfer: float
    recomputes: bool  # whether it has parts that an R runs again
    kept: int  # by an F with such an R
    output_again: int  # of the output, what that R computes again
    name: str
    tied: str | None
    within: float  # ms of a forward in its layers, and besides them
    besides: float
    kind: int  # the same for layers that do the same work
    carried: int  # bytes that a sequence keeps for its later slices; 0 where not asked for
    carried_gradients: int  # bytes of its gradients
    tokens: int | None  # of a sequence, where the rank knows
    network_forward: float  # ms of an F in which it waits for collectives, and of a B
    network_backward: float
    collectives: float  # of an F or a B


class Measurements(NamedTuple):
    """The steps of every kind, in milliseconds, the same on all ranks; and what their ranks know of the chunks."""

    chunks: list[MeasuredChunk]
    link: Link | None  # None where not asked for
    separate: list[Timeline]  # all F, all B, all W
    merged: list[Timeline]  # the same with all W of a chunk at once
    fused: list[Timeline]  # with BW
    recomputing: list[Timeline] | None = None  # with an R of named parts; None where none were asked for
    sliced: list[Timeline] | None = None  # with every sequence in slices; None where not asked for
    packed: list[Timeline] | None = None  # with the rows as packs; None where not asked for
    packs: list[list[int]] | None = None  # of each row, the lengths of its sequences


def chunk_costs(steps: Measurements) -> Costs:
    """What `profile` returns."""
    chunks, count = steps.chunks, len(steps.chunks)
    alone, merged, fused = (step_costs.costs(t).per_chunk(count) for t in (steps.separate, steps.merged, steps.fused))
    overhead = [max(0.0, both - bw) for both, bw in zip(alone.fused, fused.fused, strict=True)]
    microbatches = steps.separate[0].schedule.microbatches
    share = microbatches / max(1, microbatches - 1)  # of m W in a row, m - 1 follow another one
    saving = [min(w, max(0.0, w - together) * share) for w, together in zip(alone.weight, merged.weight, strict=True)]
    costs = replace(
        step_costs.costs(steps.separate),
        communication=communication(steps.separate, count),
        message=[chunk.output for chunk in chunks[:-1]],
        activation=[chunk.activation for chunk in chunks],
        held=[chunk.held for chunk in chunks],
        static=[chunk.static for chunk in chunks],
        checkpoint=[0, *(chunk.output for chunk in chunks[:-1])],
        split_overhead=overhead,
        merge_saving=saving,
        network_forward=[min(c.network_forward, time) for c, time in zip(chunks, alone.forward, strict=True)],
        network_backward=[min(c.network_backward, time) for c, time in zip(chunks, alone.backward, strict=True)],
        collectives=[chunk.collectives for chunk in chunks],
        copy_size=max(chunk.transfer for chunk in chunks),
        memory_unit="bytes",
    )
    if steps.sliced is not None:
        costs = _with_slices(costs, steps.sliced, chunks)
    if steps.packed is not None:
        costs = _with_packs(costs, steps)
    if steps.recomputing is None:
        return costs
    lengths = step_costs.costs(steps.recomputing).per_chunk(count).recompute
    return replace(
        costs,
        recompute=[length if chunk.recomputes else 0.0 for length, chunk in zip(lengths, chunks, strict=True)],
        checkpoint=[chunk.kept for chunk in chunks],
    )


def _with_slices(costs: Costs, sliced: Sequence[Timeline], chunks: Sequence[MeasuredChunk]) -> Costs:
    """The costs, with what matters to slices besides."""
    tokens, flat, times = chunks[0].tokens, costs.per_chunk(len(chunks)), step_costs.medians(sliced)
    assert tokens is not None
    lengths = sliced[0].schedule.slices
    places = [*edges("profile", tokens, lengths), (0, tokens)]

    def parts(kind: str, wholes: Sequence[float]) -> list[tuple[float, float]]:
        return [
            overhead_and_attention(places, [*(times[kind, at, slice] for slice in range(len(lengths))), whole])
            for at, whole in enumerate(wholes)
        ]

    forward, backward = parts("F", flat.forward), parts("B", flat.backward)
    return replace(
        costs,
        attention_forward=[min(rising, whole) for (_, rising), whole in zip(forward, flat.forward, strict=True)],
        attention_backward=[min(rising, whole) for (_, rising), whole in zip(backward, flat.backward, strict=True)],
        overhead=[(f + b) / 2 for (f, _), (b, _) in zip(forward, backward, strict=True)],
        carried=[min(chunk.carried, chunk.activation) for chunk in chunks],
        carried_gradients=[chunk.carried_gradients for chunk in chunks],
        tokens=tokens,
    )


def _with_packs(costs: Costs, steps: Measurements) -> Costs:
    """The costs, with what F and B of packs took longer than their sequences' tokens and pairs of them explain."""
    packs, count = steps.packs, len(steps.chunks)
    assert packs is not None
    assert costs.tokens is not None
    assert steps.packed is not None
    times, growths = step_costs.medians(steps.packed), Growths.of(costs.per_chunk(count))
    tokens = mean(map(sum, packs)) / costs.tokens
    pairs = mean(sum(length * length for length in pack) for pack in packs) / costs.tokens**2
    between = mean(sum(pack) ** 2 for pack in packs) / costs.tokens**2 - pairs

    def masked(kind: str, growth: Growth) -> list[float]:
        own = growth.at(tokens, pairs)
        return [max(0.0, times[kind, at, 0] - own[at]) / between for at in range(count)]

    return replace(costs, masked_forward=masked("F", growths.forward), masked_backward=masked("B", growths.backward))


def overhead_and_attention(places: Sequence[tuple[int, int]], times: Sequence[float]) -> tuple[float, float]:
    """Overhead, and attention of the last place, of passes of tokens in these places that took so long.

    Of overhead + linear (b - a) + attention (b^2 - a^2), the least squares of relative errors.
    """
    whole = places[-1][1]
    terms = torch.tensor([[1, (b - a) / whole, (b * b - a * a) / whole**2] for a, b in places], dtype=torch.float64)
    scale = torch.tensor([[max(time, 1e-6)] for time in times], dtype=torch.float64)
    overhead, _, attention = (
        torch.linalg.lstsq(terms / scale, torch.ones_like(scale)).solution.clamp(min=0)[:, 0].tolist()
    )
    return overhead, attention


def layer_costs(steps: Measurements) -> ModelCosts:
    """What `profile_layers` returns: every chunk is a layer, and those of one kind get the medians of their times."""
    assert steps.link is not None
    costs = chunk_costs(steps)
    alike = _alike(steps.chunks)
    flat, owners = costs.per_chunk(len(steps.chunks)), steps.separate[0].schedule.placement
    times = [sum(each) for each in zip(flat.forward, flat.backward, flat.weight, strict=True)]
    speeds = speeds_of(times, alike, owners)

    def medians(values: Sequence[float]) -> tuple[float, ...]:
        """As a rank of speed 1 takes them."""
        return _medians([value * speeds[rank] for value, rank in zip(values, owners, strict=True)], alike)

    flat = flat._replace(**{name: medians(getattr(flat, name)) for name in _TIMES})
    within, besides = (medians([getattr(chunk, name) for chunk in steps.chunks]) for name in ("within", "besides"))
    forward = [max(inside, f - outside) for inside, f, outside in zip(within, flat.forward, besides, strict=True)]
    layers = [
        LayerCosts(
            name=chunk.name,
            forward=forward[at],
            backward=flat.backward[at],
            weight=flat.weight[at],
            activation=flat.activation[at],
            held=flat.held[at],
            split_overhead=max(0.0, flat.backward[at] + flat.weight[at] - flat.fused[at]),
            merge_saving=flat.merge_saving[at],
            output=chunk.output,
            static=flat.static[at],
            tied=chunk.tied,
            recompute=flat.recompute[at] if steps.recomputing else None,
            checkpoint=chunk.kept if steps.recomputing else None,
            output_again=chunk.output_again,
            attention_forward=min(flat.attention_forward[at], forward[at]),
            attention_backward=min(flat.attention_backward[at], flat.backward[at]),
            overhead=flat.overhead[at],
            carried=flat.carried[at],
            carried_gradients=flat.carried_gradients[at],
            network_forward=min(flat.network_forward[at], forward[at]),
            network_backward=flat.network_backward[at],
            collectives=flat.collectives[at],
        )
        for at, chunk in enumerate(steps.chunks)
    ]
    overhead = median(chunk.besides for chunk in steps.chunks)
    latency, bandwidth = steps.link
    return ModelCosts(
        tuple(layers),
        latency=latency,
        bandwidth=bandwidth,
        forward_overhead=overhead,
        copy_size=costs.copy_size,
        tokens=costs.tokens,
        speeds=None if {*speeds} == {1.0} else speeds,
        time_unit="ms",
        memory_unit="bytes",
    )


def speeds_of(times: Sequence[float], alike: Sequence[Hashable], owners: Sequence[int]) -> tuple[float, ...]:
    """The speed of every rank, from what each layer takes on its rank: 1 for the usual one.

    Layers that are alike are compared with the median of their ranks, the faster of two. A rank without layers that
    others have, and one whose speed differs by less than noise, has 1.
    """
    of_ranks: dict[Hashable, dict[int, list[float]]] = {}
    for key, rank, time in zip(alike, owners, times, strict=True):
        of_ranks.setdefault(key, {}).setdefault(rank, []).append(time)
    taken, usual = ([0.0] * (max(owners) + 1) for _ in range(2))
    for each in of_ranks.values():
        own = {rank: median(found) for rank, found in each.items()}
        if len(own) > 1:
            for rank, time in own.items():
                taken[rank] += time * len(each[rank])
                usual[rank] += median_low(own.values()) * len(each[rank])
    speeds = [u / t if t and u else 1.0 for u, t in zip(usual, taken, strict=True)]
    return tuple(1.0 if abs(speed - 1) < AS_FAST else round(min(max(speed, 0.01), 100.0), 3) for speed in speeds)


def _alike(chunks: Sequence[MeasuredChunk]) -> list[Hashable]:
    """Equal where layers take equally long: of one kind with outputs of one size. The first, which gives no gradient of
    its input, and the last, which computes the loss, are like no other."""
    ends = (0, len(chunks) - 1)
    return [at if at in ends else (chunk.kind, chunk.output) for at, chunk in enumerate(chunks)]


def _medians(values: Sequence[float], alike: Sequence[Hashable]) -> tuple[float, ...]:
    """In the place of each value the median of those alike."""
    together: dict[Hashable, list[float]] = {}
    for key, value in zip(alike, values, strict=True):
        together.setdefault(key, []).append(value)
    return tuple(median(together[key]) for key in alike)


def communication(timelines: Sequence[Timeline], chunks: int) -> float | list[float]:
    """The least time over all edges where they are alike, which noise only adds to; else one per edge."""
    hops = step_costs.hops(timelines)
    least = min(hops.values(), default=0.0)
    if max(hops.values(), default=0.0) <= 2 * least:
        return least
    return [hops.get(edge, least) for edge in range(chunks - 1)]
