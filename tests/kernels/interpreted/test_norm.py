"""The Triton norms in the interpreter against the reference in float64, into outputs that were full of NaN."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import row_checks
from tests.support.examples import examples
from zbkern import testing
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.kernels.triton import norm_backward as triton_norm_backward
from zbkern.kernels.triton import norm_forward as triton_norm_forward

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def check(
    rows: int, features: int, dtype: torch.dtype, centered: bool, weighted: bool, layout: str, added: bool = False
) -> None:
    """Forward, dgrad and wgrad of one shape. The interpreter truncates a sum to bfloat16, where a GPU rounds."""
    rounded = 2**-7 if dtype == torch.bfloat16 else 0
    random = row_checks.Random(dtype, "cpu")
    row_checks.norm(triton_kernels, random, rows, features, centered, weighted, layout, added, 0.1, rounded)


EDGES = list(itertools.product((1, 63, 64, 65, 2047, 2049), (False, True), DTYPES))
QUICK = ((2047, True, torch.float16), (2049, False, torch.float32))  # of long rows, which take seconds


@pytest.mark.parametrize(
    ("features", "centered", "dtype"),
    [pytest.param(*edge, marks=pytest.mark.slow if edge[0] > 65 and edge not in QUICK else ()) for edge in EDGES],
)
def test_edges_of_the_tile(features: int, centered: bool, dtype: torch.dtype) -> None:
    tile = triton_norm_forward.norm_tile(features)
    for rows in {1, tile.rows - 1, 3 * tile.rows + 1} - {0}:
        check(rows, features, dtype, centered, True, "plain")
    check(tile.rows + 1, features, dtype, centered, True, "plain", added=True)


@examples(10, 60, derandomize=True)
@given(
    st.integers(1, 70),
    st.integers(2, 300),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["plain", "odd", "transposed"]),
)
def test_any_shape(
    rows: int, features: int, dtype: torch.dtype, centered: bool, weighted: bool, added: bool, layout: str
) -> None:
    check(rows, features, dtype, centered, weighted, layout, added)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    ("held", "rows", "features"), [(64, 3, 100), pytest.param(64, 66, 65, marks=pytest.mark.slow), (128, 3, 100)]
)
def test_long_rows(held: int, rows: int, features: int, centered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_norm_forward, "HELD", held)
    monkeypatch.setattr(triton_norm_backward, "HELD", 32)
    for module in (triton_norm_forward, triton_norm_backward):
        monkeypatch.setattr(module, "PIECE", 32)
    check(rows, features, DTYPES[rows > 3], centered, True, "odd")
    if rows == 3:  # more rows make more partial sums, and nothing else: each is a program of its own
        check(rows, features, torch.float16, centered, True, "odd", added=True)
        check(rows, features, torch.float32, centered, False, "transposed")


@pytest.mark.parametrize("centered", [False, True])
def test_no_rows(centered: bool) -> None:
    x, statistics = torch.empty(0, 8), torch.empty(0)
    partials, weight = poisoned(1 + centered, triton_kernels.norm_partials(0, 8, x.device), 8), torch.ones(8)
    mean = statistics if centered else None
    triton_kernels.norm_fwd(x, weight, None, 1e-5, x.clone(), mean, statistics)
    triton_kernels.norm_dgrad(x, x, weight, mean, statistics, x.clone(), partials)
    outputs = [poisoned(8) for _ in range(1 + centered)]
    triton_kernels.norm_wgrad([(partials,)], outputs, False)
    for output in outputs:
        assert torch.equal(output, torch.zeros(8))


@pytest.mark.parametrize("counts", [[1], [33], [3, 0, 40], [2] * 9])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_wgrad_sums_all_segments(counts: list[int], accumulate: bool, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    segments = [(torch.randn(2, count, 37),) for count in counts]
    before = [torch.randn(37).to(kind) if accumulate else poisoned(37, dtype=kind) for _ in range(2)]
    outputs = [before[0].clone(), poisoned(37, 2, dtype=kind)[:, 0].copy_(before[1])]
    triton_kernels.norm_wgrad(segments, outputs, accumulate)
    for index, output in enumerate(outputs):
        total = sum(partials[index].double().sum(0) for (partials,) in segments)
        testing.assert_close(output, total + before[index].double() if accumulate else total)
    only = [None, before[1].clone()]
    triton_kernels.norm_wgrad(segments, only, accumulate)
    assert torch.equal(only[1], outputs[1])


def test_float64_is_computed_in_float64() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 40, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    y, rstd = torch.empty_like(x), torch.empty(5, dtype=torch.float64)
    triton_kernels.norm_fwd(x, weight, None, 1e-5, y, None, rstd)
    testing.assert_close(y, torch.nn.functional.rms_norm(x, (40,), weight, 1e-5), tolerance=1e-9)


def test_nan_and_infinity_stay_in_their_row() -> None:
    x = torch.randn(4, 33)
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    y, rstd = poisoned(4, 33), poisoned(4)
    triton_kernels.norm_fwd(x, None, None, 1e-5, y, None, rstd)
    assert torch.isfinite(y[[0, 3]]).all()
    assert y[1].isnan().all()
    assert y[2, 3].isnan()
