"""The choice of tiles: pure, within the chip's limits, and sensible at both ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbkern.kernels import tiles

OPS = ["fwd", "dgrad", "wgrad"]
sizes = st.integers(1, 200_000)


@given(
    st.sampled_from(OPS), sizes, sizes, sizes, st.sampled_from(["bfloat16", "float32"]),
    st.sampled_from([*tiles.SHARED_MEMORY, 110]), st.integers(1, 160), st.booleans(),
)  # fmt: skip
def test_every_choice_fits_the_chip(
    op: str, p: int, q: int, r: int, dtype: str, capability: int, num_sms: int, bulk: bool
) -> None:
    tile = tiles.choose(op, p, q, r, dtype, capability, num_sms, bulk)
    size = 4 if dtype == "float32" else 2
    assert tiles.shared_memory(tile, op, size, capability) <= 1024 * tiles.SHARED_MEMORY.get(capability, 99)
    assert tile.stages >= 2
    assert tile == tiles.choose(op, p, q, r, dtype, capability, num_sms, bulk)
    assert all(edge & (edge - 1) == 0 for edge in (tile.m, tile.n, tile.k))


def test_large_layers_take_large_tiles_and_small_ones_fill_the_machine() -> None:
    large = tiles.choose("fwd", 8192, 8192, 8192, "bfloat16", 90, 132)
    assert (large.m, large.n, large.k, large.warps, large.stages) == (128, 256, 64, 8, 3)
    small = tiles.choose("fwd", 512, 1024, 4096, "bfloat16", 90, 132)
    assert small.m * small.n < large.m * large.n
    fewer = tiles.choose("fwd", 512, 1024, 4096, "bfloat16", 90, 16)
    assert fewer.m * fewer.n > small.m * small.n


def test_a_measured_table_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "tiles.json"
    key = tiles.key("wgrad", 4096, 4096, 4096, "bfloat16", 90)
    table.write_text(json.dumps({key: [64, 256, 64, 4, 4, 8]}))
    monkeypatch.setattr(tiles, "TABLE", table)
    tiles.table.cache_clear()
    try:
        assert tiles.choose("wgrad", 4097, 5000, 4096, "bfloat16", 90, 132) == tiles.Tile(64, 256, 64, 4, 4, 8)
        assert tiles.choose("wgrad", 9000, 5000, 4096, "bfloat16", 90, 132).m == 128
    finally:
        tiles.table.cache_clear()


def test_the_choice_prints() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zbkern.kernels.tiles", "4096", "11008", "4096"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "sm_90 bfloat16 wgrad Tile(m=128, n=256, k=64, warps=8, stages=3, group=8)" in done.stdout
