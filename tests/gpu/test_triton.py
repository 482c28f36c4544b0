"""The Triton launches on a GPU against float64: the emulator's cases, and larger ones, of several waves of tiles."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.emulator.cases import DTYPES, cases
from tests.support import attention_checks, needs, row_checks
from tests.support import launch_checks as checks
from zbkern.kernels import spec

pytestmark = needs.GPU

FAMILIES = sorted({case.name.split()[0] for case in cases(90, torch.bfloat16)} - {"repeats"})  # a file of its own


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 as three products of tf32 parts, as close to float64 as the tolerance of float32 asks."""
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cases(launches: ModuleType, family: str, dtype: str) -> None:
    major, minor = torch.cuda.get_device_capability()
    wrong = {}
    for case in cases(10 * major + minor, DTYPES[dtype], "cuda"):
        if case.name.split()[0] == family:
            try:
                case.run(launches)
            except AssertionError as error:
                wrong[case.name] = repr(error)
    assert not wrong


@pytest.mark.parametrize("layout", checks.LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_large_products(launches: ModuleType, dtype: torch.dtype, layout: str) -> None:
    def random(scale: float = 0.5) -> checks.Random:
        return checks.Random(dtype, "cuda", scale=scale)

    layouts = (layout,) * 3
    for m, n, k in ((1000, 1016, 520), *(((2048, 4096, 1024),) if layout == "plain" else ())):
        checks.linear_fwd(launches, random(), m, n, k, layouts, bias=True, activation="gelu", keep=True)
        checks.linear_dgrad(launches, random(), m, n, k, layouts)
        checks.linear_dgrad_sum(launches, random(), m, [n, 8, n], k, layouts)
        checks.gated_linear(launches, random(0.2), m, n, k, 264, layouts, bias=True)
        for out in dict.fromkeys((torch.float32, dtype)):
            checks.linear_wgrad(launches, random(), [m, 0, 77, m], n, k, layouts, out, True)
        checks.grouped_linear(launches, random(), [[m, 0, 200], [7] * 3], n, k, layouts, torch.float32, spare=50)


@pytest.mark.parametrize("segments", [1, 3, 4, 9])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_many_weights(launches: ModuleType, dtype: torch.dtype, segments: int) -> None:
    shapes = [(1024, 512), (136, 264), (512, 1024), (8, 8), (256, 768), (1024, 1024), (127, 65), (64, 64), (512, 512)]
    for accumulate in (False, True):
        layers = [(n, k, [300 - 30 * index] * segments) for index, (n, k) in enumerate(shapes)]
        checks.linear_wgrads(launches, checks.Random(dtype, "cuda"), layers, accumulate=accumulate)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_large_rows(launches: ModuleType, dtype: torch.dtype) -> None:
    def random(**more: Any) -> checks.Random:
        return checks.Random(dtype, "cuda", **more)

    for size in ((777, 1024), (4100, 4096)):
        for centered in (False, True):
            row_checks.norm(launches, random(), *size, centered, added=True)
    for name in row_checks.ELEMENTWISE:
        row_checks.elementwise(launches, random(kind="special"), name, "silu", 1300, 1025, "odd")
    row_checks.rotary(launches, random(), (2, 500, 32, 128), 64, True)
    for rows, vocabulary, features in (([4096, 100, 4096], 1000, 768), ([513], 50257, 130)):
        row_checks.embedding(launches, random(), rows, vocabulary, features, True)
    for options in (spec.CrossEntropyOptions(), spec.CrossEntropyOptions(3, 0.1, 1e-3, 100, 5.0)):
        row_checks.cross_entropy(launches, random(scale=0.2), [257, 300], 32001, 512, options, True)
    row_checks.adversarial(launches, dtype, "cuda", "special", 300, 520)
    attention: tuple[dict[str, Any], ...] = ({"queries": [1000]}, {"queries": [900], "window": 100})
    for given in (*attention, {"queries": [333, 1, 0, 640], "heads": (8, 2)}):
        attention_checks.attention(launches, dtype, **given, size=128, device="cuda")


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
