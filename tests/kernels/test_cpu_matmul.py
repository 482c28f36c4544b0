"""Products on a CPU give the same whichever library takes them; oneDNN is held to float64 on every machine."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import zbkern
from tests.support.examples import examples
from zbkern.kernels.reference import matmul as reference_matmul

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN was given, on a processor where it takes large products."""
    found = []

    def counting(x: Tensor, *rest: object) -> Tensor:
        found.append(tuple(x.shape))
        return torch.ops.mkldnn._linear_pointwise.default(x, *rest)

    monkeypatch.setattr(reference_matmul, "_onednn", counting)
    return found


def view(rows: int, columns: int, kind: str) -> Tensor:
    if kind == "transposed":
        return torch.randn(columns, rows).t()
    if kind == "columns of a wider matrix":
        return torch.randn(rows, columns + 8)[:, 3 : 3 + columns]
    if kind == "every second column":
        return torch.randn(rows, 2 * columns)[:, ::2]
    if kind == "one row for all":
        return torch.randn(1, columns).expand(rows, columns)
    return torch.randn(rows, columns)


KINDS = st.sampled_from(
    ["contiguous", "transposed", "columns of a wider matrix", "every second column", "one row for all"]
)
SIZES = st.sampled_from([4, 5, 16, 31, 64, 127, 300])


@needs_onednn
@examples(12, 30)
@given(SIZES, SIZES, SIZES, KINDS, KINDS, st.sampled_from(["none", "bias", "every second"]), st.booleans())
def test_onednn_against_float64(m: int, k: int, n: int, kind_a: str, kind_b: str, bias: str, accumulate: bool) -> None:
    torch.manual_seed(m * k + n)
    a, weight = view(m, k, kind_a), view(n, k, kind_b)
    offset = {"none": None, "bias": torch.randn(n), "every second": torch.randn(2 * n)[::2]}[bias]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_matmul, "_onednn", torch.ops.mkldnn._linear_pointwise.default)
        patch.setattr(reference_matmul, "SMALL", 0)
        patch.setattr(reference_matmul, "_MIN_MULTIPLICATIONS", 0)
        patch.setattr(reference_matmul, "_BLOCK", 1 << 10)
        expected = F.linear(a.double(), weight.double(), None if offset is None else offset.double())
        size = k**0.5 + 1
        y = torch.full((m, n), float("nan"))
        reference_matmul.write_linear(y, a, weight, offset)
        for got in (
            reference_matmul.linear(a, weight, offset),
            reference_matmul.linear(a.unsqueeze(0), weight, offset)[0],
            y,
        ):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * size)
        begun = torch.randn(m, n) if accumulate else torch.full((m, n), float("nan"))
        out = begun.clone()
        reference_matmul.addmm_into(out, a, weight.t(), accumulate)
        expected = a.double() @ weight.double().t()
        torch.testing.assert_close(
            reference_matmul.matmul(a, weight.t()).double(), expected, rtol=1e-5, atol=1e-5 * size
        )
        expected = expected + begun.double() if accumulate else expected
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5 * size)


@needs_onednn
def test_a_layer_gives_onednn_its_three_products(calls: list[tuple[int, ...]]) -> None:
    layer, x = zbkern.nn.Linear(256, 192), torch.randn(2, 40, 256, requires_grad=True)
    queue = zbkern.WGradQueue()
    for repeat in (1, 2):  # the second adds to its gradient
        with queue.defer():
            layer(x).square().sum().backward()
        queue.run()
        assert calls == repeat * [(2, 40, 256), (2, 40, 192), (192, 80)]
    twin = nn.Linear(256, 192).double()
    twin.load_state_dict(layer.state_dict())
    wide = x.detach().double().requires_grad_()
    for _ in range(2):
        twin(wide).square().sum().backward()
    for ours, exact in ((layer.weight, twin.weight), (layer.bias, twin.bias), (x, wide)):
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-5, atol=1e-3)


@needs_onednn
def test_not_finite_stays_not_finite(calls: list[tuple[int, ...]]) -> None:
    x, weight = torch.randn(64, 256), torch.randn(256, 256)
    x[3, 4], x[5, 6] = float("nan"), float("inf")
    y = reference_matmul.linear(x, weight, None)
    assert calls
    assert torch.equal(y.isfinite(), F.linear(x, weight).isfinite())


class Marked(Tensor):
    pass


LARGE = torch.randn(256, 256)
TORCHS: dict[str, tuple[Tensor, Tensor]] = {
    "small": (torch.randn(16, 64), torch.randn(64, 64)),
    "one row": (torch.randn(1, 4096), torch.randn(4096, 1024)),
    "float64": (LARGE.double(), LARGE.double()),
    "bfloat16": (LARGE.bfloat16(), LARGE.bfloat16()),
    "a subclass": (LARGE.as_subclass(Marked), LARGE),
    "no rows": (torch.randn(0, 256), LARGE),
    "no sum": (torch.randn(256, 0), torch.randn(0, 256)),
    "torch has it off": (LARGE, LARGE),
    "a mode that watches": (LARGE, LARGE),
}


@pytest.mark.parametrize("why", TORCHS)
def test_products_that_stay_with_torch(why: str, calls: list[tuple[int, ...]]) -> None:
    a, b = TORCHS[why]
    counter = FlopCounterMode(display=False)
    around = counter if why == "a mode that watches" else contextlib.nullcontext()
    with torch.backends.mkldnn.flags(enabled=False) if why == "torch has it off" else around:
        assert torch.equal(reference_matmul.matmul(a, b), a.mm(b))
        assert torch.equal(reference_matmul.linear(a, b.t(), None), F.linear(a, b.t()))
    assert not calls
    if a is LARGE:
        assert counter.get_total_flops() == (4 * 2 * 256**3 if around is counter else 0)
        reference_matmul.matmul(a, b)
        assert calls


@pytest.mark.parametrize(
    ("maker", "capability", "mkl", "expected"),
    [
        ("vendor_id : AuthenticAMD", "AVX512", True, True),
        ("vendor_id : GenuineIntel", "AVX512", True, False),
        ("vendor_id : AuthenticAMD", "AVX2", True, False),
        ("vendor_id : AuthenticAMD", "AVX512", False, False),
    ],
)
def test_onednn_is_for_processors_on_which_mkl_is_slow(
    maker: str, capability: str, mkl: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_matmul, "_processor", lambda: maker)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert reference_matmul._mkl_is_slow() is expected


@pytest.mark.parametrize("version", [(2, 8), (2, 10)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_w_into_float32_with_every_torch_for_cuda(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], accumulate: bool
) -> None:
    """Products as torch for CUDA offers them: before 2.10 it adds only to a matrix of the operands' dtype."""

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        assert out_dtype == torch.float32
        assert a.dtype == b.dtype == torch.bfloat16
        product = (a.double() @ b.double()).float()
        return product if out is None else out.copy_(product)

    def addmm(start: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert start.dtype == a.dtype or (version >= (2, 10) and start.dtype == out_dtype)
        return out.copy_(start + mm(a, b, out_dtype=out_dtype))

    monkeypatch.setattr(reference_matmul, "_TORCH", version)
    monkeypatch.setattr(reference_matmul, "_BLOCK", 64)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    a, b, begun = torch.randn(40, 24).bfloat16(), torch.randn(24, 16).bfloat16(), torch.randn(40, 16)
    out = begun.clone()
    reference_matmul._addmm_into_float32(out, a, b, accumulate)
    torch.testing.assert_close(out, (a.double() @ b.double() + begun * accumulate).float())
