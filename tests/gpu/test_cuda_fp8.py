"""FP8 by the CUDA extension on a GPU against float64 of what was quantised; the same bits in every run and graph."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support import every_launch, launch_checks, needs_gpu
from zbkern.kernels import dispatch
from zbkern.kernels.cuda import wgrad as cuda_wgrad

REASON = needs_gpu.why_not() or cuda_wgrad.why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# a tile is 128 x 128 over 128, and a cluster has two, one above the other
SHAPES = [(4, 8, 8), (64, 136, 72), (128, 128, 128), (132, 264, 520), (1000, 1016, 520), (2048, 4096, 1024)]


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    return dispatch.resolve("fp8_linear", "cuda", "cuda", BF16)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """P, Q, R and the row stride of out, of each product that the extension multiplies."""
    sizes: list[tuple] = []
    multiply = cuda_wgrad._cuda.fp8_product

    def counted(*arguments: object) -> None:
        multiply(*arguments)
        sizes.append(arguments[4])

    monkeypatch.setattr(cuda_wgrad, "_cuda", SimpleNamespace(fp8_product=counted))
    return sizes


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layouts", [("plain",) * 3, ("odd", "transposed", "padded")])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_b(
    launches: ModuleType, taken: list[tuple], shape: tuple[int, ...], layouts: tuple[str, ...], dtype: torch.dtype
) -> None:
    launch_checks.fp8_linear(launches, launch_checks.Random(dtype, "cuda", scale=0.5), *shape, layouts)
    assert len(taken) == 2


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("dtype", "out"), [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16)])
@pytest.mark.parametrize("shape", [(3, 7, 8), *SHAPES])
def test_w(
    launches: ModuleType, taken: list[tuple], shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype,
    accumulate: bool,
) -> None:  # fmt: skip
    m, n, k = shape
    random = launch_checks.Random(dtype, "cuda", scale=0.5)
    for layout in ("plain", "padded"):
        layouts = ("odd", "transposed", layout)
        launch_checks.fp8_linear_wgrad(launches, random, [m, 0, 77, m], n, k, layouts, out, accumulate)
    assert len(taken) == 12


NAMES = ("fp8_linear_fwd", "fp8_linear_dgrad", "fp8_linear_wgrad")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_in_every_run(launches: ModuleType, taken: list[tuple], name: str, dtype: torch.dtype) -> None:
    every_launch.cases(launches, every_launch.Random(dtype, "cuda", scale=0.3))[name].check_repeats()
    assert len(taken) >= 4


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_replays_on_new_inputs(launches: ModuleType, name: str) -> None:
    every_launch.cases(launches, every_launch.Random(BF16, "cuda", scale=0.3))[name].check_graph()
