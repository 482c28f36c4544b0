"""kernels/cuda/wgrad.py on CPU tensors, over a stand-in for the extension (host_extension.py)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support import launch_checks
from tests.support.cuda_run import SMALL_RUN
from tests.support.host_extension import HostExtension
from zbkern import testing
from zbkern.kernels import reference
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


def placed(values: Tensor, layout: str) -> Tensor:
    """The same values, laid out in a larger buffer of nan; expanded: the first row for all."""
    return values[:1].expand(values.shape) if layout == "expanded" else launch_checks.place(values, layout)


def segments_of(rows: list[int], n: int, k: int, dtype: torch.dtype, layout: str = "plain") -> list[tuple]:
    torch.manual_seed(sum(rows))
    return [(placed(torch.randn(m, k).to(dtype), layout), placed(torch.randn(m, n).to(dtype), layout)) for m in rows]


def expected(segments: list[tuple], outputs: tuple, accumulate: bool) -> list[Tensor | None]:
    wide = [None if output is None else output.double() for output in outputs]
    reference.linear_wgrad([(x.double(), dy.double()) for x, dy in segments], wide, accumulate)
    return wide


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
    n, k = 24, 40
    segments = segments_of(rows, n, k, BF16, layout)
    dweight, dbias = placed(torch.randn(n, k), out_layout), torch.randn(n)
    want = expected(segments, (dweight, dbias), accumulate)
    cuda_wgrad.linear_wgrad(segments, (dweight, dbias), accumulate)
    for name, got, wide in zip(("dweight", "dbias"), (dweight, dbias), want, strict=True):
        testing.assert_close(got, wide.to(got.dtype), name)
    merged = sum(m > 0 for m in rows)
    assert extension.launches == [(1, min(16, merged - first)) for first in range(0, merged, 16)]


@pytest.mark.parametrize("dtypes", [(BF16, BF16, BF16), (BF16, FP32, BF16), (FP16, FP16, FP32), (FP16, FP32, None)])
def test_dtypes_of_outputs(dtypes: tuple) -> None:
    segments = segments_of([32, 16], 16, 24, dtypes[0])
    outputs = torch.randn(16, 24).to(dtypes[1]), None if dtypes[2] is None else torch.randn(16).to(dtypes[2])
    want = expected(segments, outputs, True)
    cuda_wgrad.linear_wgrad(segments, outputs, True)
    for got, wide in zip(outputs, want, strict=True):
        if got is not None:
            testing.assert_close(got, wide.to(got.dtype), "output")


def test_the_bias_alone() -> None:
    segments = segments_of([32, 16], 16, 24, BF16)
    dbias = torch.randn(16).to(BF16)
    want = expected(segments, (None, dbias), True)
    cuda_wgrad.linear_wgrad(segments, (None, dbias), True)
    testing.assert_close(dbias, want[1].to(BF16), "dbias")


def test_several_weights_in_one_launch(extension: HostExtension) -> None:
    shapes = [(16, 24), (32, 8), (8, 40)]
    products = [(segments_of([30 + i, 20], *shape, BF16), (torch.randn(*shape), torch.randn(shape[0])))
                for i, shape in enumerate(shapes)]  # fmt: skip
    want = [expected(segments, outputs, True) for segments, outputs in products]
    cuda_wgrad.linear_wgrads(products, True)
    assert extension.launches == [(3, 6)]
    for (_, outputs), wide in zip(products, want, strict=True):
        testing.assert_close(outputs[0], wide[0].float(), "dweight")
        testing.assert_close(outputs[1], wide[1].float(), "dbias")


def test_multiprocessors_that_a_launch_may_take(extension: HostExtension) -> None:
    for options in ({}, {"max_tiles": 3}):
        cuda_wgrad.linear_wgrads([(segments_of([8], 16, 24, BF16), (torch.zeros(16, 24), None))], False, **options)
    assert extension.grids == [(132, 0), (132, 3)]


def test_what_the_sanitizer_is_given_can_be_imported() -> None:
    exec("\n".join(line for line in SMALL_RUN.splitlines() if line.startswith(("import", "from"))), {})


def test_a_launch_takes_neighbours_of_the_same_dtypes(extension: HostExtension) -> None:
    kinds = [(BF16, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32)]
    rows = [[8] * 9, [8] * 8, [8], [8] * 20]  # 17 segments are too many for a launch, 20 are two on their own
    products = [
        (segments_of(r, 16, 24, a), (torch.randn(16, 24).to(b), None)) for r, (a, b) in zip(rows, kinds, strict=True)
    ]
    want = [expected(segments, outputs, False) for segments, outputs in products]
    cuda_wgrad.linear_wgrads(products, False)
    assert sorted(extension.launches) == [(1, 1), (1, 4), (1, 8), (1, 9), (1, 16)]
    for (_, outputs), wide in zip(products, want, strict=True):
        testing.assert_close(outputs[0], wide[0].to(outputs[0].dtype), "dweight")


def test_a_queue_runs_the_weights_of_a_layer_in_one_launch(extension: HostExtension) -> None:
    queue = WGradQueue()
    weights = [torch.nn.Parameter(torch.randn(n, 32).to(BF16)) for n in (64, 96)]
    wanted = []
    for weight in weights:
        (segment,) = segments_of([48], weight.shape[0], 32, BF16)
        queue.add(WGradTask(linear_functions.linear_wgrad(cuda_wgrad), segment, (weight, None)))
        wanted += expected([segment], (torch.zeros(weight.shape), None), False)[:1]
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
    segments = segments_of([4, 5], 16, 8, BF16)
    outputs = torch.randn(16, 8), torch.randn(32)[::2]
    want = expected(segments, outputs, True)
    cuda_wgrad.linear_wgrad(segments, outputs, True)
    for got, wide in zip(outputs, want, strict=True):
        testing.assert_close(got, wide.float(), "output")


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
