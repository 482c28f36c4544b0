"""State outside of an optimizer's `state` and `param_groups`: undone with the rest, or refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.chunks import results_on_threads
from zbkern.pipeline import checkpoint
from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.transport.local import LocalTransport


class Holding(torch.optim.SGD):
    def __init__(self, parameters: Any, held: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.held = held


@pytest.mark.parametrize("held", [threading.Lock(), nn.Linear(1, 1), {"deep": [threading.Lock()]}])
def test_what_cannot_be_copied_is_refused(held: Any) -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"undo='snapshot' cannot copy Holding.held, .* use undo=None, or name it in"):
        Optimizer(Holding([weight], held), LocalTransport.ring(1)[0])
    Optimizer(Holding([weight], held), LocalTransport.ring(1)[0], undo=None)

    class Transient(Holding):
        transient_attributes = frozenset({"held"})

    Optimizer(Transient([weight], held), LocalTransport.ring(1)[0])


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


@pytest.mark.parametrize("undo", ["snapshot", None])
@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: [o], lambda o: {"a": (1, o)}, Box, lambda o: [Box({"b": o})]])
def test_optimizers_with_states_of_their_own_within_one_are_refused(wrap: Any, undo: str | None) -> None:
    """Nothing would save them; not where the state is shared, or where no step depends on them."""
    weight, transport = nn.Parameter(torch.ones(1)), LocalTransport.ring(1)[0]
    held = torch.optim.AdamW([weight])
    with pytest.raises(TypeError, match=r"Optimizer: Holding holds another optimizer, AdamW in held.*whose") as caught:
        Optimizer(Holding([weight], wrap(held)), transport, undo=undo)
    assert "give all that it holds to Optimizer([(first, max_norm), (second, max_norm)], pipe)" in str(caught.value)
    with pytest.raises(TypeError, match="checkpoint: Holding holds another optimizer"):
        checkpoint.save("nowhere", 1, nn.ParameterList([weight]), Holding([weight], wrap(held)))
    shared = Holding([weight], wrap(held))
    held.state = shared.state
    Optimizer(shared, transport, undo=None)

    class Transient(Holding):
        transient_attributes = frozenset({"held"})

    Optimizer(Transient([weight], wrap(torch.optim.AdamW([weight]))), transport, undo=undo)


def test_a_hyperparameter_that_is_a_tensor_stays_the_tensor_it_was() -> None:
    """Schedules write into it; and what is set while a step is pending is for the next one."""

    def rank_loop(transport: LocalTransport) -> tuple[Tensor, float]:
        weight, rate = nn.Parameter(torch.zeros(())), torch.tensor(1.0)
        sgd = torch.optim.SGD([weight], lr=rate)
        optimizer = Optimizer(sgd, transport, max_norm=1.0, timeout=20)
        weight.grad = torch.tensor(4.0 if transport.rank else 0.6)
        optimizer.step()
        rate.fill_(0.25)
        optimizer.validate()
        assert sgd.param_groups[0]["lr"] is rate
        return weight.item(), rate.item()

    norm = (0.6**2 + 4.0**2) ** 0.5
    assert results_on_threads(2, rank_loop) == [(pytest.approx(-g / norm), 0.25) for g in (0.6, 4.0)]
