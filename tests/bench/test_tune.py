"""The search for tiles without a GPU: what it tries, what it believes, what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch

from bench import tune
from tests.emulator.gpu import gpu
from zbkern.kernels import tiles
from zbkern.kernels.tiles import Tile


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("op", tune.PRODUCTS)
@pytest.mark.parametrize("size", [2, 4])
def test_candidates_fit_the_chip(op: str, size: int, capability: int) -> None:
    found = tune.product_tiles(op, size, capability)
    limit = 1024 * tiles.SHARED_MEMORY[capability]
    assert len(found) == len(set(found)) > 50
    assert all(tiles.shared_memory(tile, op, size, capability) <= limit for tile in found)
    if size == 2 and capability == 90:
        assert any(astuple(tile)[:4] == (128, 256, 64, 8) for tile in found)
        # one part: no sum on its way to memory waits for another's room
        assert (tune.Tile(128, 256, 32, 8, 4, 8, parts=1) in found) == (op == "wgrad")


class Fake(tune.Product):
    """Its times are a rule; tiles whose k is 128 give wrong results, and those of 64 rows do not compile."""

    def __init__(self) -> None:
        self.op, self.shape, self.dtype = "fwd", (4096, 4096, 4096), torch.bfloat16
        self.capability = 90
        self.key = tiles.key("fwd", *self.shape, "bfloat16", 90)
        self.tried: list[Tile] = []
        with tune.table({}):
            self.rules = self.tile()

    def tile(self) -> Tile:
        return tiles.choose(self.op, *self.shape, "bfloat16", self.capability, 132)

    def right(self) -> bool:
        self.tried.append(self.tile())
        if self.tile().m == 64:
            raise RuntimeError("out of registers")
        return self.tile().k != 128

    def time(self, rounds: int = 10) -> float:
        tile = self.tile()
        return 1.0 + abs(tile.n - 128) / 256 + tile.k / 1000 + tile.group / 10000 + tile.stages / 100000


def test_the_fastest_right_one_is_found() -> None:
    problem = Fake()
    best, times = tune.search(problem, 60.0)
    assert (best.m, best.n, best.k, best.group) in ((128, 128, 32, 4), (256, 128, 32, 4))
    assert (problem.rules.m, problem.rules.n) == (128, 256)
    assert times[best] == min(times.values())
    assert not any(tile.k == 128 or tile.m == 64 for tile in times)
    assert len(problem.tried) == len(set(problem.tried))
    assert tiles.table() == {} or problem.tile() != best  # the file's table again


def test_a_search_stops_where_the_rules_choice_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Fake()
    monkeypatch.setattr(problem, "right", lambda: problem.tile() != problem.rules)
    with pytest.raises(RuntimeError, match="the rules' own tile"):
        tune.search(problem, 60.0)


def test_a_search_without_time_still_measures_the_rules() -> None:
    problem = Fake()
    best, times = tune.search(problem, -1.0)
    assert best == problem.rules
    assert list(times) == [best]


@pytest.fixture
def emulated() -> Iterator[None]:
    with gpu(90):
        yield


@pytest.mark.parametrize("op", tune.PRODUCTS)
def test_a_real_problem(op: str, emulated: None) -> None:
    """The tile under test is the one that runs, and its result is checked."""
    problem = tune.Product(op, (40, 24, 48), torch.float16, torch.device("cpu"))
    with tune.table({problem.key: Tile(16, 32, 16, 4, 2, 4)}):
        assert problem.right()
        assert problem.time(rounds=1) > 0
        problem.answer += 1
        assert not problem.right()
    assert problem.rules == tiles.choose(op, *problem.shape, "float16", 90, 4)


def test_the_table_it_writes_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"sm80 bfloat16 fwd 1 2 3": [64, 64, 64, 4, 3, 8]}))
    monkeypatch.setattr(tune, "_why_not", lambda: None)
    monkeypatch.setattr(tune, "Product", lambda *arguments: Fake())
    assert tune.main(["--op", "fwd", "--shape", "4096", "4096", "4096", "--table", str(path)]) == 0
    monkeypatch.setattr(tiles, "TABLE", path)
    tiles.table.cache_clear()
    try:
        assert len(tiles.table()) == 2
        assert tiles.choose("fwd", 4096, 4096, 4096, "bfloat16", 90, 132).n == 128
    finally:
        tiles.table.cache_clear()


def test_it_says_why_it_cannot_run(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out
