"""FP8 with the extension's product, which a stand-in computes on the CPU: what it is given, what is left to Triton."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support import launch_checks
from tests.support.host_extension import HostExtension
from zbkern.kernels import dispatch
from zbkern.kernels.cuda import fp8 as cuda_fp8
from zbkern.kernels.cuda import wgrad as cuda_wgrad

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> HostExtension:
    host = HostExtension()
    monkeypatch.setattr(cuda_wgrad, "_cuda", host)
    monkeypatch.setattr(cuda_wgrad, "raw_stream", lambda device: 0)
    monkeypatch.setattr(cuda_wgrad, "_processors", lambda device: 132)
    return host


@pytest.fixture
def launches() -> ModuleType:
    return dispatch._backend("cuda")


# where rows of y or dx are no multiples of 16 bytes, or tokens none of 4, Triton multiplies
@pytest.mark.parametrize(
    ("m", "n", "k", "taken"),
    [
        *((m, n, k, [(m, n, k), (m, k, n)]) for m, n, k in ((4, 8, 16), (132, 136, 264), (260, 128, 384))),
        *((5, 8, 16, []), (8, 7, 16, [(8, 16, 7)]), (8, 8, 3, [(8, 8, 3)]), (0, 8, 8, [])),
    ],
)
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_forward_and_b(
    launches: ModuleType, extension: HostExtension, m: int, n: int, k: int, taken: list[tuple], dtype: torch.dtype
) -> None:
    launch_checks.fp8_linear(launches, launch_checks.Random(dtype, "cpu"), m, n, k)
    assert extension.products == taken


@pytest.mark.parametrize(("layout", "taken"), [("padded", 2), ("odd", 0), ("transposed", 0), ("step", 0)])
def test_rows_of_what_is_written(launches: ModuleType, extension: HostExtension, layout: str, taken: int) -> None:
    random = launch_checks.Random(FP16, "cpu")
    launch_checks.fp8_linear(launches, random, 8, 136, 264, ("odd", "transposed", layout))
    assert len(extension.products) == taken


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out", [FP32, FP16])
@pytest.mark.parametrize(
    ("rows", "n", "k", "taken"),
    [((130, 0, 300), 130, 136, 2), ((5,), 7, 16, 1), ((16,), 128, 128, 1), ((4,), 8, 3, 0), ((4,), 8, 1, 0)],
)
def test_w(
    launches: ModuleType, extension: HostExtension, rows: tuple[int, ...], n: int, k: int, taken: int,
    out: torch.dtype, accumulate: bool,
) -> None:  # fmt: skip
    random = launch_checks.Random(FP16, "cpu")
    launch_checks.fp8_linear_wgrad(launches, random, rows, n, k, ("odd", "transposed", "plain"), out, accumulate)
    assert extension.products == [(n, k, tokens) for tokens in rows if tokens][:taken] * 2  # merged, and each alone


def quantised(p: int, q: int, whole: bool) -> tuple:
    scales = torch.ones(2, -(-q // 128) if whole else q)
    a, b = (torch.ones(rows, 256).to(torch.float8_e4m3fn) for rows in (p, q))
    return (a, torch.ones(2, p)), (b, scales)


@pytest.mark.parametrize(
    ("whole", "out", "bias", "add", "taken"),
    [
        *((True, BF16, BF16, False, True), (True, FP16, None, False, True), (False, FP32, None, True, True)),
        *((True, FP32, None, False, False), (True, BF16, FP32, False, False), (True, BF16, None, True, False)),
        *((False, torch.float64, None, True, False), (False, FP32, FP32, False, False)),
    ],
)
def test_dtypes(whole: bool, out: torch.dtype, bias: torch.dtype | None, add: bool, taken: bool) -> None:
    target = torch.full((8, 16), 64.0 * add, dtype=out)
    every_second = None if bias is None else torch.full((16, 2), 64.0, dtype=bias)[:, 0]
    assert cuda_fp8.product(*quantised(8, 16, whole), every_second, target, add) == taken
    assert (target == (256 * taken + 64 * (add or (taken and bias is not None)))).all()


def test_a_single_column_is_left_to_triton() -> None:
    assert not cuda_fp8.product(*quantised(8, 1, False), None, torch.zeros(8, 4)[:, :1], True)


def test_an_output_whose_rows_overlap_is_left_to_triton() -> None:
    assert not cuda_fp8.product(*quantised(8, 16, False), None, torch.zeros(64).as_strided((8, 16), (4, 1)), True)


def test_where_it_runs(extension: HostExtension, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple] = []
    monkeypatch.setattr(cuda_wgrad, "_cuda", SimpleNamespace(fp8_product=lambda *arguments: given.append(arguments)))
    monkeypatch.setattr(cuda_wgrad, "raw_stream", lambda device: 77)
    a, b = quantised(8, 16, True)
    cuda_fp8.product(a, b, None, torch.zeros(8, 16, dtype=BF16), False)
    assert given[0][-3:] == (132, -1, 77)
