"""What a model needs at least on every rank, whatever the order of its passes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from zbkern.planning.costs.layers import LayerCosts, ModelCosts
from zbkern.schedules.units import amount, enough

SAVING_CHUNKS = 8  # per rank, at most, in a search that saves memory
_ROUNDS = 50  # of bisection: the least need is found to rounding


class Need(NamedTuple):
    """What the fullest rank holds: all the time, of one microbatch, and of the largest message that it gets."""

    static: float
    activation: float
    message: float = 0.0

    @property
    def total(self) -> float:
        return self.static + self.activation + self.message

    def describe(self, stages: int, unit: str | None) -> str:
        """For an error that says what does not fit."""
        message = f", {amount(self.message, unit)} for a message" if self.message else ""
        return (
            f"in the best cut into {stages} stages of one chunk the fullest rank holds {amount(self.static, unit)} of "
            f"weights, gradients and optimizer states and {amount(self.activation, unit)} for one microbatch"
            f"{message}, {enough(self.total, unit)} in all"
        )


def least_need(costs: ModelCosts, stages: int) -> Need:
    """Of the cut into one chunk per rank whose fullest rank holds least, with one microbatch at a time.

    More chunks per rank need as much, except for tied weights, and where activations are offloaded or recomputed.
    """
    low, high = 0.0, 2.0 * sum(layer.static + layer.activation for layer in costs.layers)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if _are_enough(costs, stages, middle) else (middle, high)
    return max(_packed(costs, high), key=lambda need: need.total)


def least_work(costs: ModelCosts, stages: int) -> float:
    """A bound: how long the busiest rank computes at least for one microbatch, whichever rank has which layers.

    Of the k * stages + 1 longest layers one rank has k + 1, which take as long at least as the k + 1 shortest of them.
    """
    times = sorted(map(shortest, costs.layers), reverse=True)
    packed = [sum(times[end - 1 - (end - 1) // stages : end]) for end in range(1, len(times) + 1, stages)]
    return max(sum(times) / stages, *packed) + _of_a_chunk(costs)


def without_network(costs: ModelCosts) -> ModelCosts:
    """The costs where passes beside each other hide all of each other's collectives."""
    layers = [
        replace(
            layer,
            forward=layer.forward - layer.network_forward,
            backward=layer.backward - layer.network_backward,
            network_forward=0.0,
            network_backward=0.0,
        )
        for layer in costs.layers
    ]
    return replace(costs, layers=tuple(layers))


def least_uneven(costs: ModelCosts, stages: int) -> float:
    """The share of the busiest rank's time in which the others idle, mean over ranks, if it has `least_work`."""
    most = least_work(costs, stages)
    total = sum(map(shortest, costs.layers)) + stages * _of_a_chunk(costs)
    return max(0.0, 1.0 - total / (stages * most)) if most else 0.0


def _of_a_chunk(costs: ModelCosts) -> float:
    """The time of a microbatch's passes besides the layers: a forward and one backward at least."""
    return costs.forward_overhead + 2 * costs.pass_overhead


def shortest(layer: LayerCosts) -> float:
    """Of its passes, with all that one pass or merged ones may save."""
    saved = max(layer.split_overhead, layer.merge_saving)
    return layer.forward + layer.backward + layer.weight - saved


def fits(costs: ModelCosts, stages: int, limit: float, saves: bool = False) -> bool:
    """Whether `limit` is enough for the least need.

    saves: where offloading or recomputation may help. A rank then holds a microbatch in one of its chunks only.
    """
    if saves:
        chunks = max(1, min(SAVING_CHUNKS, len(costs.layers) // stages))
        thinner = [replace(layer, activation=layer.activation / chunks) for layer in costs.layers]
        costs = replace(costs, layers=tuple(thinner))
    return _are_enough(costs, stages, limit)


def _packed(costs: ModelCosts, most: float) -> list[Need]:
    """Needs of chunks one after another, each with as many layers as fit into `most`, and with one at least.

    Where all outputs are alike, as in a transformer, no cut into chunks that fit has fewer.
    """
    layers, chunks, received = costs.layers, list[Need](), 0.0
    begin, end = 0, 0
    while end < len(layers):
        static = activation = 0.0
        shared: dict[str | None, float] = {}  # what the chunk already holds of tied layers
        for place, layer in enumerate(layers[begin:], begin + 1):
            before = 0.0 if layer.tied is None else shared.get(layer.tied, 0.0)
            shared[layer.tied] = max(before, layer.static)
            static += max(0.0, layer.static - before)
            activation += layer.activation
            if static + activation > most and end > begin:
                break
            sent = layer.output if place < len(layers) else 0.0
            need = Need(static, activation, max(received, sent))
            if end == begin or need.total <= most:
                found, end = need, place
        chunks.append(found)
        begin, received = end, layers[end - 1].output
    return chunks


def _are_enough(costs: ModelCosts, stages: int, most: float) -> bool:
    """Whether so many stages hold the model, each at most `most`."""
    needs = _packed(costs, most)
    return len(needs) <= stages and all(need.total <= most for need in needs)
