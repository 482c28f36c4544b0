"""Rows of bench.split: a head with its cross-entropy beside torch's, time and peak bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import zbkern
from zbkern import testing

HEADS = ((1024, 256, 8192), (2048, 512, 4096), (1024, 512, 32000), (1024, 1024, 8192))
"""Tokens, features, vocabulary."""


def head_row(tokens: int, features: int, vocabulary: int, rounds: int) -> dict:
    """A head with its cross-entropy, forward and backward: ours with W in a queue, and at once, against torch's
    linear_cross_entropy in chunks, and whole. before_w: ours without its W, which is what the next stage waits for.

    Peak bytes are those above what exists before; a gradient of the weight is there already.
    """
    torch.manual_seed(0)
    x = torch.randn(tokens, features).requires_grad_()
    weight = (torch.randn(vocabulary, features) / features**0.5).requires_grad_()
    target = torch.randint(vocabulary, (tokens,))
    chunks = torch.nn.LinearCrossEntropyOptions()

    def backward(loss: Tensor) -> None:
        loss.backward()
        x.grad = None

    def f_and_b(queue: zbkern.WGradQueue) -> None:
        with queue.defer():
            backward(zbkern.functional.linear_cross_entropy(x, weight, target))

    def deferred() -> list[Callable]:
        queue = zbkern.WGradQueue()  # while one exists, W may wait: the other candidates run without
        return [lambda: f_and_b(queue), queue.run]

    candidates: dict[str, Callable[[], list[Callable]]] = {
        "whole": lambda: [lambda: backward(F.linear_cross_entropy(x, weight, target))],
        "torch": lambda: [lambda: backward(F.linear_cross_entropy(x, weight, target, options=chunks))],
        "at_once": lambda: [lambda: backward(zbkern.functional.linear_cross_entropy(x, weight, target))],
        "deferred": deferred,
    }
    found = {name: gradient_of(weight, prepare()) for name, prepare in candidates.items()}
    for name, gradient in found.items():
        testing.assert_close(gradient, found["whole"], f"gradient of the head, {name}", tolerance=1e-5)
    timings = testing.measure(candidates, rounds=rounds, warmup=2)
    peaks = {name: peak_bytes(prepare()) for name, prepare in candidates.items()}
    waiting = zbkern.WGradQueue()

    def before_w() -> list[Callable]:
        waiting.discard()
        return [lambda: f_and_b(waiting)]

    halves = testing.measure({"torch": candidates["torch"], "before_w": before_w}, rounds=rounds, warmup=2)
    waiting.discard()
    return {
        "case": f"{tokens} tokens, {features} x {vocabulary}",
        "torch_us": timings["torch"].median * 1e6,
        **{name: timings[name].ratio(timings["torch"]) for name in ("whole", "at_once", "deferred")},
        "before_w": halves["before_w"].ratio(halves["torch"]),
        "peak_bytes": peaks,
    }


def gradient_of(weight: Tensor, functions: list[Callable]) -> Tensor | None:
    """What these leave in weight.grad. In a function of its own, so that no name keeps their queue alive."""
    weight.grad = None
    for function in functions:
        function()
    return weight.grad


def peak_bytes(functions: list[Callable]) -> int:
    """The most bytes that these allocate at one time, as the CPU's allocator reports it to torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        for function in functions:
            function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes), default=0)


HEADS_TABLE = (
    "A head with its cross-entropy, F + B + W / torch's linear_cross_entropy in chunks, and peak bytes of each",
    "case: {case}; torch in chunks, us: {torch_us:.0f}; torch, all logits: {whole:.3f}; "
    "zbkern, no queue: {at_once:.3f}; zbkern, W deferred: {deferred:.3f}; of it F + B: {before_w:.3f}; "
    "bytes, torch in chunks: {peak_bytes[torch]:.3g}; torch, all logits: {peak_bytes[whole]:.3g}; "
    "zbkern, no queue: {peak_bytes[at_once]:.3g}; zbkern, W deferred: {peak_bytes[deferred]:.3g}",
)
