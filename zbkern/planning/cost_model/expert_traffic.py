"""How many places get a token whose experts are spread over them: GPUs, or nodes of GPUs.

Routing is uniform: every choice of a token's experts is as likely as any other. Of n experts a place with h of them is
then missed by C(n - h, k) of the C(n, k) choices of k. Where a token's experts must be of few groups (node-limited
routing, arXiv 2412.19437, section 2.1.2), it takes the groups with the best experts: as many as k experts chosen freely
would be of, and at most `chosen_groups`. A simulation of DeepSeek-V3's router reaches the same numbers to 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import comb

from zbkern.planning.cost_model.layer_kinds import Experts


@cache
def reached(experts: Experts, places: tuple[int, ...]) -> tuple[float, ...]:
    """For every place the probability that a token has an expert there; places: their numbers of experts, in order."""
    size, chosen = experts.count // experts.groups, experts.chosen
    choices = _choices([size] * experts.groups, chosen)
    likely = [each / sum(choices) for each in choices]  # of a number of groups, if all may be taken
    most = experts.chosen_groups
    likely[most:] = [sum(likely[most:])]
    found = []
    for start, end in pairwise(accumulate(places, initial=0)):
        borders = [(group * size, (group + 1) * size) for group in range(experts.groups)]
        others = [size - max(0, min(end, last) - max(start, first)) for first, last in borders]
        missing = _choices(others, chosen)
        missed = sum(share * missing[count] / choices[count] for count, share in enumerate(likely) if share)
        found.append(1.0 - missed)
    return tuple(found)


def _choices(groups: Sequence[int], chosen: int) -> list[int]:
    """In how many ways so many experts can be chosen from groups of these sizes, by the number of groups they are of.

    The numbers are coefficients of x^chosen in products of (1 + x)^size - 1, one factor per group that is used.
    """
    found = [[1] + [0] * chosen] + [[0] * (chosen + 1) for _ in groups]  # by groups used, then by experts chosen
    for size in groups:
        some = [0, *(comb(size, count) for count in range(1, chosen + 1))]
        for used in range(len(groups), 0, -1):
            before = found[used - 1]
            for total in range(1, chosen + 1):
                found[used][total] += sum(before[total - count] * some[count] for count in range(1, total + 1))
    return [each[chosen] for each in found]
