"""The Triton products on a GPU against float64: dtypes, layouts, shapes around the production tiles, hostile values."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch

from tests.support import launch_checks as checks
from tests.support import needs_gpu
from zbkern.kernels import dispatch, spec

pytestmark = needs_gpu.MARKS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# an edge of every tile is among them: one row, one less and one more than 64, 128 and 256, several waves of tiles
SHAPES = [(1, 8, 8), (63, 129, 65), (64, 128, 256), (255, 257, 127), (1000, 1016, 520), (2048, 4096, 1024)]
LAYOUTS = [("plain",) * 3, ("padded",) * 3, ("transposed",) * 3, ("odd",) * 3, ("plain", "transposed", "step")]


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    return dispatch.resolve("linear", "triton", "cuda", torch.bfloat16)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 as three products of tf32 parts, as close to float64 as the tolerance of float32 asks."""
    torch.set_float32_matmul_precision("highest")


CASES = [
    *((shape, LAYOUTS[0]) for shape in SHAPES),
    *((shape, layout) for shape in SHAPES[3:5] for layout in LAYOUTS[1:]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "layouts"), CASES)
def test_linear(
    launches: ModuleType, shape: tuple[int, int, int], layouts: tuple[str, ...], dtype: torch.dtype
) -> None:
    m, n, k = shape

    def random() -> checks.Random:
        return checks.Random(dtype, "cuda", scale=0.5)

    checks.linear_fwd(launches, random(), m, n, k, layouts, bias=True)
    checks.linear_dgrad(launches, random(), m, n, k, layouts)
    checks.linear_dgrad_sum(launches, random(), m, [n, 8, n], k, layouts)
    if torch.cuda.get_device_capability() >= (9, 0):
        checks.fp8_linear(launches, random(), m, n, k, layouts)
    outs = [torch.float32] if dtype == torch.float32 else [torch.float32, dtype]
    if torch.cuda.get_device_capability() >= (9, 0):
        for out in outs:
            checks.fp8_linear_wgrad(launches, random(), [m, 0, 77, m], n, k, layouts, out, True)
    for out, accumulate in itertools.product(outs, (False, True)):
        checks.linear_wgrad(launches, random(), [m], n, k, layouts, out, accumulate)
        checks.linear_wgrad(launches, random(), [m, 0, 77, m], n, k, layouts, out, accumulate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", spec.ACTIVATIONS)
def test_activations(launches: ModuleType, activation: str, dtype: torch.dtype) -> None:
    for m, n, k in SHAPES[:-1]:
        checks.linear_fwd(launches, checks.Random(dtype, "cuda", scale=0.5), m, n, k, bias=True, activation=activation)
        checks.linear_fwd(launches, checks.Random(dtype, "cuda", scale=0.5), m, n, k, activation=activation, keep=True)
        checks.gated_linear(launches, checks.Random(dtype, "cuda", scale=0.3), m, n, k, 2 * n, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_gated_layouts(launches: ModuleType, layouts: tuple[str, ...], dtype: torch.dtype) -> None:
    for m, n, k in SHAPES[1:5]:
        checks.gated_linear(launches, checks.Random(dtype, "cuda", scale=0.2), m, n, k, 264, layouts, bias=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segments", [1, 3, 4, 9])
def test_several_weights(launches: ModuleType, segments: int, dtype: torch.dtype) -> None:
    shapes = [(1024, 512), (136, 264), (512, 1024), (8, 8), (256, 768), (1024, 1024), (127, 65), (64, 64), (512, 512)]
    for accumulate in (False, True):
        layers = [(n, k, [300] * segments) for n, k in shapes]
        checks.linear_wgrads(launches, checks.Random(dtype, "cuda"), layers, accumulate=accumulate)
        layers = [(n, k, [index * 50] * segments) for index, (n, k) in enumerate(shapes)]
        checks.linear_wgrads(launches, checks.Random(dtype, "cuda"), layers, accumulate=accumulate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layouts", LAYOUTS[:2])
def test_groups(launches: ModuleType, layouts: tuple[str, ...], dtype: torch.dtype) -> None:
    counts = [[100, 0, 33, 64, 1, 200, 128, 8, 50], [0] * 8 + [129], [7] * 9]
    for n, k in ((256, 512), (136, 264), (65, 127)):
        random = checks.Random(dtype, "cuda", scale=0.5)
        odd = n == 136
        checks.grouped_linear(
            launches, random, counts, n, k, layouts, torch.float32, odd, transposed=not odd, spare=50 if odd else 0
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("hidden", [256, 136])
def test_gated_groups(launches: ModuleType, hidden: int, interleaved: bool, dtype: torch.dtype) -> None:
    options = spec.GateOptions("silu", interleaved, 1.0, 1.702, 1.0) if interleaved else spec.GateOptions("gelu")
    counts, random = [100, 0, 33, 64, 1, 200, 128, 8, 50], checks.Random(dtype, "cuda", scale=0.3)
    checks.grouped_gated(launches, random, counts, 264, 512, hidden, options, transposed=interleaved, spare=50)


@pytest.mark.parametrize("kind", checks.KINDS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_values(launches: ModuleType, dtype: torch.dtype, kind: str) -> None:
    if dtype == torch.float32 and kind == "denormal":
        pytest.skip("tensor cores read float32 as tf32 parts, whose small halves vanish among denormals")
    for m, n, k in ((300, 264, 520), (65, 63, 129)):
        checks.adversarial_linear(launches, dtype, "cuda", kind, m, n, k)


@pytest.mark.alone
def test_launches_never_wait_for_the_gpu(launches: ModuleType) -> None:
    random = checks.Random(torch.bfloat16, "cuda")
    x, weight, dy = random(256, 256), random(256, 256), random(256, 256)
    y, dx, dweight = torch.empty_like(dy), torch.empty_like(x), torch.zeros(256, 256, device="cuda")

    def run() -> None:
        launches.linear_fwd(x, weight, None, y)
        launches.linear_dgrad(dy, weight, dx)
        launches.linear_wgrad([(x, dy)], (dweight, None), True)

    run()  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    run()
    end = torch.cuda.current_stream().record_event()
    assert not end.query()
    torch.cuda.synchronize()
