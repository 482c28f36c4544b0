"""Random modules that mix tokens, in slices and packs: each trains as in one process, or is refused by name.

The first batch tells nothing: it has one token over and over, or a few tokens, and no mask.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import one_rank
from tests.support.model_mixers import MODELS, OF_CALLS
from tests.support.seeds import seed
from tests.support.token_mixers import KINDS, WIDTH, Limits, Mixer, Mixers, converted
from zbkern.pipeline import PipelineError, schedules

CASES = int(os.environ.get("ZBKERN_CASES", "200"))  # ordinary ones, and as many with limits, and as of models
REFUSALS = "cannot take its sequences in slices", "cannot take sequences packed into a row"


class Case:
    """A module and two batches: the second is the one that counts."""

    def __init__(self, rng: random.Random, kinds: Sequence[Any] = KINDS) -> None:
        self.kinds = kinds
        number = rng.randrange(2**31)
        self.embeds, self.rows = rng.random() < 0.5, rng.choice([1, 1, 2, 3])
        self.module, self.twin = (self.made(number) for _ in range(2))  # a copy would have no hooks on weights
        self.how = rng.choice(["slices", "slices", "padded", "packed", "packed in slices"])
        self.slices = 1 if self.how == "packed" else rng.choice([2, 3, (1, 2), (3, 1, 2)])
        self.tokens, self.first = rng.choice([6, 12, 24, 31, 63]), rng.choice([6, 12, 24])
        self.side: dict[str, Tensor] = {}
        if "packed" in self.how:
            self.rows = 1
            ends = [0, *sorted(rng.sample(range(1, self.tokens), 2)), self.tokens]
            self.side = {"cu_seqlens": torch.tensor(ends)}
        if self.how == "padded":
            lengths = torch.tensor([rng.randint(1, self.tokens) for _ in range(self.rows)])[:, None]
            mask = (torch.arange(self.tokens) < lengths).long()
            self.side = {"attention_mask": mask.flip(1) if rng.random() < 0.5 else mask}
        self.warm_up = rng.random() < 0.6
        self.trains, self.converts = rng.random() < 0.5, rng
        for module in (self.module, self.twin):
            module.train(self.trains)

    def made(self, number: int) -> Mixers:
        torch.manual_seed(number)
        return Mixers(random.Random(number), self.embeds, self.kinds).double()

    def inputs(self, tokens: int, alike: bool) -> Tensor:
        if self.embeds:
            return torch.full((self.rows, tokens), 3) if alike else torch.randint(13, (self.rows, tokens))
        x = torch.randn(self.rows, 1 if alike else tokens, WIDTH, dtype=torch.float64)
        return x.expand(self.rows, tokens, WIDTH)


def loss_fn(output: Tensor, weights: Tensor) -> Tensor:
    return (output.square() * weights + output * weights.sin()).sum()


loss_fn.reduction = "sum"  # type: ignore[attr-defined]


def plainly(module: nn.Module, x: Tensor, weights: Tensor, side: dict[str, Tensor]) -> Tensor:
    """One process; of a pack each sequence by itself."""
    if "cu_seqlens" not in side:
        loss = loss_fn(module(x, **side), weights)
    else:
        places = [slice(a, b) for a, b in zip(side["cu_seqlens"][:-1], side["cu_seqlens"][1:], strict=True)]
        loss = torch.stack([loss_fn(module(x[:, place]), weights[:, place]) for place in places]).sum()
    loss.backward()
    return loss.detach()


def outcome(case: Case) -> str:
    """ "refused", "equal" or "drawn"; what differs where it is none of them."""
    first, weights = case.inputs(case.first, True), torch.randn(case.rows, case.first, WIDTH, dtype=torch.float64)
    x, own = case.inputs(case.tokens, False), torch.randn(case.rows, case.tokens, WIDTH, dtype=torch.float64)
    if "attention_mask" in case.side:
        own = own * case.side["attention_mask"][..., None]
    plain, mine = case.module, converted(case.twin, case.converts)
    schedule = schedules.zb_h1(1, 1, slices=case.slices)
    is_pack = "cu_seqlens" in case.side
    first_side = {"cu_seqlens": torch.tensor([0, 2, case.first])} if is_pack else {}
    try:
        with one_rank([mine], schedule, loss_fn) as pipe:
            if case.warm_up:
                pipe.step([first], [weights], [first_side] if first_side else None)
                mine.zero_grad()
            found = pipe.step([x], [own], [case.side] if case.side else None)
    except PipelineError as error:
        return "refused" if any(text in str(error) for text in REFUSALS) else f"raised {error}"
    if case.warm_up:
        plainly(plain, first, weights, first_side)
        plain.zero_grad()
    expected = plainly(plain, x, own, case.side)
    if case.trains and case.module.draws != "none":
        in_slices = case.how != "packed" and case.module.draws == "once"
        return "drew other numbers in slices" if in_slices else "drawn"
    of_calls = "Counted", "Adds", "Remembers", "Parametrized", *OF_CALLS
    if is_pack and any(type(part).__name__ in of_calls for part in case.module.parts):
        return "equal"  # of a row, whatever is packed into it
    assert found is not None
    if not torch.allclose(found, expected, rtol=1e-6, atol=1e-9):
        return f"loss {found.item()} for {expected.item()}"
    theirs, ours = (dict([*each.named_parameters(), *each.named_buffers()]) for each in (plain, mine))
    for name, tensor in theirs.items():
        one, other = (each.grad if isinstance(each, nn.Parameter) else each for each in (tensor, ours[name]))
        if one is None and other is None:
            continue
        one, other = (torch.zeros_like(tensor) if each is None else each for each in (one, other))
        if float((one - other).abs().max()) > 1e-3 * float(one.abs().max()) + 1e-9:
            return f"{name} is off by {float((one - other).norm() / one.norm()):.1%}"
    return "equal"


def check_many(count: int, number: int, kinds: Sequence[Any] = KINDS) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in range(count):
        rng = random.Random(number * 1_000_003 + each)
        case = Case(rng, kinds)
        result = outcome(case)
        told = {
            name: value for name, value in vars(case).items() if name not in ("module", "twin", "converts", "kinds")
        }
        parts = [
            (type(part).__name__, vars(part).get("way"), round(part.chance, 3), part.width)
            for part in case.module.parts
        ]
        assert result in ("equal", "refused", "drawn"), f"number {each}: {result}: {parts} {case.module} {told}"
        found[result] = found.get(result, 0) + 1
    return found


def test_a_few_mixers() -> None:
    assert check_many(12, seed(0)).keys() >= {"equal", "refused"}


LIMITS = [Limits, Limits, Limits, Mixer]


def test_a_few_limits() -> None:
    assert check_many(6, seed(2), LIMITS).keys() >= {"equal", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_many_limits(part: int) -> None:
    """Tokens that are chosen by their scores, up to a limit that they may reach."""
    found: Any = check_many(CASES // 2, seed(3) * 8 + part, LIMITS)
    print(found)


def test_a_few_of_models() -> None:
    assert check_many(6, seed(4), MODELS).keys() >= {"equal", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_many_of_models(part: int) -> None:
    found: Any = check_many(CASES // 2, seed(5) * 8 + part, MODELS)
    print(found)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_mixers(part: int) -> None:
    found: Any = check_many(CASES // 4, seed(1) * 8 + part)
    print(found)
