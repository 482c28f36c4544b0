"""What a model needs at least: that of the best of all cuts, with the messages that simulations count."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from zbkern.pipeline import Costs, LayerCosts, ModelCosts, plan, simulate
from zbkern.planning.costs.flat import FlatCosts
from zbkern.planning.costs.needs import fits, least_need


def held(costs: Costs) -> float:
    """By the fullest rank of one chunk each, with one microbatch, whatever the order."""
    flat = FlatCosts.of(costs, range(len(costs.activation)))
    return max(map(sum, zip(flat.static, costs.activation, strict=True)))


@pytest.mark.parametrize("seed", range(40))
def test_the_least_need_is_that_of_the_best_of_all_cuts(seed: int) -> None:
    draw = random.Random(seed)
    output, tied = draw.choice([0.0, 1.0, 4.0]), draw.choice([None, "vocabulary"])
    layers = [
        LayerCosts(f"{n}", 1, 1, 1, draw.randint(1, 5), output=output, static=draw.randint(0, 5))
        for n in range(draw.randint(1, 6))
    ]
    ends = [LayerCosts(name, 1, 1, 1, 1, output=output, static=3.0, tied=tied) for name in ("embedding", "head")]
    costs, stages = ModelCosts((ends[0], *layers, ends[1])), draw.randint(1, 4)
    cuts = [(0, *cut) for count in range(stages) for cut in combinations(range(1, len(costs.layers)), count)]
    least = min(held(costs.chunk_costs(cut)) for cut in cuts)
    assert least_need(costs, stages).total == least
    assert fits(costs, stages, least)
    assert not fits(costs, stages, 0.99 * least)


def test_what_fits_by_a_hair_is_planned() -> None:
    layers = [LayerCosts(f"{n}", 1, 1, 1, 1.0, output=3.0, static=2.0) for n in range(8)]
    costs = ModelCosts(layers)
    need = least_need(costs, 2)
    assert need == (8.0, 4.0, 3.0)
    found = plan(costs, 2, 1, chunks=1, memory_limit=need.total, effort=0)
    assert max(simulate(found.schedule, found.costs).peak_memory) == need.total
    assert not fits(costs, 2, need.total - 0.1)
