"""kernels/cuda/wgrad.py on CPU tensors, over a stand-in for the extension (support/cuda_extension.py)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.support import launch_checks
from tests.support.cuda_extension import SMALL_RUN, HostExtension
from zbkern import testing
from zbkern.kernels.cuda import wgrad as cuda_wgrad
from zbkern.ops.functions import linear as linear_functions
from zbkern.wgrad import WGradQueue, WGradTask

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostExtension]:
    host = HostExtension()
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(cuda_wgrad, "_cuda", host)
    monkeypatch.setattr(cuda_wgrad, "raw_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    processors = cuda_wgrad._processors
    monkeypatch.setattr(cuda_wgrad, "_processors", processors)  # what the sanitizer runs replaces it
    processors.cache_clear()
    yield host
    processors.cache_clear()


def random(dtype: torch.dtype = BF16) -> launch_checks.Random:
    return launch_checks.Random(dtype, "cpu")


def segments_of(rows: list[int], n: int, k: int, dtype: torch.dtype) -> list[tuple]:
    make = random(dtype)
    return [(make(m, k), make(m, n)) for m in rows]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("rows", [[64], [17, 0, 64, 1], [0], [5] * 37])
@pytest.mark.parametrize(
    ("layout", "out_layout"),
    [
        *(("plain", "plain"), ("padded", "padded"), ("odd", "plain"), ("transposed", "plain"), ("expanded", "plain")),
        *(("plain", "transposed"), ("padded", "transposed")),
    ],
)
def test_linear_wgrad(
    extension: HostExtension, rows: list[int], accumulate: bool, layout: str, out_layout: str
) -> None:
    layouts = (layout, layout, out_layout)
    launch_checks.linear_wgrad(cuda_wgrad, random(), rows, 24, 40, layouts, FP32, accumulate)
    merged = sum(m > 0 for m in rows)
    assert extension.launches == [(1, min(16, merged - first)) for first in range(0, merged, 16)]


@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16, BF16), (BF16, FP32, BF16), (FP16, FP16, FP32), (FP16, FP32, None), (BF16, None, BF16)]
)
def test_dtypes_of_outputs(dtypes: tuple) -> None:
    """Of the operands, the weight and the bias, which are not always asked for."""
    segments = segments_of([32, 16], 16, 24, dtypes[0])
    shapes = zip(((16, 24), (16,)), dtypes[1:], strict=True)
    outputs = [None if kind is None else torch.randn(shape).to(kind) for shape, kind in shapes]
    named = dict(zip(("dweight", "dbias"), outputs, strict=True))
    launch_checks.compare(cuda_wgrad, "linear_wgrad", named, segments, outputs, True)


def test_several_weights_in_one_launch(extension: HostExtension) -> None:
    shapes = [(16, 24, [30, 20]), (32, 8, [31, 20]), (8, 40, [32, 20])]
    launch_checks.linear_wgrads(cuda_wgrad, random(), shapes, accumulate=True)
    assert extension.launches == [(3, 6)]


def test_multiprocessors_that_a_launch_may_take(extension: HostExtension) -> None:
    for options in ({}, {"max_tiles": 3}):
        cuda_wgrad.linear_wgrads([(segments_of([8], 16, 24, BF16), (torch.zeros(16, 24), None))], False, **options)
    assert extension.grids == [(132, 0), (132, 3)]


def test_a_launch_takes_neighbours_of_the_same_dtypes(extension: HostExtension) -> None:
    kinds = [(BF16, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32)]
    rows = [[8] * 9, [8] * 8, [8], [8] * 20]  # 17 segments are too many for a launch, 20 are two on their own
    products = [
        (segments_of(r, 16, 24, a), (torch.randn(16, 24).to(b), None)) for r, (a, b) in zip(rows, kinds, strict=True)
    ]
    named = {f"dweight {number}": outputs[0] for number, (_, outputs) in enumerate(products)}
    launch_checks.compare(cuda_wgrad, "linear_wgrads", named, products, False)
    assert sorted(extension.launches) == [(1, 1), (1, 4), (1, 8), (1, 9), (1, 16)]


def test_a_queue_runs_the_weights_of_a_layer_in_one_launch(extension: HostExtension) -> None:
    queue = WGradQueue()
    weights = [torch.nn.Parameter(torch.randn(n, 32).to(BF16)) for n in (64, 96)]
    wanted = []
    for weight in weights:
        (segment,) = segments_of([48], weight.shape[0], 32, BF16)
        queue.add(WGradTask(linear_functions.linear_wgrad(cuda_wgrad), segment, (weight, None)))
        wanted.append(segment[1].double().t() @ segment[0].double())
    queue.run()
    assert extension.launches == [(2, 2)]
    for weight, gradient in zip(weights, wanted, strict=True):
        testing.assert_close(weight.grad, gradient.to(BF16), "weight")


@pytest.mark.parametrize(
    ("x", "dy", "dweight", "dbias", "words"),
    [
        (((4, 8), FP32), ((4, 16), FP32), FP32, FP32, "x and dy in bf16 or fp16"),
        (((4, 8), BF16), ((4, 16), FP16), FP32, FP32, "all torch.bfloat16 and on its device; got"),
        (((4, 8), BF16), ((5, 16), BF16), FP32, FP32, r"got \[4, 8\]"),
        (((4, 8), BF16), ((4, 8), BF16), FP32, FP32, r"dy \[M, 16\]"),
        (((4, 8), BF16), ((4, 16), BF16), FP16, FP32, "float32 or x's dtype"),
        (((4, 8), BF16), ((4, 16), BF16), FP32, FP16, "float32 or x's dtype"),
    ],
)
def test_what_is_refused(x: tuple, dy: tuple, dweight: torch.dtype, dbias: torch.dtype, words: str) -> None:
    segment = torch.zeros(x[0], dtype=x[1]), torch.zeros(dy[0], dtype=dy[1])
    with pytest.raises(ValueError, match=words):
        cuda_wgrad.linear_wgrad([segment], (torch.zeros(16, 8, dtype=dweight), torch.zeros(16, dtype=dbias)), False)


def test_a_matrix_without_contiguous_rows_or_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="dweight must have contiguous rows"):
        cuda_wgrad.linear_wgrad(segments_of([4], 16, 8, BF16), (torch.zeros(16, 16)[:, ::2], None), False)


def test_a_bias_with_gaps_is_summed_beside_the_product() -> None:
    outputs = torch.randn(16, 8), torch.full((32,), float("nan"))[::2].copy_(torch.randn(16))
    named = dict(zip(("dweight", "dbias"), outputs, strict=True))
    launch_checks.compare(cuda_wgrad, "linear_wgrad", named, segments_of([4, 5], 16, 8, BF16), outputs, True)


@pytest.mark.parametrize(("n", "k"), [(0, 8), (8, 0)])
def test_a_weight_without_elements(extension: HostExtension, n: int, k: int) -> None:
    dbias = torch.ones(n)
    segment = torch.zeros(4, k, dtype=BF16), torch.ones(4, n, dtype=BF16)
    cuda_wgrad.linear_wgrad([segment], (torch.zeros(n, k), dbias), True)
    assert dbias.tolist() == [5.0] * n
    assert not extension.launches


@pytest.mark.slow
def test_what_the_sanitizer_runs(extension: HostExtension, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU nobody else would see that its names are out of date."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    exec(SMALL_RUN.replace('"cuda"', '"cpu"'), {})
    assert len(extension.launches) > 100
