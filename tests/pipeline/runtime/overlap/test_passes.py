"""Passes that take turns: whose turn it is, what they draw, what they see of the caller's thread, and how they end."""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from bench.overlap import turn_us
from zbkern import in_flight
from zbkern.pipeline.runtime.overlap.passes import Passes

NAME = contextvars.ContextVar("NAME", default="none")


@pytest.fixture
def passes() -> Iterator[Passes]:
    before = threading.active_count()
    made = Passes(torch.device("cpu"))
    yield made
    made.close()
    assert threading.active_count() == before


def counting(found: list[str], name: str, turns: int) -> Callable[[], None]:
    def work() -> None:
        for number in range(turns):
            found.append(f"{name}{number}")
            in_flight()
        found.append(name)

    return work


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((2, 2), "a0 b0 a1 b1 a b"),
        ((0, 2), "a b0 b1 b"),
        ((3, 0), "a0 b a1 a2 a"),
        ((2, 1, 3), "a0 b0 c0 a1 b c1 a c2 c"),
    ],
)
def test_each_runs_until_its_collective_is_in_flight(passes: Passes, turns: tuple[int, ...], expected: str) -> None:
    for _ in range(2):
        found: list[str] = []
        passes.run([counting(found, name, count) for name, count in zip("abc", turns, strict=False)], [])
        assert " ".join(found) == expected
    found = []
    counting(found, "a", 2)()  # alone nothing is beside it
    assert found == ["a0", "a1", "a"]


@pytest.mark.slow
def test_a_turn_takes_the_host_at_most_30_us() -> None:
    """Or, where other processes lengthen all rounds, four times what two threads take that only hand over."""
    assert turn_us(rounds=100) < max(30.0, 4 * handover_us(rounds=100))


def handover_us(rounds: int) -> float:
    took = []
    for _ in range(rounds):
        first, second = threading.Lock(), threading.Lock()
        first.acquire()
        second.acquire()
        other = threading.Thread(target=_answer, args=(first, second))
        other.start()
        begin = time.perf_counter()
        for _ in range(100):
            first.release()
            second.acquire()
        took.append(time.perf_counter() - begin)
        other.join()
    return 1e6 * min(took) / 200


def _answer(first: threading.Lock, second: threading.Lock) -> None:
    for _ in range(100):
        first.acquire()
        second.release()


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("turn", [0, 2])
def test_where_one_fails_all_end_and_its_error_is_raised(passes: Passes, fails: int, turn: int) -> None:
    ended: list[str] = []

    def work(name: int) -> Callable[[], None]:
        def of_pass() -> None:
            try:
                for number in range(100):
                    if (name, number) == (fails, turn):
                        raise ValueError(f"of pass {name}")
                    in_flight()
            finally:
                ended.append(str(name))

        return of_pass

    with pytest.raises(ValueError, match=f"of pass {fails}"):
        passes.run([work(name) for name in range(3)], [0])
    assert ended[0] == str(fails)
    assert len(ended) == (3 if turn else fails + 1)
    found: list[str] = []
    passes.run([counting(found, "a", 1), counting(found, "b", 1)], [])
    assert found == ["a0", "b0", "a", "b"]


@pytest.mark.parametrize("turns", [3, 0])
def test_ctrl_c_ends_all(passes: Passes, turns: int) -> None:
    """Also where the caller's pass has ended, and it waits for the one that is left."""
    went_on: list[bool] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

    def interrupts() -> None:
        in_flight()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # wakes it, too
        deadline = time.monotonic() + 60
        while passes.error is None and time.monotonic() < deadline:
            time.sleep(0.01)  # until the caller, which waits, has taken the signal
        in_flight()
        went_on.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            passes.run([lambda: [in_flight() for _ in range(turns)], interrupts], [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert not went_on


def test_a_backward_runs_beside_a_forward_whose_gradients_are_on(passes: Passes) -> None:
    """Also within a backward, where autograd turns gradients off for what runs in it."""
    seen: list[tuple[str, bool]] = []

    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, dy):  # type: ignore[no-untyped-def]
            for _ in range(2):
                seen.append(("B", torch.is_grad_enabled()))
                in_flight()
            return dy

    def forward() -> None:
        for _ in range(3):
            seen.append(("F", torch.is_grad_enabled()))
            in_flight()

    x = torch.ones(2, requires_grad=True)
    loss = Gives.apply(x).sum()
    passes.run([forward, lambda: loss.backward()], [0])
    assert seen == [("F", True), ("B", False), ("F", True), ("B", False), ("F", True)]
    assert torch.equal(x.grad, torch.ones(2))


def test_threads_see_what_the_caller_has_set(passes: Passes) -> None:
    seen = []

    def look() -> None:
        weight * weight
        seen.append((NAME.get(), torch.get_autocast_dtype("cpu"), torch.mm(x, x).dtype, torch.empty(0).device.type))

    x, token, weight, saved = torch.ones(2, 2), NAME.set("callers"), nn.Parameter(torch.ones(2)), list[torch.Tensor]()
    hooks = saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), hooks:
            passes.run([look, look], [])
    finally:
        NAME.reset(token)
    assert seen == [("callers", torch.bfloat16, torch.bfloat16, "meta")] * 2
    assert len(saved) == 2 * 2


def test_a_forward_draws_what_it_draws_alone(passes: Passes) -> None:
    """Beside a backward that runs a forward again, which sets numbers back and draws what that one drew."""
    x = torch.ones(40, requires_grad=True)

    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(x)
            in_flight()
            return nn.functional.dropout(x)

    part = Part()

    def draw() -> list[torch.Tensor]:
        found = []
        for _ in range(4):
            found.append(torch.rand(3))
            in_flight()
        return found

    def rounds(beside: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loss = checkpoint(part, x, use_reentrant=False).sum()
        drawn: list[torch.Tensor] = []
        if beside:
            passes.run([loss.backward, lambda: drawn.extend(draw())], [1])
        else:
            loss.backward()
            drawn = draw()
        gradient, x.grad = x.grad, None
        assert gradient is not None
        return [*drawn, gradient, torch.rand(3)]

    assert all(map(torch.equal, rounds(True), rounds(False)))


def test_a_second_forward_has_numbers_of_its_own(passes: Passes) -> None:
    def draw() -> list[torch.Tensor]:
        torch.manual_seed(0)
        found: list[torch.Tensor] = []
        passes.run([lambda: found.append(torch.rand(3))] * 2, [0, 1])
        return [*found, torch.rand(3)]

    first, second, after = draw()
    assert all(map(torch.equal, draw(), (first, second, after)))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3))
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_that_two_backwards_share_may_give_way(kind: str, passes: Passes) -> None:
    """Both reach the same node of autograd's, the second while the first is in its hook."""
    found: list[str] = []

    def hook(_: torch.Tensor) -> None:
        found.append("began")
        in_flight()
        found.append("ended")

    weight = nn.Parameter(torch.ones(3))
    getattr(weight, kind)(hook)
    losses = [(weight * factor).sum() for factor in (1.0, 2.0)]
    passes.run([loss.backward for loss in losses], [])
    assert found == ["began", "began", "ended", "ended"]
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 3
