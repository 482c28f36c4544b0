"""The optimizer protocol on threads and processes: every step equals that of one torch optimizer on all weights."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import one_rank, results_on_threads
from tests.support.optimizer_cases import (
    MAX_NORM,
    OPTIMIZERS,
    Case,
    ScheduleFree,
    Wrapper,
    clip_in_float64,
    ours,
    plain_loop,
)
from zbkern.pipeline import schedules
from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.transport.base import PipelineError
from zbkern.pipeline.transport.local import LocalTransport


@pytest.mark.parametrize("adaptive", [True, False])
def test_steps_that_are_taken_back_are_counted(adaptive: bool) -> None:
    forced = {(3, 0): 3.0, (2, 1): math.nan, (3, 2): 9.0, (3, 4): math.inf, (1, 4): 2.0, (0, 5): 5.0, (2, 7): 4.0}
    *_, optimizers = ours(Case(4, 9, forced, OPTIMIZERS["late"]), adaptive=adaptive)
    # steps 0, 1, 2, 4, 7 deceive the ranks before 3, 2, 3, 1 (which declines step 4 for its norm) and 2
    assert [o.undone for o in optimizers] == ([3, 2, 1, 0] if adaptive else [5, 4, 2, 0])
    assert {(o.clipped, o.skipped) for o in optimizers} == {(4, 2)}


@pytest.mark.parametrize("forced", [3.0, math.nan])
def test_a_setting_that_the_first_step_adds_is_taken_back_with_it(forced: float) -> None:
    case = Case(2, 3, {(1, 0): forced}, OPTIMIZERS["counting"])
    history, _, optimizers = ours(case)
    assert [optimizer.undone for optimizer in optimizers] == [1, 0]
    assert [optimizer.param_groups[0]["step"] for optimizer in optimizers] == [2 if math.isnan(forced) else 3] * 2
    for found, expected in zip(history, plain_loop(case, clip_in_float64)[0], strict=True):
        assert all(map(torch.equal, found, expected))


def test_inverse_without_the_momentum_of_earlier_steps() -> None:
    def rank_loop(transport: LocalTransport) -> tuple[float, int]:
        weight = nn.Parameter(torch.zeros(()))
        sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
        optimizer = Optimizer(sgd, transport, max_norm=1.0, undo="inverse", timeout=60)
        for gradient in ((0.25, 0.25), (0.5, 4.0)):  # of each rank
            weight.grad = torch.tensor(gradient[transport.rank])
            optimizer.step()
            optimizer.validate()
            optimizer.param_groups[0]["momentum"] = 0
        return weight.item(), optimizer.undone

    (first, undone), (second, _) = results_on_threads(2, rank_loop)
    norm = math.hypot(0.5, 4.0)
    assert (first, second, undone) == (pytest.approx(-0.25 - 0.5 / norm), pytest.approx(-0.25 - 4.0 / norm), 1)


@pytest.mark.parametrize("master_weights", [False, True])
def test_parameters_that_the_torch_optimizer_has_not(caplog: pytest.LogCaptureFixture, master_weights: bool) -> None:
    chunks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).bfloat16()
    chunks[1].bias.requires_grad_(False)
    schedule = schedules.interleaved(stages=1, microbatches=1, chunks=2)
    for given in (chunks, chunks[0]):
        with one_rank(chunks, schedule) as pipe:
            Optimizer(torch.optim.AdamW(given.parameters()), pipe, master_weights=master_weights)
    (told,) = caplog.messages
    assert "1 of 4 parameters of this rank's chunks" in told
    assert "weight for one" in told


@pytest.mark.parametrize("name", ["sgd momentum", "adamw fused"])
def test_masters_take_over_what_state_there_is(name: str) -> None:
    """And go on as fp32 parameters would with it."""
    small = nn.Parameter(torch.tensor([1.0, -2.0]).bfloat16())
    small.grad = torch.tensor([0.3, 0.7]).bfloat16()
    inner = OPTIMIZERS[name]([small])
    inner.step()
    plain = nn.Parameter(small.detach().float())
    expected = OPTIMIZERS[name]([plain])
    expected.load_state_dict(copy.deepcopy(inner.state_dict()))
    optimizer = Optimizer(inner, LocalTransport.ring(1)[0], master_weights=True)
    small.grad, plain.grad = torch.ones(2).bfloat16(), torch.ones(2)
    optimizer.step()
    expected.step()
    assert torch.equal(optimizer.masters[0][1], plain)


def test_masters_stay_with_an_optimizer_that_another_one_drives() -> None:
    layer = nn.Linear(3, 3, dtype=torch.bfloat16)
    inner, transport = torch.optim.SGD(layer.parameters(), lr=0.1), LocalTransport.ring(1)[0]
    first = Optimizer(inner, transport, master_weights=True)
    with pytest.raises(ValueError, match=r"has the fp32 masters of an Optimizer before .* master_weights=True"):
        Optimizer(inner, transport)
    second = Optimizer(inner, transport, master_weights=True, max_norm=1.0)
    before = layer.weight.detach().clone()
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    second.step()
    assert second.masters == first.masters
    assert not torch.equal(layer.weight, before)


def test_a_parameter_that_has_a_master_is_not_added_again() -> None:
    layer = nn.Linear(3, 3, dtype=torch.bfloat16)
    optimizer = Optimizer(torch.optim.SGD([layer.weight], lr=0.1), LocalTransport.ring(1)[0], master_weights=True)
    with pytest.raises(ValueError, match=r"SGD has a parameter of shape \[3, 3\] twice"):
        optimizer.add_param_group({"params": [layer.bias, layer.weight]})
    assert len(optimizer.param_groups) == len(optimizer.masters) == 1
    optimizer.add_param_group({"params": [layer.bias]})
    assert len(optimizer.masters) == 2


def test_quantised_weights_have_no_masters() -> None:
    codes, small = torch.ones(2, dtype=torch.int8), torch.ones(2).bfloat16()
    optimizer = Optimizer(torch.optim.SGD([codes, small]), LocalTransport.ring(1)[0], master_weights=True)
    assert [parameter for parameter, _ in optimizer.masters] == [small]


def test_a_gradient_that_changes_before_the_global_check_is_noticed() -> None:
    case = Case(2, 1, {(1, 0): 3.0})

    def rank_loop(transport: LocalTransport) -> None:
        weights = case.weights(transport.rank)
        optimizer = Optimizer(case.make(weights), transport, max_norm=MAX_NORM, timeout=60)
        case.backward(weights, transport.rank, 0)
        optimizer.step()
        optimizer.optimizer.zero_grad(set_to_none=False)  # not ours
        optimizer.validate()

    with pytest.raises(PipelineError, match=r"shape \[5, 3\] was changed in place after step\(\)"):
        results_on_threads(2, rank_loop)


@pytest.mark.parametrize(
    ("undo", "masters", "others", "error"),
    [
        ("snapshot", False, 0.1, False),
        ("snapshot", False, 4.0, True),
        ("snapshot", True, 4.0, True),
        ("inverse", False, 4.0, True),
        (None, False, 0.1, True),
    ],
)
def test_weights_changed_before_the_global_check_stay_or_are_noticed(
    undo: str | None, masters: bool, others: float, error: bool
) -> None:
    """By another thread: a step that is done, or done again, later would be without the change, or after it."""

    def change(weight: Tensor) -> None:
        with torch.no_grad():
            weight.clamp_(0.75, 1.0)

    def rank_loop(transport: LocalTransport) -> float:
        weight = nn.Parameter(torch.ones((), dtype=torch.bfloat16 if masters else torch.float32))
        sgd = torch.optim.SGD([weight], lr=1.0)
        optimizer = Optimizer(sgd, transport, max_norm=1.0, undo=undo, master_weights=masters, timeout=60)
        weight.grad = torch.full_like(weight, others if transport.rank else 0.5)
        optimizer.step()
        if transport.rank == 0:
            thread = threading.Thread(target=change, args=(weight,))
            thread.start()
            thread.join()
        optimizer.validate()
        return weight.item()

    if error:
        with pytest.raises(PipelineError, match=r"weight of shape \[\] was changed after step\(\).*validate\(\) first"):
            results_on_threads(2, rank_loop)
    else:
        assert results_on_threads(2, rank_loop)[0] == 0.75


@pytest.mark.parametrize("place", ["weight", "gradient"])
def test_writes_that_torch_does_not_count_are_noticed_in_the_first_steps(place: str) -> None:
    def rank_loop(transport: LocalTransport) -> None:
        weight = nn.Parameter(torch.ones(3))
        array = weight.detach().numpy()
        optimizer = Optimizer(torch.optim.SGD([weight], lr=1.0), transport, max_norm=1.0, timeout=60)
        weight.grad = torch.ones(3)
        optimizer.step()
        if transport.rank == 0 and place == "weight":
            array *= 0.5
        if transport.rank == 0 and place == "gradient":
            weight.grad.data.mul_(0.5)
        optimizer.validate()

    with pytest.raises(PipelineError, match=r"shape \[3\] was changed after step\(\).*data.*validate\(\) first"):
        results_on_threads(2, rank_loop)


@pytest.mark.parametrize("forced", [3.0, math.nan, 0.0])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_look_at_the_state_waits_for_the_norm(forced: float, wrapped: bool) -> None:
    """It comes before that of the weight, and finds tensors and counts that are not those of a step taken back."""
    case = Case(2, 3, {(1, step): forced for step in range(3)}, OPTIMIZERS["schedule-free"])

    def rank_loop(transport: LocalTransport, validate: bool = False) -> tuple[list[Tensor], int, type]:
        weights = case.weights(transport.rank)
        inner: Any = case.make(weights)
        outer = Wrapper(inner) if wrapped else inner
        optimizer = Optimizer(outer, transport, max_norm=MAX_NORM, adaptive=False, timeout=60)
        kinds = {type(inner)}
        for step in range(3):
            case.backward(weights, transport.rank, step)
            optimizer.step()
            if validate:
                optimizer.validate()
            inner.swap(0.3)
            inner.swap(-0.2)
            kinds.add(type(inner))
        (kind,) = kinds
        return weights, optimizer.undone, kind

    for rank in range(2):
        found, undone, kind = results_on_threads(2, rank_loop)[rank]
        expected, *_ = results_on_threads(2, lambda transport: rank_loop(transport, validate=True))[rank]
        assert kind is ScheduleFree
        assert all(map(torch.equal, found, expected))
        assert undone == (3 if forced and rank == 0 else 0)


def test_a_closure_is_called_once_with_gradients_and_its_loss_returned() -> None:
    weight = nn.Parameter(torch.ones(()))
    optimizer = Optimizer(torch.optim.SGD([weight], lr=0.25), LocalTransport.ring(1)[0])
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = 2 * weight
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 2
    assert optimizer.step() is None
    assert (len(calls), weight.item()) == (1, 0.0)
    with pytest.raises(TypeError, match=r"Optimizer.step: closure must be callable, or None; got 3"):
        optimizer.step(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": torch.optim.LBFGS([torch.ones(1)])}, r"LBFGS.step\(\) computes losses by a closure"),
        ({"max_norm": math.nan}, "max_norm must be above 0; got nan"),
        ({"max_norm": True}, "max_norm must be a number above 0; got True"),
        ({"timeout": -1}, "Optimizer: timeout must be a number of seconds above 0"),
        ({"timeout": math.inf}, "Optimizer: timeout must be a number of seconds above 0"),
        ({"undo": "inverse", "optimizer": torch.optim.Adagrad([torch.ones(1)])}, "knows AdamW and SGD; got Adagrad"),
        ({"undo": "inverse", "optimizer": torch.optim.SGD([torch.ones(1).half()])}, "needs parameters in fp32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"optimizer": torch.optim.SGD([torch.ones(1)]), "pipe": LocalTransport.ring(1)[0]}
    with pytest.raises((TypeError, ValueError), match=message):
        Optimizer(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"betas": (0.0, 0.9)}, "a beta of 0"),
        ({"lr": 2.0, "weight_decay": 0.5}, "lr x weight_decay of 1"),
    ],
)
def test_settings_that_lose_information_cannot_be_inverted(settings: dict[str, Any], what: str) -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    first, _ = LocalTransport.ring(2)
    first.gather = lambda value: [value, value]
    optimizer = Optimizer(torch.optim.AdamW([weight], **settings), first, undo="inverse")
    with pytest.raises(PipelineError, match=f"{what} cannot be inverted; use undo='snapshot'"):
        optimizer.step()


def test_nothing_is_copied_that_no_step_needs() -> None:
    """Without clipping a step stays or is taken back for good, which a snapshot does without its gradients."""

    def rank_loop(transport: LocalTransport) -> tuple[int, ...]:
        weight = nn.Parameter(torch.zeros(3))
        weight.main_grad = torch.ones(3)
        held = []
        for max_norm in (None, 100.0):
            sgd = torch.optim.SGD([weight], lr=0.1)
            optimizer = Optimizer(sgd, transport, max_norm=max_norm, timeout=60)
            optimizer.step()
            held.append(len(optimizer._boundary.pending.gradients) if optimizer._boundary.pending else 0)
            optimizer.validate()
        return tuple(held)

    assert results_on_threads(2, rank_loop) == [(0, 1), (0, 0)]


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_are_views_stay_views(set_to_none: bool) -> None:
    def rank_loop(transport: LocalTransport) -> float:
        flat, weight = torch.zeros(1), nn.Parameter(torch.zeros(1))
        weight.grad = flat.view(1)
        flat.fill_(4.0 if transport.rank else 0.6)
        optimizer = Optimizer(torch.optim.SGD([weight], lr=1.0), transport, max_norm=1.0, timeout=60)
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        optimizer.validate()
        if not set_to_none:
            assert weight.grad.data_ptr() == flat.data_ptr()
            assert not flat.any()
        return weight.item()

    norm = math.hypot(0.6, 4.0)
    assert results_on_threads(2, rank_loop) == [pytest.approx(-g / norm) for g in (0.6, 4.0)]
