"""An Optimizer is a torch.optim.Optimizer: learning-rate schedules take it; groups and hooks are the inner one's."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support.chunks import results_on_threads
from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.transport.local import LocalTransport


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("undo", ["snapshot", None])
def test_a_schedule_of_either_optimizer(undo: str | None, inner: bool) -> None:
    def rates(transport: LocalTransport) -> list[float]:
        weight = nn.Parameter(torch.zeros(()))
        optimizer = Optimizer(torch.optim.SGD([weight], lr=1.0), transport, undo=undo, max_norm=1e3)
        schedule = lr_scheduler.StepLR(optimizer.optimizer if inner else optimizer, 1, 0.5)
        steps = []
        for _ in range(4):
            optimizer.validate()
            steps.append(-weight.item())
            weight.grad = torch.ones(())
            optimizer.step()
            schedule.step()
        return steps

    assert results_on_threads(2, rates) == [[0.0, 1.0, 1.5, 1.75]] * 2


@pytest.mark.parametrize("undo", ["snapshot", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_that_comes_later(dtype: torch.dtype, undo: str | None) -> None:
    """With masters where the others have them; a tied parameter in it counts once."""

    def rank_loop(transport: LocalTransport) -> tuple[float | None, list[float], bool]:
        first, tied = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
        optimizer = Optimizer(
            torch.optim.SGD([first], lr=1.0),
            transport,
            max_norm=10.0,
            undo=undo,
            master_weights=dtype != torch.float32,
            tied={"table": tied},
            timeout=20,
        )
        first.grad = torch.tensor([3.0, 0.0], dtype=dtype)
        optimizer.step()
        optimizer.add_param_group({"params": [tied], "lr": 0.5})
        first.grad, tied.grad = torch.zeros(2, dtype=dtype), torch.tensor([0.0, 4.0], dtype=dtype)
        optimizer.step()
        optimizer.validate()
        return optimizer.last_norm, [*first.tolist(), *tied.tolist()], len(optimizer.masters) == 2

    for norm, weights, masters in results_on_threads(2, rank_loop):
        assert norm == pytest.approx(4.0)
        assert weights == [-2.0, 1.0, 1.0, -1.0]
        assert masters == (dtype == torch.bfloat16)


def test_a_group_that_cannot_be_inverted_is_refused() -> None:
    optimizer = Optimizer(torch.optim.SGD([torch.ones(1)]), LocalTransport.ring(1)[0], undo="inverse")
    with pytest.raises(ValueError, match=r"needs parameters in fp32; got torch.bfloat16"):
        optimizer.add_param_group({"params": [torch.ones(1).bfloat16()]})


def test_groups_state_and_hooks_are_the_inner_ones() -> None:
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.AdamW([weight], lr=0.1)
    optimizer = Optimizer(inner, LocalTransport.ring(1)[0])
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("state"))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is inner.param_groups
    assert calls == ["step", "state"]
    assert "lr: 0.1" in repr(optimizer)
    with pytest.raises(TypeError, match=r"Optimizer: is tied to the other ranks .* keep its state_dict\(\)"):
        copy.deepcopy(optimizer)


def test_a_grad_scaler_is_refused() -> None:
    """Else a rank that finds infinity would leave its step out, and the others would wait for it."""

    def rank_loop(transport: LocalTransport) -> None:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.full((2,), math.inf if transport.rank else 1.0)
        optimizer = Optimizer(torch.optim.SGD([weight]), transport, timeout=20)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(TypeError, match="which sees the gradients of this rank only; train in bfloat16"):
            scaler.step(optimizer)
        weight.grad = torch.ones(2)
        optimizer.step()
        optimizer.validate()
        assert weight.tolist() == pytest.approx([0.999, 0.999])

    results_on_threads(2, rank_loop)
