"""The Triton embedding in the interpreter against the reference in float64, into gradients that were full of NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import launch_checks as checks
from tests.support import row_checks
from zbkern.kernels.triton import embedding as triton_embedding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def wgrad(rows: list[int], vocabulary: int, features: int, dtype: torch.dtype = torch.float16, **more) -> torch.Tensor:
    return row_checks.embedding(triton_embedding, checks.Random(dtype, "cpu"), rows, vocabulary, features, **more)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from([1, 15, 64]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([None, 0]),
    st.tuples(*[st.sampled_from(checks.LAYOUTS)] * 2),
)
def test_any_shape(
    rows: list[int], vocabulary: int, features: int, dtype: torch.dtype, accumulate: bool, padding: int | None,
    layouts: tuple[str, str],
) -> None:  # fmt: skip
    out = dtype if len(rows) <= 4 else torch.float32  # more are several launches, and half precision would round
    more = {"accumulate": accumulate, "padding_idx": padding, "layouts": layouts, "out": out}
    wgrad(rows, vocabulary, features, dtype, **more)


def test_rows_of_several_programs_and_into_float32() -> None:
    wgrad([5, 3], 4, triton_embedding._RARE[1] + 1, torch.bfloat16, accumulate=True, kind=torch.int32)
    wgrad([35, 33], 2, triton_embedding._FREQUENT[1] + 1, torch.bfloat16, accumulate=True)


@pytest.mark.parametrize("repeats", [1, 3, 4, 5, 8, 9])
def test_runs_that_end_with_a_block_of_rows(repeats: int) -> None:
    dy = torch.randn(3 * repeats, 8)
    dweight = torch.full((4, 8), float("nan"))
    triton_embedding.embedding_wgrad([(torch.arange(3).repeat(repeats), dy)], (dweight,), False)
    assert torch.equal(dweight[3], torch.zeros(8))
    checks.check("dweight", dweight[:3].clone(), dy.double().view(repeats, 3, 8).sum(0))


def test_a_frozen_weight_and_rows_without_features_launch_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU refuses a grid of no programs."""
    grids: list[tuple[int, int]] = []
    monkeypatch.setattr(triton_embedding, "_sum_runs", lambda grid, *_, **__: grids.append(grid))
    indices = torch.zeros(3, dtype=torch.int64)
    triton_embedding.embedding_wgrad([(indices, torch.empty(3, 0))], (torch.empty(2, 0),), False)
    triton_embedding.embedding_wgrad([(indices, torch.empty(3, 4))], (None,), False)
    triton_embedding.embedding_wgrad([(indices, torch.empty(3, 4))], (torch.empty(2, 4),), False)
    assert grids == [(3, 1)]


def test_forward_finds_indices_out_of_range() -> None:
    weight, y = torch.randn(5, 8), torch.empty(3, 8)
    triton_embedding.embedding_fwd(torch.tensor([4, 0, 4]), weight, y)
    assert torch.equal(y, weight[[4, 0, 4]])
    with pytest.raises(IndexError):
        triton_embedding.embedding_fwd(torch.tensor([5, 0, 4]), weight, y)
