"""Several torch optimizers in one Optimizer: each clipped by its own norm, or all by one, as one process does it."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.optimizer_cases import Late, clip_in_float64
from zbkern import schedules
from zbkern.pipeline import Optimizer, Pipeline, checkpoint, cut, token_loss, token_targets
from zbkern.pipeline.transport.local import LocalTransport

MICROBATCHES, NAN_STEP, LAST = 4, 3, 6
LIMITS, LIMIT = (0.28, 1.09), 1.13  # of matrices, of the rest, of both: some steps are clipped by each, some not


@functools.cache
def _model() -> nn.Module:
    from tests.support.small_models import make

    return make("gpt2")  # its head is its embedding, and all of it is computed in float64


def matrices_and_rest(named: Iterable[tuple[str, nn.Parameter]]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in named:
        parts[0 if ".h." in name and parameter.dim() == 2 else 1].append(parameter)
    return parts


def make_optimizers(module: nn.Module, first: str = "Muon") -> list[torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(module.named_parameters())
    kind = getattr(torch.optim, first)
    settings = {"lr": 0.02, "momentum": 0.9} if first in ("Muon", "SGD") else {"lr": 0.02}
    return [kind(matrices, **settings), torch.optim.AdamW(rest, lr=0.01)]


def tokens(step: int) -> Tensor:
    return torch.randint(3, 60, (8, 6), generator=torch.Generator().manual_seed(step))


def poison(module: nn.Module, step: int) -> None:
    """Of the last layer's gradient alone: the ranks before it have stepped by the time that they hear of it."""
    found = dict(module.named_parameters()).get("transformer.ln_f.weight")
    if found is not None and step == NAN_STEP:
        found.grad[0] = math.nan


@functools.cache
def one_process(first: str, together: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Norms of every step and the weights after the last; nothing of zbkern's but the loss."""
    model = copy.deepcopy(_model())
    optimizers = make_optimizers(model, first)
    parts = matrices_and_rest(model.named_parameters())
    groups = [([*parts[0], *parts[1]], LIMIT)] if together else [*zip(parts, LIMITS, strict=True)]
    norms = []
    for step in range(LAST):
        model.zero_grad()
        x = tokens(step)
        for part, target in zip(x.chunk(MICROBATCHES), token_targets(x, MICROBATCHES), strict=True):
            (token_loss(model(input_ids=part, use_cache=False).logits, target) / MICROBATCHES).backward()
        poison(model, step)
        norms.append([float(clip_in_float64(group, limit)) for group, limit in groups])
        for optimizer in optimizers if all(map(math.isfinite, norms[-1])) else ():
            optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


class Trained:
    """A rank's steps of the pipeline."""

    def __init__(self, transport: LocalTransport, schedule: Any, first: str, together: bool, **options: Any) -> None:
        chunks = cut(copy.deepcopy(_model()), schedule, rank=transport.rank)
        self.module = nn.ModuleList(map(zbkern.convert, chunks))
        self.pipe = Pipeline([*self.module], schedule, token_loss, transport, timeout=30)
        optimizers = make_optimizers(self.module, first)
        given: Any = optimizers if together else [*zip(optimizers, LIMITS, strict=True)]
        limit = {"max_norm": LIMIT} if together else {}
        self.optimizer = Optimizer(given, self.pipe, **limit, **options)
        self.norms: list[list[float]] = []

    def steps(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.pipe.step({"input_ids": tokens(step)}, token_targets(tokens(step), MICROBATCHES))
            for chunk in self.module:
                poison(chunk, step)
            self.optimizer.step()
            if step % 2:  # others are validated within the next step
                self.optimizer.validate()
                self.norms.append(self.optimizer.last_norms)

    def weights(self) -> dict[str, Tensor]:
        self.optimizer.validate()
        return {name: p.detach().clone() for chunk in self.module for name, p in chunk.named_parameters()}


def assert_equals_one_process(ranks: list[Any], first: str = "Muon", together: bool = False) -> None:
    """ranks: norms of every second step, weights, clipped, skipped."""
    norms, expected = one_process(first, together)
    clipped = sum(
        any(norm > limit for norm, limit in zip(found, [LIMIT] if together else LIMITS, strict=True))
        for found in norms
        if all(map(math.isfinite, found))
    )
    assert 0 < clipped < LAST - 1
    seen = set()
    for found, weights, times, skipped in ranks:
        torch.testing.assert_close(found, norms[1::2][-len(found) :], rtol=1e-6, atol=0, equal_nan=True)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)
        assert (times, skipped) == (clipped, 1)
        seen |= weights.keys()
    assert seen >= {name for name, _ in _model().named_parameters()}


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")


@needs_muon
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("undo", ["snapshot", None])
@pytest.mark.parametrize(("name", "size"), [("zb_h1", 4), ("zb_v", 2)])
def test_muon_and_adamw_equal_one_process(name: str, size: int, undo: str | None, together: bool) -> None:
    schedule, _ = getattr(schedules, name)(size, MICROBATCHES), _model()  # before threads ask for it

    def rank(transport: LocalTransport) -> Any:
        trained = Trained(transport, schedule, "Muon", together, undo=undo, adaptive=False)
        with trained.pipe:
            trained.steps(range(LAST))
            weights, counts = trained.weights(), trained.optimizer
        return (trained.norms, weights, counts.clipped, counts.skipped), counts.undone

    found = results_on_threads(size, rank)
    undone = [times for _, times in found]
    assert undone[-1] == 0
    assert (undone[0] > 0) == (undo is not None)
    assert_equals_one_process([rows for rows, _ in found], together=together)


@pytest.mark.parametrize(
    ("first", "options"), [("SGD", {"undo": "inverse"}), pytest.param("Muon", {}, marks=needs_muon)]
)
def test_a_checkpoint_loads_under_another_schedule(tmp_path: Path, first: str, options: dict[str, Any]) -> None:
    """Each parameter has the state of its own optimizer again, on ranks that have other parameters."""
    plans, _ = (schedules.zb_v(2, MICROBATCHES), schedules.zb_h1(3, MICROBATCHES)), _model()

    def begin(transport: LocalTransport) -> None:
        trained = Trained(transport, plans[0], first, False, **options)
        with trained.pipe:
            trained.steps(range(2))
            checkpoint.save(tmp_path, 2, trained.pipe, trained.optimizer)

    def go_on(transport: LocalTransport) -> Any:
        trained = Trained(transport, plans[1], first, False, **options)
        with trained.pipe:
            assert checkpoint.load(tmp_path, trained.pipe, trained.optimizer).step == 2
            trained.steps(range(2, LAST))
            return trained.norms, trained.weights(), trained.optimizer.clipped + 2, trained.optimizer.skipped

    results_on_threads(2, begin)
    whole = copy.deepcopy(_model())
    with pytest.raises(ValueError, match=rf"holds the state of {first}, and the optimizer is AdamW"):
        checkpoint.load(tmp_path, whole, torch.optim.AdamW(whole.parameters()))
    assert_equals_one_process(results_on_threads(3, go_on), first)


def alone(*optimizers: Any, **options: Any) -> Optimizer:
    return Optimizer([*optimizers], LocalTransport.ring(1)[0], **options)


def give_gradients(optimizer: Optimizer, value: float = 1.0) -> None:
    for parameter in optimizer.weights():
        parameter.grad = torch.full_like(parameter, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_and_masters_go_into_another_optimizer(dtype: torch.dtype) -> None:
    def make() -> Optimizer:
        first, second = (nn.Parameter(torch.ones(2, 3, dtype=dtype)) for _ in range(2))
        sgd, adamw = torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW([second], lr=0.1)
        return alone((sgd, None), (adamw, 1.0), master_weights=dtype == torch.bfloat16)

    ours, other = make(), make()
    give_gradients(ours)
    ours.step()
    assert ours.last_norms == pytest.approx([math.sqrt(6)] * 2)
    assert ours.last_norm == pytest.approx(math.sqrt(12))
    assert ours.clipped == 1
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    if dtype == torch.float32:
        for a, b in zip(other.weights(), ours.weights(), strict=True):
            a.data.copy_(b)
    for optimizer in (ours, other):
        give_gradients(optimizer, 0.5)
        optimizer.step()
    for a, b in zip(other.weights(), ours.weights(), strict=True):
        assert torch.equal(a, b)
    assert len(ours.masters) == (2 if dtype == torch.bfloat16 else 0)
    assert len(ours.state) == 2
    with pytest.raises(ValueError, match=r"must be that of 2 torch optimizers; got that of 1"):
        ours.load_state_dict(ours._parts[0].state_dict())
    with pytest.raises(ValueError, match=r"must be that of SGD .*; got that of AdamW"):
        ours.load_state_dict({"parts": ours.state_dict()["parts"][::-1]})


def test_groups_schedules_and_hooks_are_those_of_all() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    first, second = torch.optim.SGD(weights[:1], lr=1.0), torch.optim.SGD(weights[1:2], lr=0.5)
    optimizer = alone(first, second)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda each, *_: calls.append(each))
    optimizer.register_step_post_hook(lambda each, *_: calls.append(each))
    second.register_step_pre_hook(lambda *_: calls.append([w[0].item() for w in weights[:2]]))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(2):
        give_gradients(optimizer)
        optimizer.step()
        schedule.step()
    assert [w[0].item() for w in weights] == [-0.5, 0.25, 1.0]
    assert calls == [first, [0.0, 1.0], second, first, [-0.5, 0.5], second]
    assert not hasattr(optimizer, "optimizer")
    assert optimizer.defaults == {}
    with pytest.raises(TypeError, match=r"place must be the number of the torch optimizer .* with 2 of them"):
        optimizer.add_param_group({"params": weights[2:]})
    optimizer.add_param_group({"params": weights[2:], "lr": 0.25}, 1)
    assert [group["lr"] for group in second.param_groups] == [pytest.approx(0.5 / 3), 0.25]
    with pytest.raises(ValueError, match=r"SGD and SGD has a parameter of shape \[2\] twice"):
        optimizer.add_param_group({"params": weights[2:]}, 0)
    assert len(optimizer.param_groups) == 3


def test_a_rank_waits_where_one_optimizer_has_no_undo(caplog: pytest.LogCaptureFixture) -> None:
    def rank_loop(transport: LocalTransport) -> tuple[str, float]:
        a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
        pairs = [(torch.optim.Adagrad([a], lr=0.5), 1.0), (torch.optim.SGD([b], lr=0.5), 1.0)]
        optimizer = Optimizer(pairs, transport, undo="inverse", timeout=20)
        give_gradients(optimizer, 0.1)
        optimizer.step()
        state = optimizer.boundary.state
        optimizer.validate()
        return state, round(b[0].item(), 6)

    with caplog.at_level(logging.WARNING, "zbkern"):
        assert results_on_threads(2, rank_loop) == [("open", 0.95), ("validated", 0.95)]
    told = (
        "undo='inverse' knows AdamW and SGD; got Adagrad; use undo='snapshot'. Until then steps of this rank wait for"
    )
    assert [told in message for message in caplog.messages] == [True] * 2  # once on each rank


def test_what_ranks_must_have_alike() -> None:
    def made(transport: LocalTransport, turned: bool, table: int | None = None) -> None:
        tied, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        parts = [(torch.optim.SGD([other]), 1.0), (torch.optim.AdamW([tied]), 1.0)]
        if table is not None and transport.rank:
            parts = [(torch.optim.SGD([tied]), 1.0), (torch.optim.AdamW([other]), 1.0)]
        if turned and transport.rank:
            parts.reverse()
        tied_names = None if table is None else {"table": tied}
        Optimizer(parts, transport, tied=tied_names, timeout=20)

    with pytest.raises(ValueError, match=r"max_norm must be the same .*\[\['SGD', 1.0\], \['AdamW', 1.0\]\], \[\['Ada"):
        results_on_threads(2, lambda transport: made(transport, True))
    with pytest.raises(ValueError, match=r"tied 'table' must be in the same torch optimizer .* \{0: 1, 1: 0\}"):
        results_on_threads(2, lambda transport: made(transport, False, 1))


def test_wrong_lists_are_refused() -> None:
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(2))]) for _ in range(2))
    for given, options in (([(first, None), second], {}), ([(first, None), (second, 1.0)], {"max_norm": 1.0})):
        with pytest.raises(TypeError, match=r"with max_norm= for the norm of all, or only pairs"):
            alone(*given, **options)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, .* got list; several go into a list"):
        alone()
    with pytest.raises(TypeError, match="max_norm must be a number above 0; got 'x'"):
        alone((first, "x"))
    with pytest.raises(ValueError, match=r"SGD and SGD has a parameter of shape \[2\] twice"):
        alone(first, first)


def test_state_of_any_kind_is_taken_back() -> None:
    """Lists, counts in groups and tensors that come later, beside an optimizer whose norm alone has it clipped."""
    forced = {1: 4.0, 3: math.nan}

    def gradients(rank: int, step: int) -> list[Tensor]:
        made = [torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * step + rank)) / 100 for _ in range(2)]
        if rank == 1 and step in forced:
            made[1][0, 0] = forced[step]
        return made

    def rank_loop(transport: LocalTransport) -> tuple[list[Tensor], int]:
        weights = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
        pairs = [(Late(weights[:1]), 1.0), (torch.optim.AdamW(weights[1:], lr=0.1), 1.0)]
        optimizer = Optimizer(pairs, transport, adaptive=False, timeout=20)
        for step in range(6):
            for weight, gradient in zip(weights, gradients(transport.rank, step), strict=True):
                weight.grad = gradient
            optimizer.step()
        optimizer.validate()
        return weights, optimizer.undone

    model = [[nn.Parameter(torch.ones(3, 2)) for _ in range(2)] for _ in range(2)]
    plain = [Late([row[0] for row in model]), torch.optim.AdamW([row[1] for row in model], lr=0.1)]
    for step in range(6):
        for rank, row in enumerate(model):
            for weight, gradient in zip(row, gradients(rank, step), strict=True):
                weight.grad = gradient
        norms = [float(clip_in_float64([row[index] for row in model], 1.0)) for index in range(2)]
        for optimizer in plain if all(map(math.isfinite, norms)) else ():
            optimizer.step()
    found = results_on_threads(2, rank_loop)
    assert [undone for _, undone in found] == [2, 0]
    for (weights, _), row in zip(found, model, strict=True):
        for ours, theirs in zip(weights, row, strict=True):
            assert torch.equal(ours, theirs)
