"""W of the CUDA extension on a GPU against float64: dtypes, ragged shapes, any segments; repeatable bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.emulator.cases import Case
from tests.emulator.extension import cases, tile_of
from tests.support import launch_checks
from zbkern import testing
from zbkern.kernels.cuda import wgrad as cuda_wgrad

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda_wgrad.why_not() is not None, reason=str(cuda_wgrad.why_not()))]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"


def random(dtype: torch.dtype) -> launch_checks.Random:
    return launch_checks.Random(dtype, DEVICE)


def segments_of(rows: list[int], n: int, k: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    make = random(dtype)
    return [(make(m, k), make(m, n)) for m in rows]


def wide(segments: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([dy.double().t() @ x.double() for x, dy in segments]).sum(0)


@pytest.mark.parametrize("case", [*cases(DEVICE)], ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    """Those of the emulator."""
    case.run(cuda_wgrad)


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16)])
@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [(1024, 768, [512, 512, 512, 512]), (1016, 2056, [100, 1, 300, 64, 7]), (4096, 4096, [4096] * 4)],
)
def test_large_weights(n: int, k: int, rows: list[int], dtypes: tuple) -> None:
    launch_checks.linear_wgrad(cuda_wgrad, random(dtypes[0]), rows, n, k, ("padded",) * 3, dtypes[1], True)
    shapes = [(n, k, [300, 77, 128]), (136, 264, [64, 77, 9])]
    launch_checks.linear_wgrads(cuda_wgrad, random(dtypes[0]), shapes, accumulate=True)


@pytest.mark.parametrize("bias", [None, BF16, FP32])
def test_a_bias_of_another_dtype(bias: torch.dtype | None) -> None:
    outputs = torch.ones(136, 264, device=DEVICE), bias and torch.ones(136, device=DEVICE, dtype=bias)
    named = dict(zip(("dweight", "dbias"), outputs, strict=True))
    launch_checks.compare(cuda_wgrad, "linear_wgrad", named, segments_of([300, 7], 136, 264, BF16), outputs, True)


@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("bias", [False, True])
def test_the_same_bits_whatever_the_grid(bias: bool, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 2048, 1536
    segments = segments_of([700, 64, 1300], n, k, BF16)
    results = []
    for places, max_tiles in ((132, 0), (132, 0), (2, 0), (33, 0), (132, 1)):
        monkeypatch.setattr(cuda_wgrad, "_processors", lambda device, places=places: places)
        outputs = torch.zeros(n, k, device=DEVICE), torch.zeros(n, device=DEVICE) if bias else None
        with tile_of(cuda_wgrad, columns):
            cuda_wgrad.linear_wgrads([(segments, outputs)], True, max_tiles=max_tiles)
        results.append(outputs)
    for dweight, dbias in results[1:]:
        assert torch.equal(dweight, results[0][0])
        assert not bias or torch.equal(dbias, results[0][1])


def test_in_a_graph_and_on_another_stream() -> None:
    segments = segments_of([256, 256], 512, 512, BF16)
    dweight = torch.zeros(512, 512, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    cuda_wgrad.linear_wgrad(segments, (dweight, None), True)  # what is loaded at first use is loaded
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cuda_wgrad.linear_wgrad(segments, (dweight, None), True)
    dweight.zero_()
    for _ in range(3):
        graph.replay()
    testing.assert_close(dweight, 3 * wide(segments), "dweight")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cuda_wgrad.linear_wgrad(segments, (dweight, None), False)
    torch.cuda.current_stream().wait_stream(stream)
    testing.assert_close(dweight, wide(segments), "dweight")


@pytest.mark.alone
def test_it_never_waits_for_the_gpu() -> None:
    segments = segments_of([256], 256, 256, BF16)
    dweight = torch.zeros(256, 256, device=DEVICE)
    cuda_wgrad.linear_wgrad(segments, (dweight, None), True)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    end = torch.cuda.Event()
    cuda_wgrad.linear_wgrad(segments, (dweight, None), True)
    end.record()
    assert not end.query()
    torch.cuda.synchronize()
