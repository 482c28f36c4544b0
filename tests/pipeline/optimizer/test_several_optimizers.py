"""Several torch optimizers in one Optimizer: their states, groups and hooks, and what they must have alike."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.chunks import results_on_threads
from zbkern.pipeline import Optimizer
from zbkern.pipeline.transport.local import LocalTransport


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
        optimizer = Optimizer(pairs, transport, undo="inverse", timeout=60)
        give_gradients(optimizer, 0.1)
        optimizer.step()
        state = optimizer._boundary.state
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
        Optimizer(parts, transport, tied=tied_names, timeout=60)

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
