"""Where tokens go: as enumeration of all choices has it, and as a router like DeepSeek-V3's does."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from zbkern.planning.cost_model.expert_traffic import reached
from zbkern.planning.cost_model.layer_kinds import Experts


@pytest.mark.parametrize("places", [(2, 2, 2, 2), (4, 3, 1), (1,) * 8, (8,)])
@pytest.mark.parametrize("chosen", [1, 3, 8])
def test_every_choice_is_as_likely(places: tuple[int, ...], chosen: int) -> None:
    place_of = [place for place, count in enumerate(places) for _ in range(count)]
    choices = [{place_of[expert] for expert in choice} for choice in combinations(range(8), chosen)]
    expected = [sum(place in choice for choice in choices) / len(choices) for place in range(len(places))]
    assert reached(Experts(8, chosen, 1), places) == pytest.approx(expected)
    assert reached(Experts(8, chosen, 4, 4), places) == pytest.approx(expected)  # all groups: no limit


def router(count: int, groups: int, chosen_groups: int, chosen: int, tokens: int = 20_000) -> torch.Tensor:
    """The experts that DeepSeek-V3's router takes: the best of the groups whose two best are best together."""
    scores = torch.rand(tokens, groups, count // groups, generator=torch.Generator().manual_seed(0))
    best = scores.topk(2).values.sum(-1).topk(chosen_groups).indices
    allowed = torch.zeros(tokens, groups, 1).scatter_(1, best.unsqueeze(-1), 1.0)
    return (scores * allowed).flatten(1).topk(chosen).indices


@pytest.mark.parametrize("nodes", [4, 8, 16])
@pytest.mark.parametrize(("groups", "chosen_groups"), [(8, 4), (8, 7), (1, 1)])
def test_groups_are_those_of_the_best_experts(nodes: int, groups: int, chosen_groups: int) -> None:
    node = router(256, groups, chosen_groups, 8) // (256 // nodes)
    expected = torch.nn.functional.one_hot(node, nodes).amax(1).sum(1).double().mean()
    found = reached(Experts(256, 8, groups, chosen_groups), (256 // nodes,) * nodes)
    assert sum(found) == pytest.approx(float(expected), rel=0.02)
    assert found == pytest.approx([found[0]] * nodes)


def test_node_limited_routing_reaches_its_limit() -> None:
    """DeepSeek-V3 on 8 nodes: eight experts freely chosen are on 5.3, and with its routing on hardly fewer than 4."""
    assert sum(reached(Experts(256, 8, 1), (32,) * 8)) == pytest.approx(5.295, abs=1e-3)
    assert 3.95 < sum(reached(Experts(256, 8, 8, 4), (32,) * 8)) < 4
