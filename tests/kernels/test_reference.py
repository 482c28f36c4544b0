"""The plain-torch launches themselves: outputs that are given, accumulate, merging, wide outputs, no rows. What they
compute is held to torch in tests/ops/test_functional.py."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from zbkern import testing
from zbkern.kernels import reference, spec


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def wgrad_cases() -> dict:
    """name -> (launch, one segment of so many rows, shapes of the outputs)."""
    torch.manual_seed(0)
    weight, options = rand(9, 5), spec.CrossEntropyOptions(label_smoothing=0.1, z_loss=0.1, chunk=3, softcap=2.0)

    def head(rows: int) -> tuple[Tensor, ...]:
        x, target = rand(rows, 5), torch.randint(9, (rows,))
        loss, lse = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.float64)
        reference.cross_entropy_fwd(x, weight, None, target, options, loss, lse, None)
        return x, target, lse, rand(rows)

    def grouped(rows: int) -> tuple[Tensor, ...]:
        return rand(rows, 5), rand(rows, 4), torch.tensor([rows // 2, rows // 2, rows], dtype=torch.int32)

    return {
        "linear": (reference.linear_wgrad, lambda m: (rand(m, 5), rand(m, 4)), [(4, 5), (4,)]),
        "grouped_linear": (reference.grouped_linear_wgrad, grouped, [(3, 4, 5), (3, 4)]),
        "embedding": (reference.embedding_wgrad, lambda m: (torch.randint(7, (m,)), rand(m, 4)), [(7, 4)]),
        "norm": (reference.norm_wgrad, lambda m: (rand(2, m, 5),), [(5,), (5,)]),
        "head": (lambda s, o, a: reference.cross_entropy_wgrad(s, o, a, weight, None, options), head, [(9, 5), (9,)]),
    }


@pytest.mark.parametrize("name", wgrad_cases())
@pytest.mark.parametrize("lengths", [[3], [3, 5, 2], [4, 0, 1], [0], [300, 40]])
def test_wgrad_sums_segments_writes_or_adds(name: str, lengths: list[int]) -> None:
    launch, segment, shapes = wgrad_cases()[name]
    segments = [segment(rows) for rows in lengths]
    separate = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for one in segments:
        launch([one], separate, True)
    written = [torch.full(shape, float("nan"), dtype=torch.float64) for shape in shapes]
    launch(segments, written, False)
    added = [torch.ones(shape, dtype=torch.float64) for shape in shapes]
    launch(segments, added, True)
    for a, b, c in zip(separate, written, added, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(c, a + 1, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [True, False])
def test_a_half_product_accumulates_in_the_outputs_dtype(low: torch.dtype, accumulate: bool) -> None:
    torch.manual_seed(0)
    segments = [(rand(64, 16, dtype=low), rand(64, 8, dtype=low)) for _ in range(4)]
    outputs = [torch.ones(8, 16), torch.ones(8)]
    reference.linear_wgrad(segments, outputs, accumulate)
    expected = sum(dy.double().t() @ x.double() for x, dy in segments) + accumulate
    testing.assert_close(outputs[0], expected, tolerance=1e-6)
    testing.assert_close(outputs[1], sum(dy.double().sum(0) for _, dy in segments) + accumulate, tolerance=1e-6)


@pytest.mark.parametrize("activation", [None, *spec.ACTIVATIONS])
def test_z_is_written_with_an_activation_and_without(activation: str | None) -> None:
    x, weight, bias = rand(3, 5), rand(4, 5), rand(4)
    y, z = torch.full((2, 3, 4), float("nan"), dtype=torch.float64)
    reference.linear_fwd(x, weight, bias, y, activation, z)
    torch.testing.assert_close(z, x @ weight.t() + bias)
    torch.testing.assert_close(y, z if activation is None else reference.activation_function(activation)(z))


@pytest.mark.parametrize("backend", ["reference", "triton.kernels", "cuda.wgrad"])
def test_the_contract_alone_says_what_a_kernel_computes(backend: str) -> None:
    """Backends say what is their own: what they allocate, or may be given."""
    if backend == "triton.kernels":
        pytest.importorskip("triton", reason="triton is not installed")
    module = importlib.import_module(f"zbkern.kernels.{backend}")
    for name in spec.KERNELS:
        assert "=" not in (getattr(getattr(module, name, None), "__doc__", None) or ""), name
