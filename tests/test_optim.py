"""zbkern.optim.AdamW against torch.optim.AdamW."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.support.optim_cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    SETTINGS,
    give,
    gradients,
    same,
    trained,
    twins_of,
    two_groups,
    weights,
)
from zbkern import testing
from zbkern.optim import AdamW


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("groups", [list, two_groups])
@pytest.mark.parametrize("schedule", [None, lr_scheduler.ExponentialLR, lr_scheduler.OneCycleLR])
def test_many_steps_are_torchs(dtype: torch.dtype, groups: Callable[..., Any], schedule: Any) -> None:
    ours = weights(dtype)
    theirs = twins_of(ours)
    optimizers = [AdamW(groups(ours), **SETTINGS), torch.optim.AdamW(groups(theirs), fused=True, **SETTINGS)]
    more = {"gamma": 0.9} if schedule is lr_scheduler.ExponentialLR else {"max_lr": 0.1, "total_steps": 60}
    schedulers = [schedule(optimizer, **more) for optimizer in optimizers] if schedule else []
    for step in range(15):
        grads: list[Tensor | None] = list(gradients(step, dtype))
        grads[step % 5 :][:1] = [None] * len(grads[step % 5 :][:1])  # a different one is missing, or none
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            give(parameters, grads)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    same(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        state, expected = optimizers[0].state[a], optimizers[1].state[b]
        assert state.keys() == expected.keys()
        assert state["step"] == expected["step"]
        same([state["exp_avg"], state["exp_avg_sq"]], [expected["exp_avg"], expected["exp_avg_sq"]], False)


@pytest.mark.parametrize("grad_dtype", [BF16, FP32, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_masters_are_what_fp32_adamw_gives(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> None:
    """Gradients of the parameter's dtype in .grad, or of any in main_grad; either as they are."""
    ours = weights(dtype)
    theirs = twins_of(ours, FP32)
    optimizer = AdamW(ours, master_weights=True, **SETTINGS)
    other = torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    for step in range(30):
        grads = gradients(step, grad_dtype or dtype)
        if grad_dtype is None:
            give(ours, grads)
        else:
            give(ours, [torch.full_like(grad, math.nan) for grad in grads])  # is not read
            for parameter, grad in zip(ours, grads, strict=True):
                parameter.main_grad = grad
        give(theirs, grads)
        optimizer.step()
        other.step()
        for parameter in ours:
            assert torch.equal(parameter, optimizer.state[parameter]["master"].to(dtype))
    same([optimizer.state[parameter]["master"] for parameter in ours], theirs)


def test_small_parameters_without_masters_have_wide_state() -> None:
    ours = weights(BF16)
    optimizer = AdamW(ours, **SETTINGS)
    theirs = twins_of(ours, FP32)
    other = torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    for step in range(5):
        give(ours, gradients(step, BF16))
        give(theirs, gradients(step, BF16))
        optimizer.step()
        other.step()
        with torch.no_grad():
            for twin in theirs:
                twin.copy_(twin.to(BF16))
        same(ours, [twin.to(BF16) for twin in theirs])
    assert {optimizer.state[p][name].dtype for p in ours for name in ("exp_avg", "exp_avg_sq")} == {FP32}


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_clipping_is_torchs(dtype: torch.dtype) -> None:
    ours = weights(dtype)
    theirs = twins_of(ours, FP32)
    optimizer = AdamW(two_groups(ours), max_norm=3.0, master_weights=True)
    other = torch.optim.AdamW(two_groups(theirs), foreach=True)
    for step in range(10):
        grads = [grad * (0.1 if step % 3 else 2.0) for grad in gradients(step)]
        give(ours, grads)
        give(theirs, [grad.to(dtype) for grad in grads])
        given = [parameter.grad.clone() for parameter in ours]
        norm = nn.utils.clip_grad_norm_(theirs, 3.0)
        optimizer.step()
        other.step()
        testing.assert_close(optimizer.last_norm, norm, "norm")
        same([parameter.grad for parameter in ours], given)  # are not scaled
    same([optimizer.state[p].get("master", p) for p in ours], theirs, False)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38])
def test_a_step_that_is_not_finite_changes_nothing(bad: float) -> None:
    ours = weights(BF16)
    optimizer = AdamW(ours, max_norm=1.0, master_weights=True)
    for step in range(4):
        before = [parameter.detach().clone() for parameter in ours], copy.deepcopy(optimizer.state_dict()["state"])
        grads = gradients(step, BF16)
        if step in (0, 2):
            grads[2][1, 2, 0] = bad
        give(ours, grads)
        optimizer.step()
        assert optimizer.last_norm.isfinite() == (step in (1, 3))
        if step == 2:
            same(ours, before[0])
            for index, state in before[1].items():
                same(list(optimizer.state_dict()["state"][index].values()), list(state.values()))
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_grad_scaler_hands_its_scale_to_the_device(max_norm: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with fp16 gradients, which GradScaler.unscale_ refuses."""
    ours = weights(FP16)
    theirs = twins_of(ours, FP32)
    optimizer = AdamW(ours, max_norm=max_norm, master_weights=True)
    other = torch.optim.AdamW(theirs, foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaler.scale(torch.ones(()))
    for step in range(6):
        scale = scaler.get_scale()
        grads = gradients(step, FP16)
        give(ours, [grad * scale for grad in grads])
        if step == 2:
            ours[1].grad[3] = math.inf
        give(theirs, grads)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(theirs, max_norm)
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            other.step()
    assert scaler.get_scale() == 16.0  # 8, 16 after two, 8 by the third, 16 after two more
    same([optimizer.state[p]["master"] for p in ours], theirs, False)


# ---- state


@pytest.mark.parametrize("way", ["state_dict", "file", "deepcopy"])
@pytest.mark.parametrize(("dtype", "masters"), [(FP32, False), (BF16, False), (BF16, True)])
def test_a_state_dict_goes_on_bit_for_bit(dtype: torch.dtype, masters: bool, way: str, tmp_path: Any) -> None:
    ours = weights(dtype)
    optimizer = AdamW(two_groups(ours), master_weights=masters, max_norm=1.0)
    trained(optimizer, ours, range(4))
    again = twins_of(ours)
    if way == "deepcopy":
        again, other = copy.deepcopy((ours, optimizer))
        assert other.max_norm == 1.0
    else:
        state = copy.deepcopy(optimizer.state_dict())
        if way == "file":
            torch.save(state, tmp_path / "state")
            state = torch.load(tmp_path / "state", weights_only=True)
        other = AdamW(two_groups(again), master_weights=masters, max_norm=1.0, lr=5.0)
        trained(other, twins_of(ours), range(0))
        other.load_state_dict(state)
        first = state["state"][0]["exp_avg"]
        assert first.data_ptr() != other.state[again[0]]["exp_avg"].data_ptr()
    same(trained(other, again, range(4, 8)), trained(optimizer, ours, range(4, 8)))


@pytest.mark.parametrize("fused", [False, True])
def test_state_dicts_of_torchs_adamw_load_and_the_other_way_round(fused: bool) -> None:
    ours = weights()
    theirs = twins_of(ours)
    optimizer, other = AdamW(two_groups(ours)), torch.optim.AdamW(two_groups(theirs), foreach=not fused, fused=fused)
    trained(other, theirs, range(3))
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            a.copy_(b)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    same(trained(optimizer, ours, range(3, 6)), trained(other, theirs, range(3, 6)), fused)
    third = twins_of(ours)
    back = torch.optim.AdamW(two_groups(third), foreach=not fused, fused=fused)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    same(trained(back, third, range(6, 9)), trained(optimizer, ours, range(6, 9)), fused)


def test_masters_come_and_go_with_how_it_is_constructed() -> None:
    ours = weights(BF16)
    plain, kept = AdamW(ours), AdamW(ours, master_weights=True)
    trained(kept, ours, range(2))
    plain.load_state_dict(kept.state_dict())
    assert not plain.param_groups[0]["master_weights"]
    assert all("master" not in state for state in plain.state.values())
    trained(plain, ours, range(2, 4))
    kept.load_state_dict(plain.state_dict())
    trained(kept, ours, range(4, 5))
    assert all(torch.equal(kept.state[p]["master"].to(BF16), p) for p in ours)


def test_groups_may_differ_in_masters_and_be_added_later() -> None:
    ours = weights(BF16)
    optimizer = AdamW(ours[:2], master_weights=True)
    trained(optimizer, ours, range(1))
    optimizer.add_param_group({"params": ours[2:], "master_weights": False})
    trained(optimizer, ours, range(1, 2))
    assert ["master" in optimizer.state[p] for p in ours] == [True, True, False, False]


def test_a_learning_rate_may_be_a_tensor() -> None:
    ours, lr = weights(), torch.tensor(0.01)
    theirs = twins_of(ours)
    optimizer, other = AdamW(ours, lr=lr), torch.optim.AdamW(theirs, lr=0.01)
    schedulers = [lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, other)]
    for step in range(3):
        trained(optimizer, ours, range(step, step + 1))
        trained(other, theirs, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    same(ours, theirs, False)


def test_a_closure_is_called_first() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = AdamW([weight], lr=0.1, weight_decay=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.9))


def test_gradients_are_cleared_wherever_they_are() -> None:
    ours = weights(BF16)
    give(ours, gradients(0))
    kept = ours[1].main_grad = torch.ones(7)
    AdamW(ours).zero_grad()
    assert all(parameter.grad is None for parameter in ours)
    assert ours[1].main_grad is kept
    assert not kept.any()


def test_no_gradients_no_step() -> None:
    optimizer = AdamW(weights(), max_norm=1.0)
    optimizer.step()
    assert optimizer.last_norm is None
    assert not any(optimizer.state.values())
