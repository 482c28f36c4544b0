"""What a probe leaves behind, which is nothing, and what it does on every rank alike."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbkern
from tests.support.chunks import one_rank
from tests.support.probed import WIDTH, Causal, Chunk, batch
from zbkern.pipeline import PipelineError, check_slices, schedules
from zbkern.pipeline.runtime.slices import probe
from zbkern.pipeline.runtime.slices.carry import Carry
from zbkern.pipeline.runtime.slices.probe_inputs import Call, Draw, drawn_inputs


class Counts(nn.Module):
    """A buffer that every forward in training changes, and a mode of its own in which alone it is wrong."""

    def __init__(self, wrong_in: bool | None) -> None:
        super().__init__()
        self.linear, self.wrong_in = nn.Linear(WIDTH, WIDTH), wrong_in
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        self.calls += 1
        return self.linear(x.cumsum(1) if self.training is self.wrong_in else x)


@pytest.mark.parametrize("wrong_in", [None, True, False])
def test_both_modes_are_compared_and_buffers_put_back(wrong_in: bool | None) -> None:
    module = Counts(wrong_in).double()
    with one_rank(module, schedules.zb_h1(1, 2, slices=2)) as pipe:
        for number, (call, mode) in enumerate([(pipe.evaluate, False), (pipe.step, True)]):
            if mode is wrong_in:
                with pytest.raises(PipelineError, match=r"it \(Counts\) computes something else"):
                    call(*batch(torch.float64))
                return
            call(*batch(torch.float64))
            assert module.calls == 4 * (number + 1)


class Traced(nn.Module):
    """Everything that a forward and a backward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(9, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.forwards, self.seen, self.hooked, self.stepped = 0, [], [], []
        found, stepped = self.hooked, self.stepped
        self.linear.register_forward_hook(lambda *_: found.append(1))
        self.linear.weight.register_hook(lambda gradient: found.append(2))
        self.linear.weight.register_post_accumulate_grad_hook(lambda parameter: stepped.append(parameter.grad))

    def forward(self, x: Tensor, side: Tensor, carry: Any = None) -> Tensor:
        side.add_(1)
        self.calls += 1
        self.forwards += 1
        self.seen.append(x)
        return F.dropout(self.linear(self.embed(x)), 0.3) + random.choice([0.0])


def test_a_rank_without_tokens_makes_the_probe_that_others_make() -> None:
    for resampled in (False, True):
        x, y = (torch.ones(rows, 2, WIDTH) for rows in (0, 1))
        none, some = (drawn_inputs(Call(each, {}, 2, 2), nn.Identity(), 2, Draw(resampled))[0] for each in (x, y))
        assert none.shape == some.shape == (1, 2, WIDTH)
    assert all(min(probe._in_two(count)) > 0 for count in range(2, 30))


@pytest.mark.parametrize("is_masked", [False, True])
def test_ranks_with_other_numbers_of_rows_make_as_many_runs(is_masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes are collective."""

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, attention_mask: Any = None, carry: Any = None) -> Tensor:
            forwards[-1] += 1
            y = self.linear(x)
            return y * y.argmax(-1, keepdim=True)

    forwards: list[int] = []
    monkeypatch.setattr(probe, "_is_collective", lambda _: True)
    for rows in (0, 1, 2, 5):
        forwards.append(0)
        side = {"attention_mask": torch.ones(rows, 24, dtype=torch.long)} if is_masked else None
        check_slices(Chooses(), torch.randn(rows, 24, WIDTH), side=side)
    assert forwards[0] > 0
    assert len({*forwards}) == 1, forwards


def test_a_probe_leaves_no_trace() -> None:
    torch.manual_seed(0)
    module = Traced()
    module.linear.weight.grad = gradient = torch.ones(WIDTH, WIDTH)
    x = torch.randint(9, (2, 24))
    before, numbers = copy.deepcopy(module.state_dict()), (torch.get_rng_state(), random.getstate())
    side = torch.zeros(3)
    with pytest.raises(ValueError, match="random numbers of Python"):
        check_slices(module, x, side={"side": side})
    assert bool((side == 0).all())
    assert module.linear.weight.grad is gradient
    assert bool((gradient == 1).all())
    assert (module.forwards, module.seen, module.hooked, module.stepped) == (0, [], [], [])
    assert torch.equal(numbers[0], torch.get_rng_state())
    assert numbers[1] == random.getstate()
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


class BesideAThread(nn.Module):
    """Another thread draws random numbers in its first forwards, as one that loads data does, each time more."""

    def __init__(self, own: str, forwards: int) -> None:
        super().__init__()
        self.linear, self.own, self.forwards = nn.Linear(WIDTH, WIDTH), own, iter(range(1, forwards + 1))

    def forward(self, x: Tensor, carry: Any = None) -> Tensor:
        if count := next(self.forwards, 0):
            thread = threading.Thread(target=lambda: [(torch.rand(1), random.random()) for _ in range(count)])
            thread.start()
            thread.join()
        y = self.linear(x)
        return y * random.random() if self.own == "Python" else F.dropout(y, 0.3) if self.own else y


@pytest.mark.parametrize("own", ["", "torch", "Python"])
def test_random_numbers_that_another_thread_draws_are_not_those_of_a_chunk(own: str) -> None:
    torch.manual_seed(0)
    module = BesideAThread(own, 1 + 12)  # the step's own, then those of the probe
    with one_rank(module.double(), schedules.zb_h1(1, 2, slices=2)) as pipe:
        if own == "Python":
            with pytest.raises(PipelineError, match="random numbers of Python, once for all tokens"):
                pipe.step(*batch(torch.float64))
        else:
            pipe.step(*batch(torch.float64))


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("is_converted", [False, True])
def test_hooks_on_accumulation_nodes_are_refused(is_converted: bool, slices: int) -> None:
    """W would not call them, and a probe would."""
    module = Chunk(Causal(), takes=True).double() if slices > 1 else nn.Linear(WIDTH, WIDTH).double()
    module, called = zbkern.convert(module) if is_converted else module, []
    weight = [*module.parameters()][-1]
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    handle = node.register_hook(lambda *_: called.append(1))
    schedule = schedules.zb_h1(1, 2, slices=slices)
    with (
        one_rank(module, schedule) as pipe,
        pytest.raises(ValueError, match=r"must have no hooks on autograd's accumulation node"),
    ):
        pipe.step(*batch(torch.float64))
    assert not called
    handle.remove()
    with one_rank(module, schedule) as pipe:
        pipe.step(*batch(torch.float64))


def test_a_probe_keeps_nothing_of_a_pipeline() -> None:
    """A circle of tensors and their hooks would stay for good."""
    x = torch.randn(2, 8, WIDTH)
    with one_rank(Causal(), schedules.gpipe(1, 2, slices=2)) as pipe:
        pipe.step(x, torch.zeros_like(x))
    queue = weakref.ref(pipe.queue)
    del pipe
    gc.collect()
    assert queue() is None
