from __future__ import annotations

from typing import Any

import pytest

from tests.support.programs import example
from tests.support.ranks import named_mesh

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def losses() -> tuple[list[float], list[float]]:
    from dataclasses import replace

    experts: Any = example("experts")
    mesh = named_mesh(stage=experts.STAGES, expert=experts.EXPERT_RANKS)
    beside = experts.schedules.dualpipe_v(experts.STAGES, experts.MICROBATCHES)
    return experts.train(mesh, beside), experts.train(mesh, replace(beside, beside=()))


def test_experts_learn_beside_each_other_as_in_turn(four_ranks: Any) -> None:
    found = four_ranks.run(losses)
    assert sum(bool(beside) for beside, _ in found) == 2
    for beside, turns in found:
        assert beside == pytest.approx(turns, abs=1e-5)
        assert not beside or beside[-1] < beside[0]
