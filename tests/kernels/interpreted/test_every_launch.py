"""What holds of every Triton launch: it is there, writes all of its outputs, gives the same bits, on fewer SMs too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support import every_launch, row_checks
from tests.support.launch_checks import Random
from zbkern import testing
from zbkern.kernels import spec
from zbkern.kernels.triton import common as triton_common
from zbkern.kernels.triton import grouped_tile as triton_grouped_tile
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.kernels.triton import matmul_tile as triton_matmul_tile

NAMES = [name for op, names in spec.OPS.items() for name in names if name != "norm_partials"]
PRODUCTS = (
    *("linear_fwd", "linear_dgrad", "linear_dgrad_sum", "linear_wgrad", "linear_wgrads"),
    *("fp8_linear_fwd", "fp8_linear_dgrad", "fp8_linear_wgrad", "gated_linear_fwd", "gated_linear_dgrad"),
    *("grouped_linear_fwd", "grouped_linear_dgrad", "grouped_linear_wgrad", "grouped_gated_fwd", "grouped_gated_dgrad"),
)


@pytest.fixture
def spy_of_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int | tuple[int, ...]]]:
    """The grids of all launches."""
    grids: list[int | tuple[int, ...]] = []
    launch = triton_common.Kernel.__call__

    def record(self: triton_common.Kernel, grid: int | tuple[int, ...], *arguments: object, **options: object) -> None:
        grids.append(grid)
        launch(self, grid, *arguments, **options)

    monkeypatch.setattr(triton_common.Kernel, "__call__", record)
    yield grids
    triton_matmul_tile.plan.cache_clear()
    triton_grouped_tile.plan_groups.cache_clear()


def test_none_is_missing() -> None:
    """Of the contract's, and of what the tests of every launch know, here and on a GPU."""
    cases = every_launch.cases(triton_kernels, Random(torch.float32, "cpu"), 3, 16, 16)
    assert cases.keys() == set(NAMES)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16])
def test_the_same_bits_in_every_run_and_nothing_left_unwritten(dtype: torch.dtype) -> None:
    for name, case in every_launch.cases(triton_kernels, Random(dtype, "cpu", scale=0.3), 21, 48, 32).items():
        first, second = case.results(), case.results()
        for one, two in zip(first, second, strict=True):
            assert torch.equal(one, two), name  # also false for nan
            assert one.isfinite().all(), name


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *(
            pytest.param(name, 160, marks=pytest.mark.slow if name.startswith("grouped_gated") else ())
            for name in PRODUCTS
        ),
        ("gated_linear_fwd", 150),
        pytest.param("gated_linear_dgrad", 150, marks=pytest.mark.slow),
    ],
)
def test_programs_of_products_take_several_tiles(
    name: str, n: int, spy_of_all: list[int | tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are fewer SMs; what they compute is the same to rounding, in other tiles. Where n is no multiple of
    16, gated products are products and an elementwise pass."""
    case = every_launch.cases(triton_kernels, Random(torch.float16, "cpu", scale=0.3), 140, n, 144)[name]
    expected = case.results()
    for sms in (1, 2):
        spy_of_all.clear()
        monkeypatch.setattr(triton_matmul_tile, "_machine", lambda device, sms=sms: (90, sms))
        triton_matmul_tile.plan.cache_clear()
        triton_grouped_tile.plan_groups.cache_clear()
        for got, wanted in zip(case.results(), expected, strict=True):
            testing.assert_close(got, wanted, name)
        assert sms in spy_of_all


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["large", "special"])
def test_hostile_values_in_rows(kind: str, dtype: torch.dtype) -> None:
    row_checks.adversarial(triton_kernels, dtype, "cpu", kind, 12, 48)
