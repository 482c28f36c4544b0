"""Every public op, however it is called, has the values and derivatives of torch's own in float64.

What is drawn: the call (tests/support/op_cases.py), then dtype, layout, what is frozen, how many microbatches, whether
and where W waits, where gradients go, a derivative within the loss. What no random call meets: test_not_drawn.py.
The slow run has another seed than the quick one: see `tests/support/seeds.py`.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zbkern
from tests.support import op_cases
from tests.support.needs import OLD_TORCH
from tests.support.op_cases import Call
from tests.support.seeds import seed
from zbkern import functional as Z
from zbkern import testing
from zbkern.kernels.reference import grouped as reference_grouped

SLACK = {torch.float64: None, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass
class Way:
    """How a call is made. autocast: to bfloat16, around the forward of float32. waits: where its W does. constant: the
    inputs without gradients. begun: where gradients are added. penalty: derivatives are a part of the loss. used: the
    outputs that are."""

    dtype: torch.dtype
    autocast: bool
    inputs_layout: str
    gradients_layout: str
    microbatches: int
    waits: str
    merge: bool
    max_bytes: int | None
    frozen: list[bool]
    constant: list[bool]
    begun: str
    penalty: bool
    used: slice
    readable: bool


def draw_way(rng: random.Random, call: Call) -> Way:
    autocast = call.smooth and rng.random() < 0.1
    low = [torch.float32, torch.bfloat16, torch.float16]
    dtype = torch.float32 if autocast else torch.float64 if op_cases.some(rng) or not call.smooth else rng.choice(low)
    frozen = [rng.random() < 0.25 for _ in call.parameters]
    constant = [rng.random() < 0.2 for _ in call.inputs]
    waits = rng.choice(["no queue", "beside a queue", "backward", "forward and backward"])
    return Way(
        dtype,
        autocast,
        rng.choice(["plain", "plain", "every second", "transposed"]),
        rng.choice(["plain", "every second", "one number"]),
        rng.randint(1, 3),
        waits,
        op_cases.some(rng),
        rng.choice([None, None, 0]),
        frozen,
        constant,
        rng.choice(["nothing", "gradients", "main_grad" if "backward" in waits else "nothing"]),
        dtype == torch.float64 and call.twice and bool(call.inputs) and rng.random() < 0.3,
        rng.choice([slice(None), slice(None), slice(1), slice(1, None)]),
        op_cases.some(rng),
    )


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values, elsewhere in memory."""
    if layout == "one number" and tensor.numel():
        return tensor.flatten()[0].expand(tensor.shape)
    if layout == "every second" and tensor.dim():
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.mT.contiguous().mT if layout == "transposed" and tensor.dim() > 1 else tensor


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def outputs(y: Any) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def loss_of(y: tuple[Tensor, ...], dy: Sequence[Tensor], slopes_of: Sequence[Tensor]) -> Tensor:
    """slopes_of: the inputs whose derivatives are a part of it."""
    loss = sum((a * b.to(a.dtype)).sum() for a, b in zip(y, dy, strict=True))
    if not slopes_of:
        return loss
    slopes = torch.autograd.grad(loss, slopes_of, create_graph=True, allow_unused=True)
    return loss.square() + sum(slope.square().sum() for slope in slopes if slope is not None)


class Trial:
    """A call made in a way, beside torch's in float64."""

    def __init__(self, call: Call, way: Way, seed: int) -> None:
        self.call, self.way = call, way
        self.generator = torch.Generator().manual_seed(seed)
        self.slack, self.scale = (
            (0.05 if way.autocast else SLACK[way.dtype]),
            0.1 if way.dtype == torch.float64 else 1.0,
        )
        self.parameters = [
            self.random(s).requires_grad_(not f) for s, f in zip(call.parameters, way.frozen, strict=True)
        ]
        self.others = copies(self.parameters)
        self.terms: list[list[float]] = [[] for _ in self.others]  # the largest value of each that a gradient adds up
        for ours, other, terms in zip(self.parameters, self.others, self.terms, strict=True):
            if other.requires_grad:
                other.register_hook(lambda term, terms=terms: terms.append(term.abs().max().item()))
            if way.begun == "gradients" and ours.requires_grad:
                ours.grad, other.grad = torch.ones_like(ours), torch.ones_like(other)
            elif way.begun == "main_grad":
                ours.main_grad = torch.zeros_like(ours, dtype=torch.promote_types(way.dtype, torch.float32))

    def random(self, shape: Sequence[int]) -> Tensor:
        """Under autocast of numbers that its casts do not round."""
        values = torch.randn(tuple(shape), dtype=torch.float64, generator=self.generator)
        return (values.bfloat16() if self.way.autocast else values).to(self.way.dtype)

    def compare(self, got: Tensor | None, expected: Tensor | None, name: str, terms: Sequence[float] = ()) -> None:
        """Each of the terms may have an error; their sum may be smaller than that."""
        assert (got is None) == (expected is None), name
        if got is not None:
            testing.assert_close(got, expected, name, self.slack, max(self.scale, sum(terms)))

    def run(self) -> None:
        way, queue = (
            self.way,
            None if self.way.waits == "no queue" else zbkern.WGradQueue(self.way.max_bytes, self.way.merge),
        )
        for key in range(way.microbatches):
            self.microbatch(key, queue)
        if queue is not None:
            for keys in [queue.keys()] if way.merge else reversed(queue.keys()):
                queue.run(keys)
            assert queue.bytes == 0
        for ours, other, terms in zip(self.parameters, self.others, self.terms, strict=True):
            if way.begun == "main_grad":
                assert ours.grad is None
                wanted = torch.zeros_like(other) if other.grad is None else other.grad
                self.compare(ours.main_grad, wanted, "main_grad", terms)
            else:
                self.compare(ours.grad, other.grad, "gradient", terms)
                assert ours.grad is None or ours.grad.dtype == ours.dtype

    def microbatch(self, key: int, queue: zbkern.WGradQueue | None) -> None:
        way = self.way
        inputs = [
            laid_out(self.random(shape), way.inputs_layout).requires_grad_(not constant)
            for shape, constant in zip(self.call.inputs, way.constant, strict=True)
        ]
        others = copies(inputs)

        def scope(where: str) -> Any:
            return queue.defer(key) if queue is not None and where in way.waits else contextlib.nullcontext()

        with scope("forward"), torch.autocast("cpu", torch.bfloat16, enabled=way.autocast):
            y = outputs(self.call.ours(*inputs, *self.parameters))
            with torch.no_grad():
                again = outputs(self.call.ours(*inputs, *self.parameters))
        expected = outputs(self.call.torchs(*others, *self.others))
        for got, without, wanted in zip(y, again, expected, strict=True):
            self.compare(got, wanted, "output")
            assert torch.equal(without, got)
            assert not without.requires_grad
        assert any(t.requires_grad for t in y) == any(t.requires_grad for t in expected)
        if len(y) > 1:
            y, expected = y[way.used], expected[way.used]
        dy = [laid_out(self.random(t.shape), way.gradients_layout) for t in y]
        if not any(t.requires_grad for t in expected):
            return
        before = [p.grad for p in self.parameters]
        loss_of(expected, dy, self.slopes(others, self.others)).backward()
        with scope("backward"):
            loss_of(y, dy, self.slopes(inputs, self.parameters)).backward()
        for ours, other in zip(inputs, others, strict=True):
            self.compare(ours.grad, other.grad, "dx")
        given = [t.grad for t in inputs if t.grad is not None and t.grad.numel()]
        assert len({t.data_ptr() for t in given}) == len(given), "gradients share memory"
        if "backward" in way.waits and way.max_bytes is None and not way.penalty:
            assert all(p.grad is grad for p, grad in zip(self.parameters, before, strict=True)), "W did not wait"

    def slopes(self, inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        """Of which the loss has derivatives; of weights only where theirs do not wait: then they are no part of it."""
        tensors = inputs if "backward" in self.way.waits else [*inputs, *parameters]
        return [t for t in tensors if t.requires_grad] if self.way.penalty else []


def test_every_op_is_drawn() -> None:
    assert {name for name in Z.__all__ if name.islower()} == op_cases.OPS.keys()


@pytest.mark.parametrize("number", [40, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", op_cases.OPS)
def test_values_and_gradients_are_torchs(op: str, number: int) -> None:
    rng = random.Random(seed(1 if number > 40 else 0))
    for trial in range(number):
        call = op_cases.draw(op, rng)
        way = draw_way(rng, call)
        try:
            with mock.patch.object(reference_grouped, "readable", lambda ends, way=way: way.readable):
                Trial(call, way, rng.getrandbits(32)).run()
        except Exception:
            print(f"trial {trial}: {call.said}; {way}")
            raise


@pytest.mark.parametrize("op", [op for op in op_cases.OPS if op not in ("rms_norm", "layer_norm", "rotary")])
def test_autocast_casts_what_an_op_is_given_and_nothing_inside_of_it(op: str) -> None:
    """To the bit; norms and rotary embeddings stay in float32 on a CPU."""
    rng = random.Random(0)
    for _ in range(20):
        call = op_cases.draw(op, rng)
        given = [op_cases.random_tensor(rng, *s).bfloat16().requires_grad_() for s in (*call.inputs, *call.parameters)]
        with torch.autocast("cpu", torch.bfloat16):
            found = outputs(call.ours(*(t.float() for t in given)))
        for got, wanted in zip(found, outputs(call.ours(*given)), strict=True):
            assert torch.equal(got, wanted.to(got.dtype)), call.said


@pytest.mark.parametrize("op", op_cases.OPS)
def test_function_transforms(op: str) -> None:
    """Forward mode and torch.func.grad, of ten calls."""
    if op in ("grouped_linear", "grouped_mlp", "attention") and OLD_TORCH:
        pytest.skip("this torch cannot read counts and ends that are tensors inside of its transforms")
    rng = random.Random(1)
    for _ in range(10):
        call = op_cases.draw(op, rng)
        shapes = (*call.inputs, *call.parameters)
        primals, tangents = (tuple(op_cases.random_tensor(rng, *shape) for shape in shapes) for _ in range(2))
        if call.forward_mode:
            found, expected = (torch.func.jvp(function, primals, tangents) for function in (call.ours, call.torchs))
            for pair in zip(found, expected, strict=True):
                for got, wanted in zip(*map(outputs, pair), strict=True):
                    testing.assert_close(got, wanted, call.said)

        def loss(*given: Tensor, function: Callable[..., Any]) -> Tensor:
            return sum((y * y.sin()).sum() for y in outputs(function(*given)))

        gradients = [
            torch.func.grad(functools.partial(loss, function=function), tuple(range(len(shapes))))(*primals)
            for function in (call.ours, call.torchs)
        ]
        for got, wanted in zip(*gradients, strict=True):
            testing.assert_close(got, wanted, call.said, scale=0.1)  # some are 0
