"""Elementwise kernels in Triton's interpreter against the reference."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from zbkern import testing
from zbkern.kernels import reference, spec
from zbkern.kernels.triton import activation as triton_activation

LAUNCHES = {"activation_fwd": (1, 1), "activation_bwd": (2, 1), "gated_fwd": (2, 1), "gated_bwd": (3, 3)}


def call(module, name: str, inputs: list[Tensor], activation: str, outputs: list[Tensor]) -> None:
    getattr(module, name)(*inputs, activation, *outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", spec.ACTIVATIONS)
@pytest.mark.parametrize("name", LAUNCHES)
def test_against_reference(name: str, activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(9, 130).to(dtype) for _ in range(LAUNCHES[name][0])]
    outputs = [torch.full((9, 130), float("nan"), dtype=dtype) for _ in range(LAUNCHES[name][1])]
    expected = [torch.empty(9, 130, dtype=torch.float64) for _ in outputs]
    call(triton_activation, name, inputs, activation, outputs)
    call(reference, name, [t.double() for t in inputs], activation, expected)
    for got, wanted in zip(outputs, expected, strict=True):
        testing.assert_close(got, wanted)


@given(
    st.integers(0, 3), st.sampled_from([1, 7, 1023, 1024, 1025]), st.sampled_from(sorted(LAUNCHES)), st.integers(0, 3)
)
@examples(12, 50)
def test_shapes_and_strides(rows: int, columns: int, name: str, layout: int) -> None:
    """Contiguous, halves of one buffer, transposed views: outputs are written wholly, and nothing beside them."""

    def make(value: float | None) -> Tensor:
        shape = (columns + 1, rows + 1) if layout == 1 else (rows + 1, 2 * columns + 1)
        full = torch.randn(shape) if value is None else torch.full(shape, value)
        full = full.t() if layout == 1 else full
        return full[:rows, :columns].contiguous() if layout == 0 else full[:rows, :columns]

    inputs = [make(None) for _ in range(LAUNCHES[name][0])]
    outputs = [make(float("nan")) for _ in range(LAUNCHES[name][1])]
    expected = [torch.empty(rows, columns) for _ in outputs]
    call(triton_activation, name, inputs, "silu", outputs)
    call(reference, name, inputs, "silu", expected)
    for got, wanted in zip(outputs, expected, strict=True):
        testing.assert_close(got, wanted)
        if layout and rows:
            assert got._base is not None
            assert int(got._base.isnan().sum()) == got._base.numel() - got.numel()


def test_nan_and_infinity_pass_through() -> None:
    """The reference in float64: in float32 torch's own vector code makes gelu(inf) nan."""
    z = torch.tensor([[float("nan"), float("inf"), 0.0, -0.0, 1e-42, 1e30, -1e30]])
    for activation in spec.ACTIVATIONS:
        y, expected = torch.empty_like(z), torch.empty_like(z, dtype=torch.float64)
        triton_activation.activation_fwd(z, activation, y)
        reference.activation_fwd(z.double(), activation, expected)
        torch.testing.assert_close(y, expected.float(), equal_nan=True)
