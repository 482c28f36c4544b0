"""What holds of every Triton launch: it is there, writes all of its outputs, gives the same bits, keeps to num_sms."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.support import every_launch, row_checks
from tests.support.launch_checks import Random
from zbkern import testing
from zbkern.kernels import spec
from zbkern.kernels.triton import common as triton_common
from zbkern.kernels.triton import kernels as triton_kernels

NAMES = [name for op, names in spec.OPS.items() for name in names if name != "norm_partials"]
WITH_NUM_SMS = (
    *("linear_fwd", "linear_dgrad", "linear_dgrad_sum", "linear_wgrad", "linear_wgrads"),
    *("fp8_linear_fwd", "fp8_linear_dgrad", "fp8_linear_wgrad"),
    *("activation_fwd", "activation_bwd", "gated_fwd", "gated_bwd", "gated_linear_fwd", "gated_linear_dgrad"),
    *("grouped_linear_fwd", "grouped_linear_dgrad", "grouped_linear_wgrad", "grouped_gated_fwd", "grouped_gated_dgrad"),
)


def test_none_is_missing() -> None:
    """Of the contract's, and of what the tests of every launch know, here and on a GPU."""
    cases = every_launch.cases(triton_kernels, Random(torch.float32, "cpu"), 3, 16, 16)
    assert cases.keys() == set(NAMES)
    assert {name for name in NAMES if "num_sms" in inspect.signature(getattr(triton_kernels, name)).parameters} == set(
        WITH_NUM_SMS
    )


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
            for name in WITH_NUM_SMS
        ),
        ("gated_linear_fwd", 150),
        pytest.param("gated_linear_dgrad", 150, marks=pytest.mark.slow),
    ],
)
def test_num_sms_bounds_the_programs(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kernel; what they compute is the same to rounding, in other tiles. Where n is no multiple of 16, gated
    products are products and an elementwise pass."""
    grids: list[int] = []
    launch = triton_common.Kernel.__call__

    def record(self: triton_common.Kernel, grid: int, *arguments: object, **options: object) -> None:
        grids.append(grid)
        launch(self, grid, *arguments, **options)

    monkeypatch.setattr(triton_common.Kernel, "__call__", record)
    case = every_launch.cases(triton_kernels, Random(torch.float16, "cpu", scale=0.3), 140, n, 144)[name]
    expected = case.results()
    assert max(grids) > 1
    for num_sms in (1, 2):
        grids.clear()
        for got, wanted in zip(case.results(num_sms=num_sms), expected, strict=True):
            testing.assert_close(got, wanted, name)
        assert max(grids) == num_sms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["large", "special"])
def test_hostile_values_in_rows(kind: str, dtype: torch.dtype) -> None:
    row_checks.adversarial(triton_kernels, dtype, "cpu", kind, 12, 48)
