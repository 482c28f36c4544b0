"""For tests and benchmarks, ours and yours: comparisons with stated tolerances, interleaved timers, flops and bytes."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "TOLERANCE",
    "Timing",
    "assert_close",
    "assert_same_gradients",
    "attention_flops",
    "linear_flops",
    "measure",
]

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
"""Allowed error of a result, as a fraction of the largest value it is compared with. A few hundred roundings."""


_CUT_OFF = 4.5e-8
"""Of the largest sum, the most that a tensor core loses each time it adds 16 products: a float32's last bit, 2^-23, as
it never rounds up. Of a sum that grows evenly this is at most 3/8 of 2^-23 on average. An H200 loses up to 4.1e-8."""


def _tolerance_of(dtype: torch.dtype, terms: int) -> float:
    """TOLERANCE[dtype] for a result that is a sum of so many products: tensor cores cut sums off, in one direction.

    After arXiv 2512.07004; an error that grows with the number of products is no fault of a kernel.
    """
    if dtype not in TOLERANCE:
        raise TypeError(f"assert_close: {dtype} has no tolerance of its own; pass tolerance=")
    return TOLERANCE[dtype] + (0.0 if dtype == torch.float64 else _CUT_OFF * terms / 16)


def assert_close(
    got: Tensor,
    expected: Tensor,
    name: str = "value",
    tolerance: float | None = None,
    scale: float = 0.0,
    terms: int = 0,
) -> None:
    """Raises AssertionError unless max|got - expected| <= tolerance * max|expected|; the dtype of `got` decides it.

    A bound against the largest value, not each single one: sums of many products may cancel anywhere. scale: a size
    that counts as the largest value where all are smaller. terms: how many products each value sums.
    Raises TypeError for dtypes that have no tolerance, such as integers, without one.
    """
    if got.shape != expected.shape:
        raise AssertionError(f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}")
    if got.numel() == 0:
        return
    if tolerance is None:
        tolerance = _tolerance_of(got.dtype, terms)
    wide = torch.promote_types(torch.promote_types(got.dtype, expected.dtype), torch.float64)
    difference = (got.detach().to(wide) - expected.detach().to(wide)).abs().max().item()
    largest = max(expected.detach().abs().max().item(), scale)
    if not difference <= tolerance * max(largest, 1e-30):  # also false for nan
        raise AssertionError(
            f"{name}: differs by {difference:.3e} where the largest value is {largest:.3e} "
            f"({difference / max(largest, 1e-30):.1e} of it, allowed {tolerance:.1e})"
        )


def assert_same_gradients(
    got: torch.nn.Module, expected: torch.nn.Module, tolerance: float | None = None, attribute: str = "grad"
) -> None:
    """Holds the gradient of every parameter of one model against that of the same-named one of another.

    Errors count against the largest value of that gradient, or a thousandth of the largest in the model: some gradients
    (the bias of an attention's keys) are zero up to rounding. attribute: where `got` keeps its gradients; a parameter
    without it has none.
    """
    others = dict(expected.named_parameters(remove_duplicate=False))
    mine = dict(got.named_parameters(remove_duplicate=False))
    if mine.keys() != others.keys():
        raise AssertionError(f"the models have different parameters: {sorted(mine.keys() ^ others.keys())}")
    sizes = [p.grad.abs().max().item() for p in others.values() if p.grad is not None and p.grad.numel()]
    scale = 1e-3 * max(sizes, default=0.0)
    for name, parameter in mine.items():
        gradient, wanted = getattr(parameter, attribute, None), others[name].grad
        if (gradient is None) != (wanted is None):
            raise AssertionError(f"{name}: gradient is {_presence(gradient)}, expected {_presence(wanted)}")
        if gradient is not None and wanted is not None:
            assert_close(gradient, wanted, f"gradient of {name}", tolerance, scale)


def _presence(gradient: Tensor | None) -> str:
    return "None" if gradient is None else "a tensor"


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate, one entry per round; rounds line up with those of the candidates timed beside it."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over rounds, in seconds."""
        return statistics.median(self.seconds)

    def ratio(self, other: Timing) -> float:
        """Median over rounds of this time over the other's in the same round: what a busy machine disturbs least."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def measure(
    candidates: Mapping[str, Callable[[], Sequence[Callable[[], object]]]],
    rounds: int = 20,
    warmup: int = 3,
    device: str | torch.device = "cpu",
) -> dict[str, Timing]:
    """Times candidates in turn, round after round, so that what slows the machine slows all of them.

    The order changes from round to round: each leaves its own things in the caches for the next.

    A candidate is a function that prepares one run (untimed, a forward for instance) and returns the functions to be
    timed together. On a CUDA device the time is taken between events on the current stream, after a pause in which the
    host gets ahead: the time to launch kernels does not count, unless it is longer than they run. The L2 cache holds
    nothing of theirs by then. Raises ValueError for less than one round.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(f"measure: rounds must be at least 1 and warmup at least 0; got {rounds} and {warmup}")
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    for turn in range(warmup + rounds):
        shuffle(order)
        for name in order:
            functions = candidates[name]()
            elapsed = _elapsed(functions, torch.device(device))
            if turn >= warmup:
                seconds[name].append(elapsed)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _elapsed(functions: Sequence[Callable[[], object]], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        _beyond_cache(device).max()  # is read, not written: what was written would go to memory while we measure
        torch.cuda._sleep(1_000_000)  # cycles: about half a millisecond
        start.record()
        for function in functions:
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    for function in functions:
        function()
    return time.perf_counter() - begin


@functools.cache
def _beyond_cache(device: torch.device) -> Tensor:
    """Twice what the L2 cache holds."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(2 * size, dtype=torch.int8, device=device)


def linear_flops(rows: int, inputs: int, outputs: int) -> int:
    """Multiplications and additions of [rows, inputs] x [inputs, outputs]: forward, B and W take one each."""
    return 2 * rows * inputs * outputs


def attention_flops(
    batch: int, heads: int, queries: int, keys: int, head_size: int, causal: bool = False, backward: bool = False
) -> int:
    """Arithmetic of softmax(q k^T) v: two products forward, five backward (one is recomputed), half of it if causal."""
    products = 5 if backward else 2
    return products * 2 * batch * heads * queries * keys * head_size // (2 if causal else 1)
