"""The state of an Optimizer: saved and loaded bit for bit, and refused where it is that of something else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.chunks import assert_same
from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.transport.local import LocalTransport


def test_masters_take_what_is_written_into_their_weights() -> None:
    """Where it differs, and nothing else: what rounding hides is in the masters alone, and steps as small add up."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    inner = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
    optimizer = Optimizer(inner, master_weights=True)  # without torch.distributed a pipeline of its own
    with torch.no_grad():
        weight[0] = 4.0  # a checkpoint of weights that is read after the optimizer is made
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        with torch.no_grad():
            weight[1].clamp_(max=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    master = optimizer.masters[0][1]
    torch.testing.assert_close(master, torch.tensor([4.0 - 3e-4, 0.5 - 2e-4, 1.0 - 3e-4]), rtol=0, atol=1e-6)
    torch.testing.assert_close(weight, master.bfloat16(), rtol=0, atol=0)


def stepped(kind: Any) -> tuple[nn.Parameter, Optimizer]:
    """A bf16 parameter with a master, after one step."""
    weight = nn.Parameter(torch.ones(2).bfloat16())
    weight.grad = torch.ones(2).bfloat16()
    optimizer = Optimizer(kind([weight], lr=0.1), LocalTransport.ring(1)[0], master_weights=True)
    optimizer.step()
    return weight, optimizer


class Derived(torch.optim.AdamW):
    """A user's own."""


@pytest.mark.parametrize("kinds", [(torch.optim.AdamW, Derived), (Derived, torch.optim.AdamW)])
def test_the_state_of_a_class_and_of_one_derived_from_it_is_of_one_kind(kinds: tuple[Any, Any]) -> None:
    (_, saved), (weight, optimizer) = map(stepped, kinds)
    weight.grad = torch.full((2,), 3.0).bfloat16()
    optimizer.step()
    optimizer.load_state_dict(saved.state_dict())
    optimizer.step()
    assert optimizer.state[optimizer.masters[0][1]]["step"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, r"state must be what Optimizer.state_dict\(\) gave, .* got \[\]"),
        (lambda state: state["optimizer"], r"got \['param_groups', 'state'\]; a torch optimizer's own state goes into"),
        (lambda state: 3, "got int"),
        (lambda state: {**state, "masters": []}, r"master weights of shapes \[\[2\]\]; got that of AdamW with \[\]"),
        (
            lambda state: stepped(torch.optim.SGD)[1].state_dict(),
            "state must be that of AdamW .*; got that of SGD .*; load",
        ),
        (
            lambda state: stepped(torch.optim.Adamax)[1].state_dict(),
            "must be that of AdamW .*; got that of Adamax .*; load",
        ),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(change: Any, message: str) -> None:
    _, optimizer = stepped(torch.optim.AdamW)
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(change(state))
    after = optimizer.state_dict()
    assert after.pop("kinds") == before.pop("kinds")
    assert_same(after, before)
    optimizer.load_state_dict(state)
    optimizer.step()
