"""W of the CUDA extension on a GPU against float64: dtypes, ragged shapes, any segments; repeatable bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zbkern import testing
from zbkern.kernels.cuda import wgrad as cuda_wgrad

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda_wgrad.why_not() is not None, reason=str(cuda_wgrad.why_not()))]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"


def random(rows: int, columns: int, dtype: torch.dtype, padding: int = 0) -> Tensor:
    """Values in a buffer of nan with longer rows."""
    buffer = torch.full((rows, columns + padding), float("nan"), dtype=dtype, device=DEVICE)
    return buffer[:, :columns].copy_(torch.randn(rows, columns, device=DEVICE))


def segments_of(rows: list[int], n: int, k: int, dtype: torch.dtype, padding: int = 0) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(random(m, k, dtype, padding), random(m, n, dtype, padding)) for m in rows]


def wide(segments: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    products = [dy.double().t() @ x.double() for x, dy in segments]
    return torch.stack(products).sum(0), torch.stack([dy.double().sum(0) for _, dy in segments]).sum(0)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtypes", [(BF16, FP32, FP32), (BF16, BF16, BF16), (FP16, FP32, FP16), (FP16, FP16, FP32)])
@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [
        (128, 256, [64]),
        (8, 8, [1]),
        (136, 264, [63, 65]),  # a little more than a tile each way
        (1024, 768, [512, 512, 512, 512]),
        (1016, 2056, [100, 1, 300, 64, 7]),
        (4096, 1024, [2048]),
        (256, 256, [32] * 21),  # more segments than a launch takes
    ],
)
def test_against_float64(n: int, k: int, rows: list[int], dtypes: tuple, accumulate: bool) -> None:
    segments = segments_of(rows, n, k, dtypes[0], padding=8)
    dweight, dbias = random(n, k, dtypes[1], padding=16), random(1, n, dtypes[2])[0]
    expected = wide(segments)
    if accumulate:
        expected = expected[0] + dweight.double(), expected[1] + dbias.double()
    else:
        dweight.fill_(float("nan")), dbias.fill_(float("nan"))
    cuda_wgrad.linear_wgrad(segments, (dweight, dbias), accumulate)
    testing.assert_close(dweight, expected[0], "dweight", terms=sum(rows))
    testing.assert_close(dbias, expected[1], "dbias")
    assert dweight._base[:, k:].isnan().all(), "wrote beside dweight"


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_bits_whatever_the_grid(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 2048, 1536
    segments = segments_of([700, 64, 1300], n, k, BF16)
    results = []
    for places, max_tiles in ((132, 0), (132, 0), (2, 0), (33, 0), (132, 1)):
        monkeypatch.setattr(cuda_wgrad, "_processors", lambda device, places=places: places)
        outputs = torch.zeros(n, k, device=DEVICE), torch.zeros(n, device=DEVICE) if bias else None
        cuda_wgrad.linear_wgrads([(segments, outputs)], True, max_tiles=max_tiles)
        results.append(outputs)
    for dweight, dbias in results[1:]:
        assert torch.equal(dweight, results[0][0])
        assert not bias or torch.equal(dbias, results[0][1])


def test_several_weights_in_one_launch() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.0")
    shapes = [(1024, 512), (136, 264), (2048, 768)]
    products = []
    for n, k in shapes:
        outputs = random(n, k, FP32), torch.zeros(n, device=DEVICE)
        products.append((segments_of([300, 77, 128], n, k, BF16), outputs))
    expected = [(wide(segments)[0] + outputs[0].double(), wide(segments)[1]) for segments, outputs in products]
    cuda_wgrad.linear_wgrads(products, True)
    for (_, outputs), (dweight, dbias) in zip(products, expected, strict=True):
        testing.assert_close(outputs[0], dweight, "dweight")
        testing.assert_close(outputs[1], dbias, "dbias")


def test_transposed_weight_and_unaligned_operands() -> None:
    x, dy = random(100, 264, BF16, padding=3)[:, 1:257], random(100, 128, BF16).t().contiguous().t()
    dweight = torch.zeros(256, 128, device=DEVICE).t()
    cuda_wgrad.linear_wgrad([(x, dy)], (dweight, None), False)
    testing.assert_close(dweight, wide([(x, dy)])[0], "dweight")


def test_an_expanded_gradient() -> None:  # of a sum over rows
    x, dy = random(100, 256, BF16), random(1, 128, BF16).expand(100, 128)
    dweight = torch.zeros(128, 256, device=DEVICE)
    cuda_wgrad.linear_wgrad([(x, dy)], (dweight, None), False)
    testing.assert_close(dweight, wide([(x, dy)])[0], "dweight")


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
    testing.assert_close(dweight, 3 * wide(segments)[0], "dweight")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cuda_wgrad.linear_wgrad(segments, (dweight, None), False)
    torch.cuda.current_stream().wait_stream(stream)
    testing.assert_close(dweight, wide(segments)[0], "dweight")


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
