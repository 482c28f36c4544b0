"""Lower bounds by what a rank computes and its network carries: of passes beside each other, and of batches."""

from __future__ import annotations

from collections.abc import Sequence

from zbkern.planning.costs.flat import FlatCosts, Growths


def lanes_bound(flat: FlatCosts, units: int) -> float:
    """No schedule of so many units takes less, in the costs' unit: a rank computes one thing after the other, and its
    network has one collective in flight."""
    compute, network = [0.0] * len(flat.static), [0.0] * len(flat.static)
    alike = units // len(flat.by_place)
    for each in flat.by_place:
        of_chunks = zip(
            *(flat.placement, each.forward, each.backward, each.weight, each.merge_saving, each.fused),
            *(each.network_forward, each.network_backward),
            strict=True,
        )
        for rank, forward, backward, weight, saved, fused, in_forward, in_backward in of_chunks:
            least = max(0.0, min(backward + weight - saved, fused) - in_backward)
            compute[rank] += alike * (forward - in_forward + least)
            network[rank] += alike * (in_forward + min(in_backward, fused))
    return max(*compute, *network)


def batch_bound(flat: FlatCosts, shares: Sequence[float], *, beside: bool) -> float:
    """The same of a batch, whatever its sequences are cut into and packed with: the busiest rank's passes follow one
    another, and each chunk has one unit at least.

    shares: the sequences' lengths, of the one that the costs are of. A W that is merged may save no more than is fixed
    in a backward, or all of it counts as saved: then many units may take less than one. What passes beside each other
    hide is at most what grows with the tokens, and the network carries at least as much of it as passes are long.
    beside: whether passes run beside each other.
    """
    compute, network, growths = [0.0] * len(flat.static), [0.0] * len(flat.static), Growths.of(flat.whole)
    tokens, pairs = sum(shares), sum(share * share for share in shares)
    forward, backward, fused, *hidden = (
        each.at(tokens, pairs)
        for each in (
            *(growths.forward, growths.backward, growths.fused),
            *(growths.network_forward, growths.network_backward),
        )
    )
    for chunk, (rank, saved) in enumerate(zip(flat.placement, flat.whole.merge_saving, strict=True)):
        more = max(0.0, saved - growths.apart.fixed[chunk])  # than a fused backward saves
        least = fused[chunk] - more if more <= growths.fused.fixed[chunk] else min(fused[chunk], backward[chunk])
        in_forward, in_backward = (each[chunk] if beside else 0.0 for each in hidden)
        compute[rank] += max(0.0, forward[chunk] - in_forward) + max(0.0, least - in_backward)
        backwards = growths.backward.linear[chunk], growths.fused.linear[chunk]
        network[rank] += min(in_forward, tokens * growths.forward.linear[chunk])
        network[rank] += min(in_backward, *(tokens * linear for linear in backwards))
    return max(*compute, *network)
