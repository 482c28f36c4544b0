"""What callers of the Triton launches count on besides values: how many launches and programs there are, what is
written once, what is refused, what stays apart."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import every_launch, row_checks
from tests.support import launch_checks as checks
from zbkern import testing
from zbkern.kernels import reference, spec, tiles
from zbkern.kernels.spec import AttentionOptions, CrossEntropyOptions
from zbkern.kernels.triton import activation as triton_activation
from zbkern.kernels.triton import embedding as triton_embedding
from zbkern.kernels.triton import grouped as triton_grouped
from zbkern.kernels.triton import grouped_wgrad as triton_grouped_wgrad
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.kernels.triton import loss as triton_loss
from zbkern.kernels.triton import matmul_tile as triton_matmul_tile
from zbkern.kernels.triton import multi_matmul as triton_multi_matmul
from zbkern.kernels.triton import rotary as triton_rotary
from zbkern.kernels.triton import wgrad as triton_wgrad
from zbkern.kernels.triton.replay import replay

pytestmark = pytest.mark.usefixtures("hopper")

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


COUNTS = [[17, 0, 20], [0, 0, 0], [1, 16, 0]]


@pytest.mark.parametrize(("microbatches", "launches"), [(1, [1]), (3, [4]), (9, [8, 1])])
def test_all_groups_and_microbatches_are_one_launch(microbatches: int, launches: list[int], spy: Spy) -> None:
    products = spy(triton_grouped, "_grouped_product", lambda grid, constants: grid)
    sums = spy(triton_grouped_wgrad, "_grouped_sums", lambda grid, constants: constants[0])
    counts = [[index % 3, 0, 20, 1] for index in range(microbatches)]
    checks.grouped_linear(triton_kernels, checks.Random(torch.float32, "cpu"), counts, 16, 24, bias=False)
    assert len(products) == 2  # forward and dgrad
    assert sums == launches


@pytest.mark.parametrize(
    ("n", "options", "programs"),
    [
        *((64, {}, 4), (64, {"max_tiles": 1}, 8), (64, {"max_tiles": 3}, 4)),
        *((160, {}, (5, 1)), (160, {"max_tiles": 2}, (5, 1))),  # of a bias alone
    ],
)
def test_programs_of_a_w(
    n: int, options: dict, programs: int | tuple[int, int], spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are SMs, more if each must end early; the result is the same."""
    monkeypatch.setattr(tiles, "choose", lambda *_: tiles.Tile(16, 32, 16, warps=4, stages=2, group=2))
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


def test_a_tile_says_in_how_many_parts_it_is_written(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = spy(triton_multi_matmul, "_over_rows", lambda grid, constants: constants[-1])
    for count in (1, 4, 0):
        triton_matmul_tile.plan.cache_clear()
        tile = tiles.Tile(64, 128, 16, warps=4, stages=2, parts=count)
        monkeypatch.setattr(tiles, "choose", lambda *_, tile=tile: tile)
        replay.forget()
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


NAMES = [name for op, names in spec.OPS.items() for name in names if name != "norm_partials"]


def test_none_is_missing() -> None:
    """Of the contract's, and of what the tests of every launch know, here and on a GPU."""
    cases = every_launch.cases(triton_kernels, checks.Random(torch.float32, "cpu"), 3, 16, 16)
    assert cases.keys() == set(NAMES)


def test_nan_and_infinity_pass_through() -> None:
    """The reference in float64: in float32 torch's own vector code makes gelu(inf) nan."""
    z = torch.tensor([[float("nan"), float("inf"), 0.0, -0.0, 1e-42, 1e30, -1e30]])
    for activation in spec.ACTIVATIONS:
        y, expected = torch.empty_like(z), torch.empty_like(z, dtype=torch.float64)
        triton_activation.activation_fwd(z, activation, y)
        reference.activation_fwd(z.double(), activation, expected)
        torch.testing.assert_close(y, expected.float(), equal_nan=True)


def test_too_large_heads_are_refused() -> None:
    options = AttentionOptions(1.0, True, None, (0, 2), (0, 2))
    for most, dtype in ((256, torch.float16), (128, torch.float32)):
        q = torch.empty(2, 1, most + 1, dtype=dtype)
        with pytest.raises(ValueError, match=f"heads of up to {most} in {dtype}; got {most + 1}; use impl='torch'"):
            triton_kernels.attention_fwd(q, q, q, options, q, torch.empty(1, 2))


def wgrad(rows: list[int], vocabulary: int, features: int, dtype: torch.dtype = torch.float16, **more) -> torch.Tensor:
    return row_checks.embedding(triton_embedding, checks.Random(dtype, "cpu"), rows, vocabulary, features, **more)


def test_rows_of_several_programs_and_into_float32() -> None:
    wgrad([5, 3], 4, triton_embedding._RARE[1] + 1, torch.bfloat16, accumulate=True, kind=torch.int32)
    wgrad([35, 33], 2, triton_embedding._FREQUENT[1] + 1, torch.bfloat16, accumulate=True)


@pytest.mark.parametrize("repeats", [1, 3, 4, 5, 8, 9])
def test_runs_that_end_with_a_block_of_rows(repeats: int) -> None:
    dy = torch.randn(3 * repeats, 8)
    dweight = torch.full((4, 8), float("nan"))
    triton_embedding.embedding_wgrad([(torch.arange(3).repeat(repeats), dy)], (dweight,), False)
    assert torch.equal(dweight[3], torch.zeros(8))
    checks.check("dweight", dweight[:3].clone(), dy.double().view(repeats, 3, 8).sum(0))


def test_a_frozen_weight_and_rows_without_features_launch_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU refuses a grid of no programs."""
    grids: list[tuple[int, int]] = []
    monkeypatch.setattr(triton_embedding, "_sum_runs", lambda grid, *_, **__: grids.append(grid))
    indices = torch.zeros(3, dtype=torch.int64)
    triton_embedding.embedding_wgrad([(indices, torch.empty(3, 0))], (torch.empty(2, 0),), False)
    triton_embedding.embedding_wgrad([(indices, torch.empty(3, 4))], (None,), False)
    triton_embedding.embedding_wgrad([(indices, torch.empty(3, 4))], (torch.empty(2, 4),), False)
    assert grids == [(3, 1)]


def test_tiles_are_powers_of_two() -> None:
    """Which the compiler insists on."""
    for heads in (1, 5, 32, 40):
        for size in (1, 2, 80, 96, 256):
            for half in range(size // 2 + 1):
                tile = triton_rotary._tile(heads, size, half)
                assert all(n & (n - 1) == 0 for n in tile)
                assert tile[1] >= half
                assert tile[2] >= size - 2 * half


def test_nothing_to_rotate_launches_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU refuses a grid of no programs."""
    grids: list[tuple[int, int]] = []
    monkeypatch.setattr(triton_rotary, "_rotate", lambda grid, *_, **__: grids.append(grid))
    for shape in ((0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8), (2, 3, 2, 8)):
        x, angles = torch.empty(shape), torch.ones(shape[1], 4)
        triton_rotary.rotary_fwd(x, angles, angles, False, x.clone())
    assert grids == [(6, 1)]


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("centered", [False, True])
def test_no_rows(centered: bool) -> None:
    x, statistics = torch.empty(0, 8), torch.empty(0)
    partials, weight = poisoned(1 + centered, triton_kernels.norm_partials(0, 8, x.device), 8), torch.ones(8)
    mean = statistics if centered else None
    triton_kernels.norm_fwd(x, weight, None, 1e-5, x.clone(), mean, statistics)
    triton_kernels.norm_dgrad(x, x, weight, mean, statistics, x.clone(), partials)
    outputs = [poisoned(8) for _ in range(1 + centered)]
    triton_kernels.norm_wgrad([(partials,)], outputs, False)
    for output in outputs:
        assert torch.equal(output, torch.zeros(8))


@pytest.mark.parametrize("counts", [[1], [33], [3, 0, 40], [2] * 9])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_wgrad_sums_all_segments(counts: list[int], accumulate: bool, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    segments = [(torch.randn(2, count, 37),) for count in counts]
    before = [torch.randn(37).to(kind) if accumulate else poisoned(37, dtype=kind) for _ in range(2)]
    outputs = [before[0].clone(), poisoned(37, 2, dtype=kind)[:, 0].copy_(before[1])]
    triton_kernels.norm_wgrad(segments, outputs, accumulate)
    for index, output in enumerate(outputs):
        total = sum(partials[index].double().sum(0) for (partials,) in segments)
        testing.assert_close(output, total + before[index].double() if accumulate else total)
    only = [None, before[1].clone()]
    triton_kernels.norm_wgrad(segments, only, accumulate)
    assert torch.equal(only[1], outputs[1])


def test_float64_is_computed_in_float64() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 40, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    y, rstd = torch.empty_like(x), torch.empty(5, dtype=torch.float64)
    triton_kernels.norm_fwd(x, weight, None, 1e-5, y, None, rstd)
    testing.assert_close(y, torch.nn.functional.rms_norm(x, (40,), weight, 1e-5), tolerance=1e-9)


def test_nan_and_infinity_stay_in_their_row() -> None:
    x = torch.randn(4, 33)
    x[1, 2], x[2, 3] = float("nan"), float("inf")
    y, rstd = poisoned(4, 33), poisoned(4)
    triton_kernels.norm_fwd(x, None, None, 1e-5, y, None, rstd)
    assert torch.isfinite(y[[0, 3]]).all()
    assert y[1].isnan().all()
    assert y[2, 3].isnan()


NAN = float("nan")


def check(
    rows: list[int], vocabulary: int, features: int, options: CrossEntropyOptions,
    dtype: torch.dtype = torch.float32, bias: bool = True, accumulate: bool = False, weight_layout: str = "plain",
) -> None:  # fmt: skip
    """Forward of every segment, then one W over all of them. In half precision logits are rounded to it in between."""
    tolerance = {torch.float32: 2e-5, torch.float16: 5e-3}[dtype]
    random = row_checks.Random(dtype, "cpu", scale=0.5)
    row_checks.cross_entropy(
        triton_loss, random, rows, vocabulary, features, options, bias, accumulate, (tolerance,) * 3, 0.1, weight_layout
    )


def check_at_once(m: int, vocabulary: int, features: int, options: CrossEntropyOptions, dtype: torch.dtype) -> None:
    """A forward without gradients has the same loss, and one that gives the weight's gradients has those of its W."""
    random = row_checks.Random(dtype, "cpu", scale=0.5)
    x, weight, b, target = random(m, features), random(vocabulary, features), random(vocabulary), torch.arange(m)
    target[::3] = options.ignore_index
    losses, lse = [torch.full((m,), NAN) for _ in range(3)], torch.full((m,), NAN)
    head = (x, weight, b, target, options)
    triton_loss.cross_entropy_fwd(*head, losses[0], lse, torch.empty_like(x))
    triton_loss.cross_entropy_fwd(*head, losses[1], lse, None)
    at_once = [torch.full(shape, NAN) for shape in ((vocabulary, features), (vocabulary,))]
    triton_loss.cross_entropy_fwd(*head, losses[2], lse, None, at_once)
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])
    later = [torch.full_like(gradient, NAN) for gradient in at_once]
    ones = [(x, target, lse, torch.ones(m))]
    named = dict(zip(("dweight", "dbias"), at_once, strict=True))
    tolerance = {torch.float32: 2e-5, torch.float16: 5e-3}[dtype]
    arguments = {"weight": weight, "bias": b, "options": options}
    copies = checks.compare(None, "cross_entropy_wgrad", {}, ones, later, False, **arguments)
    for (name, got), wanted in zip(named.items(), later, strict=True):
        checks.check(name, got, copies[id(wanted)], tolerance, scale=0.1)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_loss, "_PIECE", 32)
    monkeypatch.setattr(triton_loss, "_BLOCK", 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 3, "softcap": 2.0}], ids=str
)
def test_options(options: dict, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check([7, 5], 50, 24, CrossEntropyOptions(**options, chunk=4), dtype)
    check_at_once(7, 50, 24, CrossEntropyOptions(**options, chunk=4), dtype)


def test_w_writes_each_part_of_the_vocabulary_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    launch = triton_loss.linear_wgrad

    def record(segments: list, outputs: list, accumulate: bool) -> None:
        calls.append((len(segments), *outputs[0].shape))
        launch(segments, outputs, accumulate)

    monkeypatch.setattr(triton_loss, "linear_wgrad", record)
    check([8, 8], 64, 8, CrossEntropyOptions(chunk=8))
    assert calls == [(2, 32, 8), (2, 32, 8)]


def test_infinity_and_nan_stay_in_their_rows() -> None:
    """Logits of -inf, as masks leave them in a whole piece of the vocabulary, count nothing."""
    masked = torch.where(torch.arange(70) < 40, float("-inf"), 0.0)
    z = torch.stack([masked, torch.full((70,), NAN), torch.zeros(70), torch.full((70,), float("-inf"))])
    loss, lse, target = torch.full((4,), NAN), torch.full((4,), NAN), torch.tensor([50, 1, 1, 0])
    arguments = (z, target, loss, lse, 0, 0.0, 0.0, None, 70, 70, 1, 1, 1)
    triton_loss._loss(4, arguments, (False, True, 32), warps=8, stages=1)
    assert torch.allclose(loss[[0, 2]], torch.tensor([30.0, 70.0]).log())
    assert loss[1].isnan()
    assert loss[3] == 0
    assert lse[3] == float("-inf")
    assert torch.equal(z[0, :40], torch.zeros(40))
    assert torch.equal(z[3], torch.zeros(70))


def test_a_target_out_of_range_gives_nan() -> None:
    x, weight, loss = torch.randn(4, 8), torch.randn(20, 8), torch.zeros(4)
    target = torch.tensor([19, 20, -1, -100])
    triton_loss.cross_entropy_fwd(x, weight, None, target, CrossEntropyOptions(), loss, torch.empty(4), None)
    assert loss.isnan().tolist() == [False, True, True, False]
