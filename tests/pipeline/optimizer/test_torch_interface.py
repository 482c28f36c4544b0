"""An Optimizer is a torch.optim.Optimizer: schedules, groups, hooks and states are those of the one that it drives."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.support.chunks import assert_same, results_on_threads
from tests.support.optimizer_cases import Wrapper
from zbkern.pipeline import checkpoint
from zbkern.pipeline.optimizer import Optimizer
from zbkern.pipeline.transport.local import LocalTransport

# ---- schedules and groups


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("undo", ["snapshot", None])
def test_a_schedule_of_the_torch_optimizer(undo: str | None) -> None:
    """Of the Optimizer: test_optimizer_random.py."""

    def rates(transport: LocalTransport) -> list[float]:
        weight = nn.Parameter(torch.zeros(()))
        optimizer = Optimizer(torch.optim.SGD([weight], lr=1.0), transport, undo=undo, max_norm=1e3)
        schedule = lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
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
            timeout=60,
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
        optimizer = Optimizer(torch.optim.SGD([weight]), transport, timeout=60)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(TypeError, match="which sees the gradients of this rank only; train in bfloat16"):
            scaler.step(optimizer)
        weight.grad = torch.ones(2)
        optimizer.step()
        optimizer.validate()
        assert weight.tolist() == pytest.approx([0.999, 0.999])

    results_on_threads(2, rank_loop)


# ---- hooks: once per step that counts, in order, with what a synchronous step would show them


def test_hooks_may_be_removed_and_added_while_a_step_is_pending() -> None:
    calls: list[str] = []

    def rank_loop(transport: LocalTransport) -> None:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = Optimizer(torch.optim.SGD([weight], lr=0.1), transport, timeout=60)
        if transport.rank == 0:
            handle = optimizer.register_step_post_hook(lambda *_: calls.append("first"))
        for _ in range(3):
            weight.grad = torch.ones(2)
            optimizer.step()
            if transport.rank == 0:
                handle.remove()
                optimizer.register_step_post_hook(lambda *_: calls.append("later"))
            optimizer.validate()

    results_on_threads(2, rank_loop)
    assert calls == ["later"] * (1 + 2 + 3)


def project(weights: list[nn.Parameter]) -> Any:
    @torch.no_grad()
    def hook(*_: Any) -> None:
        for weight in weights:
            weight.clamp_(-0.5, 0.5)

    return hook


def test_a_hook_may_change_weights() -> None:
    """No forward begins with the weights before it."""

    def rank_loop(transport: LocalTransport) -> list[Tensor]:
        weights = [nn.Parameter(torch.ones(2))]
        optimizer = Optimizer(torch.optim.SGD(weights, lr=0.1), transport, timeout=60)
        optimizer.register_step_post_hook(project(weights))
        weights[0].grad = torch.ones(2)
        optimizer.step()
        assert optimizer._boundary.state != "early"
        optimizer.validate()
        return weights[0].tolist()

    assert results_on_threads(2, rank_loop) == [[0.5, 0.5]] * 2


def test_what_a_hook_writes_into_masters_reaches_the_weights() -> None:
    weight = nn.Parameter(torch.ones(2).bfloat16())
    inner = torch.optim.SGD([weight], lr=0.1)
    optimizer = Optimizer(inner, LocalTransport.ring(1)[0], master_weights=True)
    inner.register_step_post_hook(project([master for _, master in optimizer.masters]))
    weight.grad = torch.ones(2).bfloat16()
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("undo", ["snapshot", None])
def test_a_wrapped_optimizer_steps_as_the_one_inside(undo: str | None) -> None:
    def train(wrap: Any) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        layer, seen = nn.Linear(4, 4), []
        inner = torch.optim.AdamW(layer.parameters(), lr=0.1)
        inner.register_step_post_hook(lambda *_: seen.append(layer.weight.detach().clone()))
        optimizer = Optimizer(wrap(inner), LocalTransport.ring(1)[0], max_norm=0.5, undo=undo)
        for _ in range(4):
            optimizer.zero_grad()
            layer(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        optimizer.validate()
        return layer.weight.detach(), seen

    (weight, seen), (expected, wanted) = train(Wrapper), train(lambda inner: inner)
    assert_same(weight, expected)
    assert len(seen) == len(wanted) == 4
    assert_same(seen, wanted)


# ---- attributes of the torch optimizer: undone with the rest, or refused


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
        optimizer = Optimizer(sgd, transport, max_norm=1.0, timeout=60)
        weight.grad = torch.tensor(4.0 if transport.rank else 0.6)
        optimizer.step()
        rate.fill_(0.25)
        optimizer.validate()
        assert sgd.param_groups[0]["lr"] is rate
        return weight.item(), rate.item()

    norm = (0.6**2 + 4.0**2) ** 0.5
    assert results_on_threads(2, rank_loop) == [(pytest.approx(-g / norm), 0.25) for g in (0.6, 4.0)]


# ---- states: saved and loaded bit for bit, and refused where they are those of something else


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
