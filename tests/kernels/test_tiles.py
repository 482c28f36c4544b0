"""The choice of tiles: pure, within the chip's limits, and sensible at both ends."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("capability", tiles.SHARED_MEMORY)
@pytest.mark.parametrize("op", OPS)
def test_operands_of_large_layers_are_on_their_way_while_others_are_multiplied(op: str, capability: int) -> None:
    """Two steps of them on every chip, in tiles of 128 rows and columns."""
    tile = tiles.choose(op, 8192, 8192, 8192, "bfloat16", capability, 132)
    assert tile.stages >= 3, tile
    assert min(tile.m, tile.n) == 128


def test_products_that_share_a_launch_fill_the_machine_together() -> None:
    alone = tiles.choose("wgrad", 1024, 1024, 4096, "bfloat16", 90, 132)
    seven = tiles.choose("wgrad", 1024, 1024, 4096, "bfloat16", 90, 132, others=((1024, 1024),) * 6)
    assert alone.m * alone.n < seven.m * seven.n
    assert tiles.count(seven, *[(1024, 1024)] * 7) == 7 * tiles.count(seven, (1024, 1024))
    assert tiles.count(tiles.Tile(128, 256, 64, 8, 3), (129, 256), (0, 5)) == 2


def test_a_measured_table_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "tiles.json"
    product = tiles.key("wgrad", 4096, 4096, 4096, "bfloat16", 90)
    table.write_text(json.dumps({product: [64, 256, 64, 4, 4, 8]}))
    monkeypatch.setattr(tiles, "TABLE", table)
    tiles.table.cache_clear()
    try:
        assert tiles.choose("wgrad", 4097, 5000, 4096, "bfloat16", 90, 132) == tiles.Tile(64, 256, 64, 4, 4, 8)
        assert tiles.choose("wgrad", 9000, 5000, 4096, "bfloat16", 90, 132).m == 128
    finally:
        tiles.table.cache_clear()


@pytest.mark.parametrize("capability", [*tiles.SHARED_MEMORY, 110])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(256, "bfloat16"), *((size, dtype) for size in (1, 64, 96, 128) for dtype in ("bfloat16", "float32"))],
)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_fits_the_chip(capability: int, size: int, dtype: str, packed: bool) -> None:
    chosen = {launch: tiles.attention(launch, size, dtype, capability, packed) for launch in ("fwd", "dq", "dkdv")}
    room = 64 if size <= 64 else 128 if size <= 128 else 256
    for launch, tile in chosen.items():
        used = tiles.attention_shared_memory(tile, launch, room, 4 if dtype == "float32" else 2)
        assert used <= 1024 * tiles.SHARED_MEMORY.get(capability, 99)
        assert min(tile.queries, tile.keys) >= 16
        assert all(edge & (edge - 1) == 0 for edge in (tile.queries, tile.keys))
    # dkdv reads what dq has left in blocks of a line: a line is whole blocks of either
    assert 128 % chosen["dq"].queries == 0
    assert chosen["dq"].queries % chosen["dkdv"].queries == 0


def test_a_later_compiler_has_tiles_of_its_own() -> None:
    """Only where it is said so: the largest head of packed sequences."""
    case = ("dkdv", 256, "bfloat16", 90, True)
    assert [tiles.attention(*case, compiler=version).warps for version in ((3, 6), (3, 8), (3, 9))] == [8, 8, 4]
    others = ("dkdv", 128, "bfloat16", 90, True), ("dkdv", 256, "bfloat16", 90), ("dkdv", 256, "bfloat16", 100, True)
    assert all(tiles.attention(*case, compiler=(3, 9)) == tiles.attention(*case) for case in others)


@pytest.mark.parametrize(("tokens", "width", "together"), [(2048, 4096, False), (4096, 4096, True), (2048, 512, True)])
def test_w_of_large_layers_share_a_launch_where_an_h200_was_faster_so(tokens: int, width: int, together: bool) -> None:
    layer = [(width, width)] * 2 + [(width // 4, width)] * 2 + [(7 * width // 2, width)] * 2 + [(width, 7 * width // 2)]
    assert tiles.share_a_launch("wgrad", layer, tokens, "bfloat16", 90, 132, True) == together
    assert tiles.share_a_launch("wgrad", layer, tokens, "bfloat16", 80, 108, False)
