"""Attention, embedding, loss and norms as compiled Triton kernels on a GPU, at production tiles, against the reference
in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import attention_checks
import launch_checks as checks
import torch
from torch import Tensor

from zbkern import testing
from zbkern.kernels import dispatch, reference
from zbkern.kernels.spec import AttentionOptions, CrossEntropyOptions

REASON = dispatch.why_not("attention", "triton", "cuda") if torch.cuda.is_available() else "no GPU is visible"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def launches():
    return dispatch.resolve("attention", "triton", DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "arguments",
    [
        {"queries": [300, 300], "causal": False},
        {"queries": [512, 512], "heads": (4, 2)},
        {"queries": [129, 129], "keys": [400, 400], "heads": (4, 1), "window": 200},
        {"queries": [1, 0, 700, 128, 127], "heads": (2, 1)},
        {"queries": [257, 3], "keys": [100, 260], "window": 70},
    ],
    ids=str,
)
def test_attention(launches, arguments: dict, size: int, dtype: torch.dtype) -> None:
    attention_checks.attention(launches, dtype, size=size, device=DEVICE, **arguments)


@pytest.mark.parametrize("layout", attention_checks.LAYOUTS)
def test_attention_of_any_layout(launches, layout: str) -> None:
    layouts = (layout, layout, layout)
    attention_checks.attention(launches, torch.bfloat16, [200, 200], size=64, layouts=layouts, device=DEVICE)
    attention_checks.attention(launches, torch.bfloat16, [200, 33], size=72, layouts=layouts, device=DEVICE)


def test_attention_is_equal_bit_for_bit_and_in_a_graph(launches) -> None:
    torch.manual_seed(0)
    ends = (0, 300, 1000)
    options = AttentionOptions(0.1, True, 256, ends, ends)
    q, k, v, dy = (torch.randn(1000, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    outputs = [torch.empty_like(t) for t in (q, q, k, v)]
    lse = torch.empty(4, 1000, device=DEVICE)

    def run() -> list[Tensor]:
        for output in outputs:
            output.fill_(float("nan"))
        launches.attention_fwd(q, k, v, options, outputs[0], lse)
        launches.attention_dgrad(dy, q, k, v, outputs[0], lse, options, *outputs[1:])
        return [output.clone() for output in outputs]

    first = run()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for tensor in (q, k, v, dy):
        tensor.mul_(0.5)
    expected = run()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert not torch.equal(first[0], outputs[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[5000], [700, 0, 1300, 64, 1]])
def test_embedding(launches, rows: list[int], dtype: torch.dtype) -> None:
    random = checks.Random(dtype, DEVICE)
    segments = [(torch.randint(300, (m,), device=DEVICE) ** 2 // 300, random(m, 1000)) for m in rows]
    dweight = torch.full((300, 1000), float("nan"), device=DEVICE)
    launches.embedding_wgrad(segments, (dweight,), False, 7)
    exact = torch.empty(300, 1000, dtype=torch.float64)
    reference.embedding_wgrad([(i.cpu(), dy.double().cpu()) for i, dy in segments], (exact,), False, 7)
    checks.check("dweight", dweight, exact)
    again = torch.full_like(dweight, float("nan"))
    launches.embedding_wgrad(segments, (again,), False, 7)
    assert torch.equal(again, dweight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss(launches, dtype: torch.dtype) -> None:
    """Half precisions round the logits between the launches: their tolerance is that of the logits."""
    random = checks.Random(dtype, DEVICE, scale=0.3)
    options = CrossEntropyOptions(label_smoothing=0.1, z_loss=0.001, chunk=256)
    weight, bias = random(5003, 128), random(5003)
    segments, wide = [], []
    for m in (300, 500):
        x, target = random(m, 128), torch.randint(5003, (m,), device=DEVICE)
        target[::7] = -100
        loss, lse = (torch.full((m,), float("nan"), device=DEVICE) for _ in range(2))
        dx = torch.full_like(x, float("nan"))
        launches.cross_entropy_fwd(x, weight, bias, target, options, loss, lse, dx)
        exact = [torch.empty(m, dtype=torch.float64, device=DEVICE) for _ in range(2)] + [torch.empty_like(x).double()]
        reference.cross_entropy_fwd(x.double(), weight.double(), bias.double(), target, options, *exact)
        for name, got, expected in zip(("loss", "lse", "dx"), (loss, lse, dx), exact, strict=True):
            testing.assert_close(got, expected, name, 4 * testing.TOLERANCE[dtype])
        dloss = torch.randn(m, device=DEVICE)
        segments.append((x, target, lse, dloss))
        wide.append((x.double(), target, exact[1], dloss.double()))
    outputs = [torch.full_like(t, float("nan"), dtype=torch.float32) for t in (weight, bias)]
    launches.cross_entropy_wgrad(segments, outputs, False, weight, bias, options)
    exact = [torch.empty_like(t, dtype=torch.float64) for t in (weight, bias)]
    reference.cross_entropy_wgrad(wide, exact, False, weight.double(), bias.double(), options)
    for name, got, expected in zip(("dweight", "dbias"), outputs, exact, strict=True):
        testing.assert_close(got, expected, name, 4 * testing.TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("features", [100, 4096, 16384, 40000])
def test_norms(launches, features: int, centered: bool, dtype: torch.dtype) -> None:
    random = checks.Random(dtype, DEVICE)
    rows = 301
    x, dy, weight, bias = random(rows, features), random(rows, features), random(features), random(features)
    found = []
    for side, kind, wide in ((launches, dtype, torch.float32), (reference, torch.float64, torch.float64)):
        a, b, w, c = (t.to(kind) for t in (x, dy, weight, bias))
        y, dx = (torch.full_like(a, float("nan")) for _ in range(2))
        statistics = [torch.full((rows,), float("nan"), dtype=wide, device=DEVICE) for _ in range(1 + centered)]
        count = side.norm_partials(rows, features, x.device)
        partials = torch.full((1 + centered, count, features), float("nan"), dtype=wide, device=DEVICE)
        gradients = [torch.full((features,), float("nan"), dtype=wide, device=DEVICE) for _ in range(1 + centered)]
        if centered:
            side.layer_norm_fwd(a, w, c, 1e-5, y, *statistics)
            side.layer_norm_dgrad(b, a, w, *statistics, dx, partials)
        else:
            side.rms_norm_fwd(a, w, 1e-5, y, *statistics)
            side.rms_norm_dgrad(b, a, w, *statistics, dx, partials)
        side.norm_wgrad([(partials,)], gradients, False)
        found.append([y, dx, *gradients])
    for index, (got, expected) in enumerate(zip(*found, strict=True)):
        testing.assert_close(got, expected, f"output {index}", testing.TOLERANCE[dtype])
