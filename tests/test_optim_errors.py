"""What zbkern.optim.AdamW refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.optim_cases import trained, twins_of, weights
from zbkern.optim import AdamW


def test_a_state_dict_with_amsgrad_is_refused_and_changes_nothing() -> None:
    ours = weights()
    optimizer, other = AdamW(ours), torch.optim.AdamW(twins_of(ours), amsgrad=True)
    trained(optimizer, ours, range(1))
    trained(other, list(other.param_groups[0]["params"]), range(2))
    with pytest.raises(ValueError, match="amsgrad is not supported"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state[ours[0]]["step"] == 1


@pytest.mark.parametrize(
    ("other", "missing"),
    [
        (lambda p: torch.optim.SGD(p, momentum=0.9), "betas, eps"),
        (torch.optim.Adagrad, "betas"),
        (torch.optim.Adamax, "exp_avg_sq"),
        (None, "lr, betas, eps, weight_decay .with no param_groups."),
    ],
)
def test_the_state_of_another_kind_of_optimizer_is_refused_and_changes_nothing(other: Any, missing: str) -> None:
    ours = weights()
    optimizer = AdamW(ours)
    trained(optimizer, ours, range(1))
    state: dict[str, Any] = {}
    if other is not None:
        source = other(twins_of(ours))
        trained(source, list(source.param_groups[0]["params"]), range(2))
        state = source.state_dict()
    with pytest.raises(ValueError, match=f"AdamW.load_state_dict: state_dict must be that of an AdamW; .* {missing}"):
        optimizer.load_state_dict(state)
    assert optimizer.state[ours[0]]["step"] == 1
    trained(optimizer, ours, range(1, 2))


def test_gradients_that_are_sparse_or_of_another_shape_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match=r"dense and of their parameter's shape; got torch\.sparse_coo"):
        AdamW([weight]).step()
    weight.main_grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"got torch.strided \[4\] for \[2, 2\]"):
        AdamW([weight]).step()
