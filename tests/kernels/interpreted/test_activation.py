"""Elementwise kernels in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import row_checks
from tests.support.examples import examples
from zbkern.kernels import reference, spec
from zbkern.kernels.triton import activation as triton_activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", spec.ACTIVATIONS)
@pytest.mark.parametrize("name", row_checks.ELEMENTWISE)
def test_against_reference(name: str, activation: str, dtype: torch.dtype) -> None:
    row_checks.elementwise(triton_activation, row_checks.Random(dtype, "cpu"), name, activation, 9, 130)


@given(
    st.integers(0, 3),
    st.sampled_from([1, 7, 1023, 1024, 1025]),
    st.sampled_from(sorted(row_checks.ELEMENTWISE)),
    st.sampled_from(row_checks.checks.LAYOUTS),
)
@examples(12, 50)
def test_shapes_and_strides(rows: int, columns: int, name: str, layout: str) -> None:
    """Outputs are written wholly, and nothing beside them."""
    random = row_checks.Random(torch.float32, "cpu")
    row_checks.elementwise(triton_activation, random, name, "silu", rows, columns, layout)


def test_nan_and_infinity_pass_through() -> None:
    """The reference in float64: in float32 torch's own vector code makes gelu(inf) nan."""
    z = torch.tensor([[float("nan"), float("inf"), 0.0, -0.0, 1e-42, 1e30, -1e30]])
    for activation in spec.ACTIVATIONS:
        y, expected = torch.empty_like(z), torch.empty_like(z, dtype=torch.float64)
        triton_activation.activation_fwd(z, activation, y)
        reference.activation_fwd(z.double(), activation, expected)
        torch.testing.assert_close(y, expected.float(), equal_nan=True)
