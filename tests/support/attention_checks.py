"""The attention launches of any implementation on any device against the reference in float64, for the emulator's
tests and the GPU's. Outputs start as nan inside larger buffers: every element is written, and none beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from tests.support import launch_checks
from tests.support.launch_checks import place
from zbkern import testing
from zbkern.kernels import reference
from zbkern.kernels.spec import AttentionOptions

LAYOUTS = ("plain", "joined", "transposed", "odd", "step")


def check(name: str, got: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    launch_checks.check(name, got, expected, tolerance, scale=0.1)


def attention(
    launches: ModuleType,
    dtype: torch.dtype,
    queries: Sequence[int],
    keys: Sequence[int] | None = None,
    heads: tuple[int, int] = (2, 2),
    size: int = 64,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    layouts: Sequence[str] = ("plain",) * 3,
    device: str = "cpu",
    seed: int = 0,
    value_size: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    beyond: int | None = None,
) -> list[Tensor]:
    """Forward and dgrad of sequences of those lengths; returns all outputs. layouts: of q, of k and v, of outputs.

    beyond: the lengths are on the device, and so many tokens follow the last sequence.
    """
    keys = queries if keys is None else keys
    generator = torch.Generator().manual_seed(seed)

    def draw(tokens: int, count: int, layout: str, size: int = size) -> Tensor:
        values = torch.randn(tokens + (beyond or 0), count, size, generator=generator, dtype=torch.float64).to(dtype)
        return place(values.to(device), layout)

    def there(ends: Sequence[int]) -> Tensor:
        return torch.tensor(ends, dtype=torch.int32, device=device)

    ends = tuple(tuple(accumulate(lengths, initial=0)) for lengths in (queries, keys))
    scale = 1 / math.sqrt(size) if scale is None else scale
    options = AttentionOptions(scale, causal, window, *ends, softcap)
    given = options if beyond is None else replace(options, queries=there(ends[0]), keys=there(ends[1]))
    values = size if value_size is None else value_size
    q, dy = draw(ends[0][-1], heads[0], layouts[0]), draw(ends[0][-1], heads[0], layouts[0], values)
    k, v = draw(ends[1][-1], heads[1], layouts[1]), draw(ends[1][-1], heads[1], layouts[1], values)
    level = torch.randn(heads[0], generator=generator).to(device) if sinks else None
    lse, delta = (torch.full((heads[0], q.shape[0]), float("nan"), device=device) for _ in range(2))
    y, dq, dk, dv = (place(torch.full_like(t, float("nan")), layouts[2]) for t in (dy, q, k, v))
    launches.attention_fwd(q, k, v, given, y, lse, level)
    launches.attention_dgrad(dy, q, k, v, y, lse, given, dq, dk, dv, delta if sinks else None)

    wide = [t.double().cpu() for t in (dy, q, k, v)]
    exact = [torch.empty(t.shape, dtype=torch.float64) for t in (y, dq, dk, dv)]
    exact_lse = torch.empty(lse.shape, dtype=torch.float64)
    exact_delta = torch.empty_like(exact_lse)
    reference.attention_fwd(*wide[1:], options, exact[0], exact_lse, None if level is None else level.double().cpu())
    reference.attention_dgrad(*wide, exact[0], exact_lse, options, *exact[1:], exact_delta)
    if sinks:
        check("delta", delta, exact_delta, testing.TOLERANCE[dtype])  # of y, which is rounded
    unseen = exact_lse == -math.inf
    assert torch.equal(lse.cpu() == -math.inf, unseen), "lse is -inf exactly where a query sees no key"
    check("lse", lse.cpu().masked_fill(unseen, 0), exact_lse.masked_fill(unseen, 0))
    for name, got, expected in zip(("y", "dq", "dk", "dv"), (y, dq, dk, dv), exact, strict=True):
        check(name, got, expected)
    return [y, lse, dq, dk, dv]


def nan_stays_in_its_sequence(launches: ModuleType, dtype: torch.dtype, ends: Sequence[int], device: str) -> None:
    """Also where blocks of a descriptor read on from the first sequence into the next, which is nan."""
    generator = torch.Generator().manual_seed(0)
    shape = (ends[-1], 1, 16)
    q, k, v, dy = (torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(4))
    options = AttentionOptions(0.25, False, None, tuple(ends), tuple(ends))
    results = []
    for poison in (0.0, math.nan):
        for tensor in (q, k, v, dy):
            tensor[ends[1] :] += poison
        y, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
        lse = torch.empty(1, ends[-1], device=device)
        launches.attention_fwd(q, k, v, options, y, lse)
        launches.attention_dgrad(dy, q, k, v, y, lse, options, dq, dk, dv)
        results.append([t[: ends[1]] for t in (y, dq, dk, dv)])
    assert y[ends[1] :].isnan().all()
    for clean, beside_nan in zip(*results, strict=True):
        assert torch.equal(clean, beside_nan)


def large_scores_do_not_overflow(launches: ModuleType, dtype: torch.dtype, device: str) -> None:
    q = torch.full((20, 1, 16), 100.0, dtype=dtype, device=device)
    options = AttentionOptions(1.0, True, None, (0, 20), (0, 20))
    y, lse = torch.empty_like(q), torch.empty(1, 20, device=device)
    launches.attention_fwd(q, q, q, options, y, lse)
    testing.assert_close(y, q, "y")
    assert torch.allclose(lse.cpu(), 160_000 + torch.arange(1, 21).log())
