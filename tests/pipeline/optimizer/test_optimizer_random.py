"""Any torch optimizer, gradients, learning rates, masters, buffers and hooks: a step that does not wait equals one that
does, and that one process with torch's optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from tests.support.optimizer_cases import (
    MATRICES,
    OPTIMIZERS,
    SCHEDULES,
    SHAPES,
    Case,
    clip_in_float64,
    ours,
    plain_loop,
)
from zbkern.pipeline.optimizer import Optimizer

NAMES = [name for name in OPTIMIZERS if name != "muon" or hasattr(torch.optim, "Muon")]
INVERTIBLE = ("sgd", "sgd momentum", "sgd nesterov", "adamw", "adamw foreach")
KINDS = ("plain", "clip", "clip on all", "inf", "-inf", "nan", "beyond fp32", "zero", "tiny", "absent")


class Pattern(Case):
    """Gradients of every rank and step as its kind says; some: whether they may be absent."""

    def __init__(self, kinds: list[list[str]], some: bool, **options: Any) -> None:
        super().__init__(len(kinds[0]), len(kinds), {}, **options)
        self.kinds, self.some = kinds, some

    def gradients(self, rank: int, step: int) -> list[Tensor | None]:
        found, kind = super().gradients(rank, step), self.kinds[step][rank]
        if kind == "absent" and self.some:
            return [None] * len(found)
        factor = {"clip": 30.0, "clip on all": 2.0, "zero": 0.0, "tiny": 1e-30}.get(kind, 1.0)
        made = [None if gradient is None else gradient * factor for gradient in found]
        element = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "beyond fp32": 3e38}.get(kind)
        if element is not None:
            made[1].view(-1)[2] = element
        return made


@st.composite
def patterns(draw: st.DrawFn, allowed: tuple[str, ...]) -> list[list[str]]:
    """A kind of gradient by step and rank; most are plain, as in training."""
    ranks = draw(st.integers(2, 4))
    one = st.one_of(st.just("plain"), st.sampled_from(allowed))
    step = st.one_of(st.lists(one, min_size=ranks, max_size=ranks), st.sampled_from(allowed).map(lambda k: [k] * ranks))
    return draw(st.lists(step, min_size=3, max_size=6))


Seen = list[tuple[Any, ...]]


def equal_to_a_step_that_waits(
    kinds: list[list[str]],
    name: str,
    masters: bool,
    undo: str,
    adaptive: bool,
    by_turns: bool,
    flat: str | None,
    schedule: str | None,
    stop: int | None,
    watched: bool,
) -> None:
    """Also in what it counts and what hooks see; and what waits undoes nothing. Bit for bit, but for undo="inverse".

    stop: the step before which all is made anew from states.
    """
    masters = masters and name != "attributes"  # it knows its parameters
    some = not flat and name not in ("late", "attributes")  # which read all gradients, there or not
    case = Pattern(
        kinds,
        some,
        make=OPTIMIZERS[name],
        dtype=torch.bfloat16 if masters else torch.float32,
        shapes=MATRICES if name == "muon" else SHAPES,
        by_turns=by_turns and some,
        flat=flat,
        schedule=SCHEDULES.get(schedule or ""),
    )
    known = case.make([nn.Parameter(torch.ones(2, 2))]).defaults
    if schedule == "one cycle" and not {"momentum", "betas"} & known.keys():
        case.schedule = None
    stop = None if name == "attributes" else stop  # they are in no state

    def run(**options: Any) -> Any:
        seen: list[Seen] = [[] for _ in range(case.ranks)]

        def attach(optimizer: Optimizer, weights: list[nn.Parameter], rank: int) -> None:
            inner = optimizer.optimizer

            def look(after: int, held: torch.optim.Optimizer) -> None:
                assert held is inner
                parameters = [p for group in inner.param_groups for p in group["params"]]
                values = [*weights, *(p.grad for p in parameters if p.grad is not None)]
                seen[rank].append((after, inner.param_groups[0]["lr"], [value.detach().clone() for value in values]))

            optimizer.register_step_pre_hook(lambda held, *_: look(0, held))
            inner.register_step_post_hook(lambda held, *_: look(1, held))

        return (*ours(case, stop=stop, attach=attach if watched else None, **options), seen)

    history, norms, optimizers, seen = run(undo=undo, adaptive=adaptive)
    waited, waited_norms, others, expected_seen = run(undo=None)
    assert_close(norms, waited_norms, rtol=0, atol=0, equal_nan=True)
    assert_close(seen, expected_seen, rtol=0, atol=0, equal_nan=True)
    assert [(o.clipped, o.skipped) for o in optimizers] == [(o.clipped, o.skipped) for o in others]
    assert [o.undone for o in others] == [0] * len(others)
    exact = undo == "snapshot" or watched or not any(o.undone for o in optimizers)
    near = 2**-6 if masters else 1e-3
    assert_history(history, waited, 0 if exact else near)
    for optimizer, other in zip(optimizers, others, strict=True) if exact else ():
        state, expected = optimizer.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
        assert_close(state, expected, rtol=0, atol=0, equal_nan=True)
    if name != "attributes":  # it has a state of all its parameters together
        plain, plain_norms = plain_loop(case, clip_in_float64)
        assert_close(waited_norms[0], plain_norms, rtol=1e-6, atol=0, equal_nan=True)
        assert_history(waited, plain, near if masters else 0)


def assert_history(ours: list[list[Tensor]], theirs: list[list[Tensor]], tolerance: float) -> None:
    for step, (weights, expected) in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(weights, expected, strict=True):
            assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, s=step: f"step {s}: {m}")


ANYTHING = {
    "kinds": patterns(KINDS),
    "name": st.sampled_from(NAMES),
    "masters": st.booleans(),
    "adaptive": st.booleans(),
    "by_turns": st.booleans(),
    "flat": st.sampled_from([None, None, "by hand", "by the optimizer"]),
    "schedule": st.sampled_from([None, *SCHEDULES]),
    "stop": st.sampled_from([None, None, 1, 3]),
    "watched": st.booleans(),
}
# Not with gradients that are all but zero: where moments are small, the rounding of a large step is large beside them.
INVERTED = {**ANYTHING, "kinds": patterns(KINDS[:6]), "name": st.sampled_from(INVERTIBLE)}


@pytest.mark.parametrize("count", [25, pytest.param(50, marks=pytest.mark.slow)])
def test_a_snapshot_is_exact(count: int) -> None:
    check = given(**ANYTHING)(lambda **drawn: equal_to_a_step_that_waits(undo="snapshot", **drawn))
    settings(max_examples=count, deadline=None)(check)()


@pytest.mark.parametrize("count", [20, pytest.param(30, marks=pytest.mark.slow)])
def test_an_inverse_is_close(count: int) -> None:
    check = given(**INVERTED)(lambda **drawn: equal_to_a_step_that_waits(undo="inverse", **drawn))
    settings(max_examples=count, deadline=None)(check)()
