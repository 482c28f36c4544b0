"""Designs of W that are to be measured: right on the emulator, without a race, and two programs fit an SM."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch

from bench import w_sweep
from bench.w_sweep import DESIGNS, TWO, Design, chosen
from build_tools.kernels import aot, jobs, launches
from tests.emulator import library
from tests.emulator.cases import BF16, FP32, PLAIN
from tests.emulator.gpu import gpu
from tests.support import launch_checks as checks
from zbkern import testing
from zbkern.kernels import tiles
from zbkern.kernels.triton import kernels, matmul_tile

KINDS = ("one", "merged", "ragged", "several", "experts", "16 bits out")


def check(kind: str, seed: int) -> None:
    random = checks.Random(BF16, "cpu", seed, 0.5)
    if kind == "one":
        checks.linear_wgrad(kernels, random, [200], 264, 520, PLAIN, FP32, True, False)
    elif kind == "merged":
        checks.linear_wgrad(kernels, random, [70, 1, 0, 130], 392, 264, PLAIN, FP32, True, True)
    elif kind == "ragged":
        checks.linear_wgrad(kernels, random, [77], 129, 257, ("odd",) * 3, FP32, False, False)
    elif kind == "several":
        checks.linear_wgrads(kernels, random, [(264, 264, [100]), (136, 520, [64]), (8, 8, [1])], PLAIN, True, False)
    elif kind == "experts":
        checks.grouped_linear(kernels, random, [[60, 0, 33], [5, 7, 0]], 136, 264, PLAIN, FP32, True, False)
    else:
        checks.linear_wgrad(kernels, random, [100], 264, 264, PLAIN, BF16, True, False)


@pytest.mark.parametrize("kind", ["merged", "experts"])
def test_two_programs_of_an_sm_compute_w(kind: str) -> None:
    with gpu(90), chosen(Design(TWO)):
        check(kind, 0)
    assert not library.findings()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_computes_w(name: str, kind: str) -> None:
    seed = [*DESIGNS].index(name) % 3
    with gpu(90, seed), chosen(DESIGNS[name]):
        check(kind, seed)
    assert not library.findings()
    assert library.launches()


def test_the_second_half_of_programs_begins_half_a_tile_later() -> None:
    device = torch.device("cpu")
    with launches.tiles_of(90):
        assert matmul_tile.late_start(tiles.Tile(128, 128, 64, 8, 6), 2048, device) == (None, 1)
        nanoseconds, programs = matmul_tile.late_start(TWO, 2048, device)
        assert programs == launches.SMS[90] == 132
        assert nanoseconds == pytest.approx(1e9 * 128 * 128 * 2048 / (838e12 / 132), rel=0.01)  # of 2 operations each
        with chosen(Design(TWO)):
            assert matmul_tile.plan("wgrad", 4096, 4096, 2048, BF16, device, True) == (TWO, 264)


def test_the_table_knows_the_tokens_and_the_experts() -> None:
    shape = ("wgrad", 4096, 4096)
    wide = DESIGNS["two 64x256, half apart"].tile
    rows = {tiles.key(*shape, 1024, "bfloat16", 90): TWO, tiles.key(*shape, 1024, "bfloat16", 90, 8): wide}
    experts = ((4096, 4096),) * 7
    with mock.patch.object(tiles, "table", return_value=rows):
        assert tiles.choose(*shape, 1500, "bfloat16", 90, 132) == TWO
        assert tiles.choose(*shape, 4096, "bfloat16", 90, 132).share == 1
        assert tiles.choose(*shape, 1024, "bfloat16", 90, 132, True, experts) == wide
        assert tiles.choose(*shape, 1024, "bfloat16", 90, 132, True, experts[1:]) not in rows.values()
        assert tiles.choose(*shape, 1024, "bfloat16", 90, 132, True, ((64, 64),) * 7) not in rows.values()
        assert tiles.share_a_launch("wgrad", [(4096, 4096)] * 8, 1024, "bfloat16", 90, 132, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", DESIGNS)
def test_no_design_has_a_fault_and_two_programs_fit_an_sm(name: str) -> None:
    """65536 registers, and 1 KB of shared memory that each program takes beside its own; no fault of the report: no
    spills, no products that ptxas serialises or that are waited for one by one, and none touched under way."""
    share = 1 if DESIGNS[name].tile is None else DESIGNS[name].tile.share  # type: ignore[union-attr]
    from triton.backends.compiler import GPUTarget

    x, ends = (launches.empty(2048, 4096), launches.empty(8, dtype=torch.int32))
    one, several = (launches.empty(*size, dtype=FP32) for size in ((4096, 4096), (8, 4096, 4096)))
    with launches.tiles_of(90), jobs.recorded(GPUTarget("cuda", 90, 32)) as made, chosen(DESIGNS[name]):
        for segments in (1, 4):
            kernels.linear_wgrad([(x, x)] * segments, (one, None), True)
        kernels.grouped_linear_wgrad([(x, x, ends)], (several, None), True)
    assert len(made) == 3
    for report in aot.reports([launches.Named(name, job, True) for job in made]):
        assert not report.faults(), report
        assert report.instructions["wgmma"], report
        assert share * 32 * report.warps * (-(-report.registers // 8) * 8) <= 65536, report
        assert share * (report.shared + 1024) <= 1024 * (tiles.SHARED_MEMORY[90] + 1), report


@pytest.mark.slow
def test_the_sweep_is_rehearsed(tmp_path: Path) -> None:
    with gpu(90, runs=False), mock.patch.object(testing, "assert_close"):
        assert w_sweep.main(["--device", "cpu", "--tiny", "--rounds", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "w_sweep.json").read_text())["figures"]
    assert [row["groups"] for row in rows] == [0, 3]
    assert all(row["us"].keys() == {*DESIGNS, "addmm"} for row in rows)
