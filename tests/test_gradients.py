"""Deferred gradients are those of an untouched copy of the model, however it is trained: what is drawn is which W wait,
when they run, what is frozen, recomputed, hooked or cast, and a derivative within the loss.

Below are situations that no random training meets, in which split gradients get lost elsewhere. The slow run has
another seed than the quick one: see `tests/support/seeds.py`.
"""

from __future__ import annotations

import functools
import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbkern
from tests.support.needs import OLD_TORCH
from tests.support.seeds import seed
from tests.support.tied import Block, Energy, Tied, microbatch, pair
from zbkern import testing


@dataclass
class Training:
    """places: of each microbatch, where W waits. at_once: names of modules whose W does not wait. hook: how, and before
    which microbatch it is registered, or, half a number later, between its forward and its backward. runs: "each", or
    all at the end.
    """

    kind: type[nn.Module]
    places: list[str]
    merge: bool
    max_bytes: int | None
    runs: str
    at_once: list[str]
    frozen: list[str]
    checkpointed: str
    hook: tuple[str, float] | None
    begun: str
    autocast: bool
    penalty: bool
    hooked: list[list[Tensor]] = field(default_factory=lambda: [[], []])


def draw(rng: random.Random) -> Training:
    kind = rng.choice([Tied, Energy])
    names = [name for name, module in kind().named_modules() if name]
    begun, penalty = rng.choice(["nothing", "nothing", "gradients", "main_grad"]), kind is Energy and rng.random() < 0.5
    checkpointed = rng.choice(["", "", "again", "reentrant" if kind is Tied else "again"])
    hook = None
    # a reentrant checkpoint has backwards of its own, each of which torch tells the hook of
    if begun != "main_grad" and checkpointed != "reentrant" and rng.random() < 0.4:
        hook = rng.choice(HOOKS), rng.choice([0.0, 0.5, 1.0, 1.5])
    if OLD_TORCH and checkpointed:
        hook = None  # torch 2.8 loses those of a weight that any autograd.Function saves there
    return Training(
        kind,
        [rng.choice(["", "forward", "backward", "backward", "forward and backward"]) for _ in range(rng.randint(1, 4))],
        rng.random() < 0.7,
        rng.choice([None, None, 0, 2000]),
        "each" if hook else rng.choice(["each", "at the end", "at the end"]),
        rng.sample(names, rng.choice([0, 0, 1, len(names)])),
        rng.sample(names, rng.choice([0, 0, 1, 2])),
        checkpointed,
        hook,
        begun,
        not penalty and begun == "nothing" and rng.random() < 0.15,
        penalty,
    )


OWN = ("scale", "mixing", "product")  # no layer of ours has them
HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def models(training: Training) -> list[nn.Module]:
    """An untouched one, and one whose W may wait."""
    model, twin = pair(training.kind)
    zbkern.convert(zbkern.restore(twin), defer=lambda name, module: name not in training.at_once)
    for index, each in enumerate((model, twin)):
        for name, parameter in each.named_parameters():
            if any(name.startswith(f"{frozen}.") for frozen in training.frozen):
                parameter.requires_grad_(False)
            elif training.begun == "gradients":
                parameter.grad = torch.ones_like(parameter)
            elif training.begun == "main_grad" and index and not name.startswith(OWN):
                parameter.main_grad = torch.zeros_like(parameter)
        if training.checkpointed and each.first.down.weight.requires_grad:
            reentrant = training.checkpointed == "reentrant"
            each.first.forward = functools.partial(checkpoint, each.first.forward, use_reentrant=reentrant)
        each.to(torch.float32 if training.autocast else torch.float64)
    return [model, twin]


def loss_of(training: Training, model: nn.Module, key: int) -> Tensor:
    x = microbatch(training.kind, key)
    if x.is_floating_point():
        x = x.to(next(model.parameters()).dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=training.autocast):
        y = model(x)
    loss = y.float().square().mean() if training.autocast else y.square().mean()
    if training.penalty:  # of forces, or of slopes: the gradient of x is a part of the loss
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = loss + (slope - x.detach().sin()).square().sum()
    return loss


def hook_onto(training: Training, model: nn.Module, seen: list[Tensor], when: float) -> None:
    weight = model.first.up.weight
    if training.hook is not None and training.hook[1] == when and weight.requires_grad:
        take = "post" in training.hook[0]
        getattr(weight, training.hook[0])(lambda given: seen.append((given.grad if take else given).clone()))


def train(training: Training, rng: random.Random) -> None:
    both, queue = models(training), zbkern.WGradQueue(training.max_bytes, training.merge)
    for key, place in enumerate(training.places):
        for model, seen in zip(both, training.hooked, strict=True):
            waits = model is both[1]
            hook_onto(training, model, seen, key)
            with queue.defer(key) if waits and "forward" in place else nullcontext():
                loss = loss_of(training, model, key)
            hook_onto(training, model, seen, key + 0.5)
            if loss.requires_grad:
                with queue.defer(key) if waits and "backward" in place else nullcontext():
                    loss.backward()
        assert training.max_bytes is None or queue.bytes <= training.max_bytes or training.hook
        if training.runs == "each":
            queue.run(key)
    while queue.pending():
        keys = queue.keys()
        chosen = rng.sample(keys, rng.randint(1, len(keys)))
        queue.run(chosen[0] if rng.random() < 0.4 else chosen) if rng.random() < 0.7 else queue.run_one()
    assert queue.bytes == 0
    largest = max([float(p.grad.abs().max()) for p in both[0].parameters() if p.grad is not None], default=0.0)
    tolerance, scale = (3e-2, 0.1 * largest) if training.autocast else (None, 1e-3 * largest)
    for (name, theirs), ours in zip(both[0].named_parameters(), both[1].parameters(), strict=True):
        if getattr(ours, "main_grad", None) is not None:
            assert ours.grad is None, name
            expected = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
            testing.assert_close(ours.main_grad, expected, name)
        else:
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                testing.assert_close(ours.grad, theirs.grad, name, tolerance, scale)
    for ours, theirs in zip(*training.hooked, strict=True):
        testing.assert_close(ours, theirs, "what a hook has seen", tolerance)


@pytest.mark.parametrize("number", [100, pytest.param(150, marks=pytest.mark.slow)])
def test_gradients_are_those_of_an_untouched_model(number: int) -> None:
    rng = random.Random(seed(1 if number > 100 else 0))
    for trial in range(number):
        training = draw(rng)
        try:
            train(training, rng)
        except Exception:
            print(f"trial {trial}: {training}")
            raise


@pytest.mark.parametrize("frozen", ["up.", "up.weight", "up.bias"])
def test_frozen_between_b_and_w_drops_the_gradient_as_autograd_does(frozen: str) -> None:
    _, twin = pair(Block)
    queue = zbkern.WGradQueue()
    for _ in range(2):
        with queue.defer():
            twin(torch.randn(3, 6, dtype=torch.float64)).sum().backward()
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    queue.run()
    assert all((p.grad is None) == name.startswith(frozen) for name, p in twin.named_parameters())


class Products(nn.Module):
    """Layers that are zbkern's, and products with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.weight = nn.Linear(6, 6), nn.LayerNorm(6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) @ self.weight


@pytest.mark.parametrize("name", ["layer.weight", "layer.bias", "norm.weight", "weight"])
@pytest.mark.parametrize("frozen", list(itertools.product([True, False], repeat=2)))
def test_thawed_between_b_and_w_has_the_gradients_of_its_backwards(name: str, frozen: tuple[bool, bool]) -> None:
    """A weight that takes gradients in one B and none in the next, and is trained when W runs."""
    model, twin = pair(Products)
    queue = zbkern.WGradQueue()
    for module in (model, twin):
        parameter = module.get_parameter(name)
        torch.manual_seed(0)
        losses = []
        for key in range(2):
            with queue.defer(key):
                losses.append(module(torch.randn(3, 6, dtype=torch.float64)).square().sum())
        for key, (loss, is_frozen) in enumerate(zip(losses, frozen, strict=True)):
            parameter.requires_grad_(not is_frozen)
            with nullcontext() if module is model else queue.defer(key):
                loss.backward()
        parameter.requires_grad_(True)
    queue.run()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_once_and_in_b(reentrant: bool) -> None:
    model, twin = pair(lambda: nn.Sequential(Block(), Block()))
    runs: list[str] = []
    phase = ["F"]
    twin[0].register_forward_pre_hook(lambda *_: runs.append(phase[0]))
    queue = zbkern.WGradQueue()
    for key in range(3):
        x = torch.randn(3, 6, dtype=torch.float64)
        first, second = (x.clone().requires_grad_() for _ in range(2))
        model(first).square().sum().backward()
        phase[0] = "F"
        y = checkpoint(twin[0], second, use_reentrant=reentrant)
        loss = twin[1](y).square().sum()
        phase[0] = "B"
        with queue.defer(key):
            loss.backward()
        testing.assert_close(second.grad, first.grad)
    phase[0] = "W"
    held = queue.bytes
    queue.run()
    assert runs == ["F", "B"] * 3
    assert held < 3 * 8 * 3 * 6 * 40  # inputs and output gradients, nothing recomputed
    testing.assert_same_gradients(twin, model)
