"""What is chosen where all tokens are chosen alike, and what probes make of choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.chunks import one_rank
from zbkern.pipeline import PipelineError, schedules
from zbkern.pipeline.runtime.slices import alike as alike_module
from zbkern.pipeline.runtime.slices import undrawn as undrawn_module
from zbkern.pipeline.runtime.slices import watching as watching_module
from zbkern.pipeline.runtime.slices import what_differs as what_differs_module
from zbkern.pipeline.runtime.slices.alike import Alike


def into_given(x: Tensor) -> Tensor:
    values, indices = torch.empty(2, 1), torch.empty(2, 1, dtype=torch.long)
    torch.topk(x, 1, out=(values, indices))
    return indices


CHOICES: dict[str, tuple[Callable[[Tensor], Any], list[list[int]]]] = {
    "topk": (lambda x: x.topk(2).indices, [[0, 2], [1, 2]]),
    "topk along a dimension": (lambda x: torch.topk(x, 1, 0)[1], [[0, 1, 0]]),
    "topk with names": (lambda x: torch.topk(input=x, k=1, dim=-1).indices, [[0], [1]]),
    "argmax": (lambda x: x.argmax(-1, keepdim=True), [[0], [1]]),
    "argmin": (lambda x: torch.argmin(x, dim=0)[None], [[0, 1, 0]]),
    "max": (lambda x: x.max(1).indices[:, None], [[0], [1]]),
    "min": (lambda x: torch.min(x, dim=1, keepdim=True).indices, [[0], [1]]),
    "along an axis": (lambda x: x.argmax(axis=-1, keepdim=True), [[0], [1]]),
    "into a given tensor": (lambda x: into_given(x), [[0], [1]]),
    "of all numbers": (lambda x: x.argmax(keepdim=True), [[2]]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_first_that_no_mask_has_taken_out(name: str) -> None:
    choose, expected = CHOICES[name]
    x = torch.tensor([[1.0, -torch.inf, 3.0], [torch.finfo(torch.float32).min, 1.0, 2.0]])
    alike = Alike(None, 2)
    alike.begin((0, 2), [x], [])
    with alike:
        found = choose(x)
    assert found.tolist() == expected
    assert alike.fault is None


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.func.grad(lambda each: each.topk(2).values.sum())(x),
        lambda x: torch.func.vmap(lambda each: each.argmax(-1))(x),
        lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged).argmax(-1),
        lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged) > 0,
    ],
)
def test_what_a_choice_is_made_in_goes_on(call: Callable[[Tensor], Any]) -> None:
    x = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    alike = Alike(2, 2)
    alike.begin((0, 2), [x], [])
    with alike:
        call(x)
    assert alike.fault is None


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x.cummax(1).indices, True),
        (lambda x: x.long(), True),
        (lambda x: torch.searchsorted(x, x), True),
        (lambda x: x.sort(1).values, True),
        (lambda x: x.round(), True),
        (lambda x: x.tanh() + x.cumsum(1), False),
        (lambda x: torch.zeros_like(x, dtype=torch.long), False),
    ],
)
def test_integers_and_truths_of_numbers_are_choices(call: Callable[[Tensor], Any], expected: bool) -> None:
    x = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    alike = Alike(None, 3)
    alike.begin((0, 3), [x], [])
    with alike:
        call(x)
    assert alike.chooses == expected


def test_what_has_only_the_shape_of_data_is_compared_as_it_is() -> None:
    """A mask of tokens that are chosen begins with zeros of their shape."""
    x = torch.tensor([[1.0, 2.0, 3.0]])
    alike = Alike(3, 3)
    alike.begin((0, 3), [x], [])
    with alike:
        chosen = torch.zeros_like(x).scatter(-1, x.topk(2).indices, 1.0)
        assert (chosen == 0).tolist() == [[False, False, True]]
        assert (x == 0).tolist() == [[True, True, True]]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x.argsort(1), True),
        (lambda x: torch.topk(x, 1, dim=1), True),
        (lambda x: x.flatten(0, 1).sort(0, descending=True), True),
        (lambda x: x.quantile(0.5, 1), True),
        (lambda x: x.quantile(torch.tensor(0.5), 1), True),
        (lambda x: x[..., 0].kthvalue(2), True),
        (lambda x: x.max(), True),
        (lambda x: x.argmax(-1), False),
        (lambda x: x.topk(2), False),
        (lambda x: torch.max(x, x * 2), False),
        (lambda x: x.flatten(0, 1).topk(2, dim=1), False),
    ],
)
def test_orders_of_tokens_are_told_from_choices_of_each(call: Callable[[Tensor], Any], expected: bool) -> None:
    x = torch.rand(2, 3, 4)
    alike = Alike(None, 3)
    alike.begin((0, 3), [x], [])
    with alike:
        call(x)
    assert alike.orders == expected
    assert alike.fault is None


class Leaders(nn.Module):
    """Takes the tokens whose scores are the largest so far. How few tokens are in order is chance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.score = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, cu_seqlens: Any = None, carry: Any = None) -> Tensor:
        leads = self.score(x)[..., 0].cummax(1).indices == torch.arange(x.shape[1])
        return self.linear(x) * leads[..., None]


@pytest.mark.parametrize(
    ("side", "refusal"),
    [({}, "cannot take its sequences in slices"), ({"cu_seqlens": torch.tensor([0, 2, 6])}, "packed into a row")],
)
@pytest.mark.parametrize("seed", [7, 55])
def test_few_tokens_hide_nothing_by_their_order(seed: int, side: dict[str, Tensor], refusal: str) -> None:
    torch.manual_seed(seed)
    module, x = Leaders().double(), torch.randn(1, 6, 8, dtype=torch.float64)
    with (
        one_rank(module, schedules.gpipe(1, 1, slices=1 if side else 2), nn.MSELoss(reduction="sum")) as pipe,
        pytest.raises(PipelineError, match=refusal),
    ):
        pipe.step([x], [x], [side] if side else None)


class Upper(nn.Module):
    """Takes the tokens of the highest scores, which are the same for many."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Embedding(13, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        y = self.embed(x)
        scores = (9 * self.score(y)).softmax(-1)[..., 0]
        return y * (scores >= scores.kthvalue(-(-x.shape[1] * 7 // 10), 1, keepdim=True).values)[..., None]


def test_many_tokens_hide_nothing_by_what_they_are_compared_with() -> None:
    torch.manual_seed(7)
    module, x = Upper().double(), torch.randint(13, (1, 31))
    with (
        one_rank(module, schedules.gpipe(1, 1, slices=2), lambda y, _: y.square().sum()) as pipe,
        pytest.raises(PipelineError, match="cannot take its sequences in slices"),
    ):
        pipe.step([x], [x])


class Crowded(nn.Module):
    """The first half of all rows' tokens go to the expert that they choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 8)

    def forward(self, x: Tensor, attention_mask: Any = None, carry: Any = None) -> Tensor:
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), 8).flatten(0, 1)
        kept = chosen * (chosen.cumsum(0) <= -(-len(chosen) // 2))
        return x * (kept.view_as(scores) * scores).sum(-1, keepdim=True)


@pytest.mark.parametrize("rows", [2, 4])
def test_a_limit_that_ends_with_a_row_hides_nothing(rows: int) -> None:
    """Where all choose one expert it takes the first rows, as a whole and in slices; tokens choose others here."""
    torch.manual_seed(0)
    module, x = Crowded().double(), torch.randn(rows, 31, 8, dtype=torch.float64)
    with torch.no_grad():
        module.router.bias.copy_(torch.linspace(0, 40, 8))  # the last but where tokens are chosen for it
    side = {"attention_mask": torch.ones(rows, 31, dtype=torch.long)}
    with (
        one_rank(module, schedules.gpipe(1, 1, slices=2), lambda y, _: y.square().sum()) as pipe,
        pytest.raises(PipelineError, match="cannot take its sequences in slices"),
    ):
        pipe.step([x], [x], [side])


class Pairs(nn.Module):
    """Tokens that are alike are merged, two by two from the beginning of what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        y = self.linear(F.pad(x, (0, 0, 0, x.shape[1] % 2)))
        one, two = y[:, ::2], y[:, 1::2]
        alike = (F.cosine_similarity(one, two, -1) > 0.999)[..., None]
        merged = torch.stack([torch.where(alike, (one + two) / 2, each) for each in (one, two)], 2)
        return merged.flatten(1, 2)[:, : x.shape[1]]


def test_comparisons_that_are_not_of_single_tokens_hide_nothing() -> None:
    torch.manual_seed(0)
    module, x = Pairs().double(), torch.randn(1, 63, 8, dtype=torch.float64)
    with (
        one_rank(module, schedules.gpipe(1, 1, slices=3), lambda y, _: y.square().sum()) as pipe,
        pytest.raises(PipelineError, match="cannot take its sequences in slices"),
    ):
        pipe.step([x], [x])


class OfAllBefore(nn.Module):
    """Right in slices: chooses among all tokens so far, and computes again until every token has enough."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(2, 8)

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        y = self.linear(x)
        seen = y if carry is None else carry.append(self, y, 1)
        y = y + self.table((seen > 0).sum(-1).remainder(2))[:, -x.shape[1] :] + 0 * seen.sum()
        done = torch.zeros_like(y[..., :1])
        for _ in range(3):
            if bool((done >= 1).all()):
                break
            y = torch.where(done < 1, torch.tanh(y), y)
            done = done + y[..., :1].sigmoid()
        return y


def test_choices_among_all_tokens_so_far_are_made_as_in_the_whole() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 48, 8, dtype=torch.float64)
    with one_rank(OfAllBefore().double(), schedules.gpipe(1, 1, slices=2), lambda y, _: y.square().sum()) as pipe:
        pipe.step([x], [x])


class Topmost(nn.Module):
    """An expert of each token. crowds: it raises where the first expert gets them all."""

    def __init__(self, crowds: bool = False) -> None:
        super().__init__()
        self.linear, self.crowds = nn.Linear(8, 8), crowds

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        try:
            best = self.linear(x).argmax(-1, keepdim=True)
        except Exception:
            best = x.new_zeros((*x.shape[:2], 1), dtype=torch.long)
        if self.crowds and not best.any():
            raise ValueError("the first expert is full")
        return x * self.linear(x).gather(-1, best)


class Catches(nn.Module):
    """What it has of others that fail is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.topmost, self.drop = Topmost(), nn.Dropout(0.5)

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        try:
            return self.drop(self.topmost(x))
        except Exception:
            return x


FAULTS = [
    (alike_module, "_with_first"),
    (undrawn_module.Undrawn, "_is_for_all"),
    (watching_module.Watching, "_returned"),
    (watching_module.Watching, "_arrived"),
    (watching_module.Whole, "note_gradient"),
    (watching_module, "sizes_of"),
    (what_differs_module, "error_of"),
]


@pytest.mark.parametrize(("owner", "name"), FAULTS)
def test_a_fault_of_the_probe_is_no_weaker_comparison(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the module catches errors."""

    def fail(*_: Any) -> None:
        raise KeyError("argsort")

    x = torch.randn(1, 24, 8)
    monkeypatch.setattr(owner, name, fail)
    part = Catches()
    if name == "sizes_of":  # which only what differs needs
        part.topmost.linear.register_forward_hook(lambda _, given, y: y - y.mean(1, keepdim=True))
    with (
        one_rank(part, schedules.gpipe(1, 1, slices=2), F.mse_loss) as pipe,
        pytest.raises(PipelineError, match=r"a fault of its own \(KeyError: 'argsort'\); please report it"),
    ):
        pipe.step([x], [x])


def test_a_module_that_takes_no_such_choice_is_compared_as_the_data_chooses() -> None:
    x = torch.randn(1, 24, 8)
    with one_rank(Topmost(crowds=True), schedules.gpipe(1, 1, slices=2), F.mse_loss) as pipe:
        pipe.step([x], [x])
