"""Two stages of two expert-parallel ranks: steps, norms, clipping and checkpoints equal those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from tests.support.expert_parallel import MAX_NORM, STEEP, OneProcess, Stages, clip
from tests.support.tensor_parallel import apart, values
from zbkern.pipeline import clip_grad_norm_

pytestmark = pytest.mark.dist

STEPS = range(8)


@functools.cache
def one_process() -> tuple[list[float], list[float], dict[str, Tensor]]:
    plain = OneProcess()
    return *plain.train(STEPS), dict(plain.model.named_parameters())


def trained(schedule: str, fill: str) -> tuple[Any, ...]:
    """Losses, norms, weights, how many steps were clipped, and the parameters whose W ran in the queue."""
    ours = Stages(2, 2, schedule, fill)
    waited: set[int] = set()
    ours.pipe.queue.listeners.append(lambda tasks: waited.update(id(p) for task in tasks for p in task.parameters))
    with ours.pipe:
        losses, norms = ours.train(STEPS)
    experts = {name: id(p) for name, p in ours.named().items() if ".experts.experts." in name}
    late = {name for name, identity in experts.items() if identity in waited}
    return losses, norms, values(ours.named()), ours.optimizer.clipped, late == experts.keys()


@pytest.mark.parametrize(
    ("schedule", "fill"),
    [
        ("zb_h1", "planned"),
        pytest.param("zb_v", "eager", marks=pytest.mark.slow),
    ],
)
def test_steps_equal_one_process(four_ranks: Any, schedule: str, fill: str) -> None:
    losses, norms, weights = one_process()
    assert [step for step, norm in enumerate(norms) if norm > MAX_NORM] == [*STEEP]
    results = four_ranks.run(trained, schedule, fill)
    shares = [found for found, *_ in results if found[0] is not None]
    assert len(shares) == 2
    assert [sum(step) for step in zip(*shares, strict=True)] == pytest.approx(losses, rel=1e-11)
    for _, found_norms, found, clipped, experts_waited in results:
        assert found_norms == pytest.approx(norms, rel=1e-11)
        assert max(apart(found, weights).values()) < 1e-10, apart(found, weights)
        assert clipped == len(STEEP)
        assert experts_waited


def clipped() -> tuple[float, dict[str, Any]]:
    ours = Stages(2, 2, "zb_h1")
    with ours.pipe:
        ours.gradients(STEEP[0])
        norm = clip_grad_norm_(ours.named().values(), MAX_NORM, ours.pipe)
    return norm, values({name: parameter.grad for name, parameter in ours.named().items()})


def test_clip_grad_norm(four_ranks: Any) -> None:
    plain = OneProcess()
    plain.gradients(STEEP[0])
    expected = clip(list(plain.model.parameters()))
    assert expected > MAX_NORM
    for norm, gradients in four_ranks.run(clipped):
        assert norm == pytest.approx(expected, rel=1e-12)
        far = apart(gradients, {name: parameter.grad for name, parameter in plain.model.named_parameters()})
        assert max(far.values()) < 1e-12, far
