"""Products in Triton's interpreter against the reference, with tiles small enough that every edge is met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.support import launch_checks as checks
from tests.support.examples import examples
from zbkern.kernels import reference, spec, tiles
from zbkern.kernels.triton import grouped as triton_grouped
from zbkern.kernels.triton import grouped_tile as triton_grouped_tile
from zbkern.kernels.triton import grouped_wgrad as triton_grouped_wgrad
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.kernels.triton import matmul_tile as triton_matmul_tile
from zbkern.kernels.triton import multi_matmul as triton_multi_matmul
from zbkern.kernels.triton import wgrad as triton_wgrad

# The tiles below are 16 wide; multiples of 8 go by descriptor in half precision.
SIZES = [1, 7, 8, 15, 16, 17, 24, 33, 40]
DTYPES = [torch.float32, torch.float16]

properties = examples(12, 25, suppress_health_check=[HealthCheck.function_scoped_fixture])
fewer = examples(10, 10, suppress_health_check=[HealthCheck.function_scoped_fixture])


Spy = Callable[[ModuleType, str, Callable[[Any, Any], Any]], list]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """spy(module, kernel, read): the list to which every launch from now on adds read(its grid, its constants)."""

    def watch(module: ModuleType, name: str, read: Callable[[Any, Any], Any]) -> list:
        found, kernel = [], getattr(module, name)

        def launch(grid: Any, arguments: Any, constants: Any, *options: Any, **more: Any) -> None:
            found.append(read(grid, constants))
            kernel(grid, arguments, constants, *options, **more)

        monkeypatch.setattr(module, name, launch)
        return found

    return watch


class Small(tiles.Tile):
    count = 2

    def epilogue_parts(self, bulk: bool = True) -> int:
        return self.count


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "choose", lambda *_: Small(16, 32, 16, warps=4, stages=2, group=2))
    plans = triton_matmul_tile.plan, triton_grouped_tile.plan_groups
    for plan in plans:
        plan.cache_clear()
    yield
    Small.count = 2
    for plan in plans:
        plan.cache_clear()


def draw(data: st.DataObject, scale: float = 1.0) -> checks.Random:
    """The source of random tensors, after choosing in how many parts the epilogue writes a tile."""
    Small.count = data.draw(st.sampled_from([1, 2]), label="parts")
    return checks.Random(data.draw(st.sampled_from(DTYPES)), "cpu", scale=scale)


sizes = st.sampled_from(SIZES)
layouts = st.tuples(*[st.sampled_from(checks.LAYOUTS)] * 3)


@properties
@given(st.data(), st.integers(0, 40), sizes, sizes, layouts)
def test_forward(data: st.DataObject, m: int, n: int, k: int, layouts: tuple[str, ...]) -> None:
    random = draw(data, scale=0.5)
    activation = data.draw(st.sampled_from([None, *spec.ACTIVATIONS]))
    keep = activation is not None and data.draw(st.booleans())
    checks.linear_fwd(triton_kernels, random, m, n, k, layouts, data.draw(st.booleans()), activation, keep)


@properties
@given(st.data(), st.integers(0, 40), sizes, sizes, layouts)
def test_input_gradient(data: st.DataObject, m: int, n: int, k: int, layouts: tuple[str, ...]) -> None:
    checks.linear_dgrad(triton_kernels, draw(data), m, n, k, layouts)


@properties
@given(st.data(), st.lists(st.integers(0, 40), min_size=1, max_size=10), sizes, sizes, layouts)
def test_weight_gradient(data: st.DataObject, rows: list[int], n: int, k: int, layouts: tuple[str, ...]) -> None:
    random = draw(data)
    out = data.draw(st.sampled_from([random.dtype, torch.float32]))
    bias, weight = data.draw(st.sampled_from([(True, True), (False, True), (True, False)]))
    checks.linear_wgrad(triton_kernels, random, rows, n, k, layouts, out, data.draw(st.booleans()), bias, weight)


@fewer
@given(st.data(), layouts)
@pytest.mark.slow
def test_weight_gradients_of_several_layers(data: st.DataObject, layouts: tuple[str, ...]) -> None:
    rows = st.lists(st.integers(0, 40), min_size=1, max_size=data.draw(st.sampled_from([1, 3]), label="segments"))
    shapes = data.draw(st.lists(st.tuples(sizes, sizes, rows), min_size=1, max_size=9))
    accumulate, bias = data.draw(st.booleans()), data.draw(st.booleans())
    checks.linear_wgrads(triton_kernels, draw(data), shapes, layouts, accumulate, bias)


@fewer
@given(st.data(), st.sampled_from([1, 3, 9]), sizes, sizes, layouts)
@pytest.mark.slow
def test_groups(data: st.DataObject, groups: int, n: int, k: int, layouts: tuple[str, ...]) -> None:
    rows = st.lists(st.sampled_from([0, 1, 8, 15, 16, 17, 40]), min_size=groups, max_size=groups)
    counts = data.draw(st.lists(rows, min_size=1, max_size=2))
    random = draw(data, scale=0.5)
    out = data.draw(st.sampled_from([random.dtype, torch.float32]))
    accumulate, bias, transposed = (data.draw(st.booleans()) for _ in range(3))
    spare = data.draw(st.sampled_from([0, 3, 20]), label="rows of no group")
    checks.grouped_linear(triton_kernels, random, counts, n, k, layouts, out, accumulate, bias, transposed, spare)


@fewer
@given(st.data(), st.sampled_from([1, 3, 9]), sizes, sizes, st.sampled_from([1, 16, 32, 40, 48]), layouts)
@pytest.mark.slow
def test_gated_groups(data: st.DataObject, groups: int, n: int, k: int, h: int, layouts: tuple[str, ...]) -> None:
    counts = data.draw(st.lists(st.sampled_from([0, 1, 15, 16, 17, 40]), min_size=groups, max_size=groups))
    options = spec.GateOptions(
        data.draw(st.sampled_from(spec.ACTIVATIONS)),
        data.draw(st.booleans(), label="interleaved"),
        data.draw(st.sampled_from([None, 0.5])),
        data.draw(st.sampled_from([1.0, 1.702])),
        data.draw(st.sampled_from([0.0, 1.0])),
    )
    bias, transposed = data.draw(st.booleans()), data.draw(st.booleans())
    spare = data.draw(st.sampled_from([0, 3, 20]), label="rows of no group")
    random = draw(data, scale=0.3)
    checks.grouped_gated(triton_kernels, random, counts, n, k, h, options, layouts, bias, transposed, spare)


COUNTS = [[17, 0, 20], [0, 0, 0], [1, 16, 0]]
GPT_OSS = spec.GateOptions("silu", True, 0.5, 1.702, 1.0)


@pytest.mark.parametrize(
    ("dtype", "bulk"),
    [
        (torch.float16, True),
        (torch.float32, False),
        pytest.param(torch.float16, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
    ],
)
def test_experts(dtype: torch.dtype, bulk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stored either way, rows of no group, by descriptors and by pointers; groups without rows."""
    transposed = bulk == (dtype == torch.float16)
    monkeypatch.setattr(triton_matmul_tile, "_machine", lambda device: (90 if bulk else 80, 3))
    random, plain = checks.Random(dtype, "cpu", scale=0.5), ("plain",) * 3
    checks.grouped_linear(triton_kernels, random, COUNTS, 40, 16, plain, torch.float32, True, True, transposed, spare=9)
    checks.grouped_gated(triton_kernels, random, COUNTS[0], 24, 16, 32, GPT_OSS, transposed=transposed, spare=9)
    checks.grouped_gated(triton_kernels, random, COUNTS[2], 16, 16, 40, spec.GateOptions("gelu"), bias=False)


@pytest.mark.parametrize(("microbatches", "launches"), [(1, [1]), (3, [4]), (9, [8, 1])])
def test_all_groups_and_microbatches_are_one_launch(microbatches: int, launches: list[int], spy: Spy) -> None:
    products = spy(triton_grouped, "_grouped_product", lambda grid, constants: grid)
    sums = spy(triton_grouped_wgrad, "_grouped_sums", lambda grid, constants: constants[0])
    counts = [[index % 3, 0, 20, 1] for index in range(microbatches)]
    checks.grouped_linear(triton_kernels, checks.Random(torch.float32, "cpu"), counts, 16, 24, bias=False)
    assert len(products) == 2  # forward and dgrad
    assert sums == launches


@properties
@given(st.data(), st.lists(sizes, min_size=1, max_size=3), st.integers(0, 40), sizes, layouts)
@pytest.mark.slow
def test_input_gradient_of_several_layers(
    data: st.DataObject, ns: list[int], m: int, k: int, layouts: tuple[str, ...]
) -> None:
    checks.linear_dgrad_sum(triton_kernels, draw(data), m, ns, k, layouts)


@properties
@given(st.data(), st.integers(0, 40), sizes, sizes, st.sampled_from([1, 32, 40, 48, 64, 65]), layouts)
@pytest.mark.slow
def test_gated(data: st.DataObject, m: int, n: int, k: int, h: int, layouts: tuple[str, ...]) -> None:
    random = draw(data, scale=0.3)
    activation, bias = data.draw(st.sampled_from(spec.ACTIVATIONS)), data.draw(st.booleans())
    checks.gated_linear(triton_kernels, random, m, n, k, h, layouts, activation, bias)


@pytest.mark.parametrize(
    ("n", "options", "programs"),
    [
        *((64, {}, 4), (64, {"max_tiles": 1}, 8), (64, {"max_tiles": 3}, 4)),
        *((160, {}, (5, 1)), (160, {"max_tiles": 2}, (5, 1))),  # of a bias alone
    ],
)
def test_programs_of_a_w(n: int, options: dict, programs: int | tuple[int, int], spy: Spy) -> None:
    """As many as there are SMs, more if each must end early; the result is the same."""
    kernel = (triton_multi_matmul, "_over_rows") if n == 64 else (triton_wgrad, "_sum_rows")
    grids = spy(*kernel, lambda grid, constants: grid)
    random = checks.Random(torch.float32, "cpu")
    x, dy, dbias = random(20, 64), random(20, n), torch.full((n,), float("nan"))
    dweight = torch.full((n, 64), float("nan")) if n == 64 else None
    triton_kernels.linear_wgrads([([(x, dy)], (dweight, dbias))], False, **options)
    if dweight is not None:
        checks.check("dweight", dweight, dy.double().t() @ x.double())
    checks.check("dbias", dbias, dy.double().sum(0))
    assert grids == [programs]


@pytest.mark.parametrize("launches", [triton_kernels, reference])
def test_the_sum_of_nothing_is_zero(launches: ModuleType) -> None:
    dx = torch.ones(4, 8)
    launches.linear_dgrad_sum([], dx)
    assert torch.equal(dx, torch.zeros(4, 8))


@pytest.mark.parametrize(("max_tiles", "launches"), [(0, [4]), (1, [2, 1]), (2, [4])])
def test_the_rows_of_a_tile_are_bounded_with_their_number(
    max_tiles: int, launches: list[int], spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile sums over all microbatches that a launch takes: no bound of tiles is one of time without it."""
    monkeypatch.setattr(triton_multi_matmul, "ROWS", 48)
    segments = spy(triton_multi_matmul, "_over_rows", lambda grid, constants: constants[1])
    random = checks.Random(torch.float32, "cpu")
    pairs, dweight = [(random(20, 64), random(20, 64)) for _ in range(3)], torch.zeros(64, 64)
    triton_kernels.linear_wgrads([(pairs, (dweight, None))], False, max_tiles=max_tiles)
    checks.check("dweight", dweight, sum(dy.double().t() @ x.double() for x, dy in pairs))
    assert segments == launches


def test_segments_of_different_layouts_and_bfloat16() -> None:
    random = checks.Random(torch.bfloat16, "cpu")
    segments = [(random(9, 24, layout=a), random(9, 16, layout=b)) for a in checks.LAYOUTS for b in checks.LAYOUTS]
    dweight, dbias = torch.ones(16, 24), torch.ones(16)
    triton_kernels.linear_wgrad(segments, (dweight, dbias), True)
    expected = sum(dy.double().t() @ x.double() for x, dy in segments) + 1
    checks.check("dweight", dweight, expected)
    checks.check("dbias", dbias, sum(dy.double().sum(0) for _, dy in segments) + 1)


@pytest.mark.parametrize("bulk", [True, False])
def test_descriptors_and_pointers_agree(bulk: bool, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers either way: sm_80 and odd alignments take pointers."""
    monkeypatch.setattr(triton_matmul_tile, "_machine", lambda device: (90 if bulk else 80, 3))
    seen = spy(triton_multi_matmul, "_over_rows", lambda grid, constants: constants[4])
    checks.linear_wgrad(triton_kernels, checks.Random(torch.float16, "cpu"), [40, 16], 48, 64)
    assert seen == [bulk]


def test_a_tile_says_in_how_many_parts_it_is_written(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = spy(triton_multi_matmul, "_over_rows", lambda grid, constants: constants[-1])
    for count in (1, 4, 0):
        triton_matmul_tile.plan.cache_clear()
        tile = tiles.Tile(64, 128, 16, warps=4, stages=2, parts=count)
        monkeypatch.setattr(tiles, "choose", lambda *_, tile=tile: tile)
        checks.linear_wgrad(triton_kernels, checks.Random(torch.float16, "cpu"), [20], 64, 128, out=torch.float32)
    assert parts == [1, 4, 2]


def test_layers_share_a_launch(spy: Spy) -> None:
    """Seven weights of different shapes are one launch; a fourth segment makes it two weights a launch."""
    shares = spy(triton_multi_matmul, "_over_rows", lambda grid, constants: constants[:2])
    random = checks.Random(torch.float16, "cpu")
    shapes = [(16, 24), (40, 16), (8, 8), (32, 32), (8, 48), (24, 8), (16, 16)]
    for segments, expected in ((1, [(8, 1)]), (4, [(2, 4)] * 3 + [(1, 4)])):
        shares.clear()
        checks.linear_wgrads(triton_kernels, random, [(n, k, [16] * segments) for n, k in shapes], accumulate=True)
        assert shares == expected


def test_a_group_never_sees_its_neighbours() -> None:
    """What is not finite in one group stays there."""
    ends, bad = torch.tensor([5, 25, 34], dtype=torch.int32), slice(5, 25)
    random = checks.Random(torch.float32, "cpu")
    x, dy, weight = random(34, 32), random(34, 16), random(3, 16, 32)
    x[bad], dy[bad] = float("inf"), float("nan")
    y, dx, dweight = torch.empty(34, 16), torch.empty(34, 32), torch.empty(3, 16, 32)
    triton_kernels.grouped_linear_fwd(x, weight, None, ends, y)
    triton_kernels.grouped_linear_dgrad(dy, weight, ends, dx)
    triton_kernels.grouped_linear_wgrad([(x, dy, ends)], (dweight, None), False)
    for result in (y, dx):
        assert not result[bad].isfinite().any()
        assert result[:5].isfinite().all()
        assert result[25:].isfinite().all()
    assert dweight[0].isfinite().all()
    assert dweight[2].isfinite().all()
    assert not dweight[1].isfinite().any()


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16])
@pytest.mark.parametrize("kind", checks.KINDS[1:])
def test_adversarial_values(kind: str, dtype: torch.dtype) -> None:
    checks.adversarial_linear(triton_kernels, dtype, "cpu", kind, 40, 48, 56)
