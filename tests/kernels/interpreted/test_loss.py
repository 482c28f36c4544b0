"""The Triton cross-entropy with its head in the interpreter against the reference in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import launch_checks as checks
from tests.support.examples import examples
from zbkern import testing
from zbkern.kernels import reference
from zbkern.kernels.spec import CrossEntropyOptions
from zbkern.kernels.triton import loss as triton_loss

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter

NAN = float("nan")


def check(
    rows: list[int], vocabulary: int, features: int, options: CrossEntropyOptions,
    dtype: torch.dtype = torch.float32, bias: bool = True, accumulate: bool = False, weight_layout: str = "plain",
) -> None:  # fmt: skip
    """Forward of every segment, then one W over all of them. In half precision logits are rounded to it in between."""
    random = checks.Random(dtype, "cpu", scale=0.5)
    weight, b = random(vocabulary, features, layout=weight_layout), random(vocabulary) if bias else None
    wide_weight, wide_bias = weight.double(), None if b is None else b.double()
    tolerance = {torch.float32: 2e-5, torch.float16: 5e-3}[dtype]
    segments, wide = [], []
    for m in rows:
        x, target = random(m, features), torch.randint(vocabulary, (m,))
        target[::3] = options.ignore_index
        loss, lse = (torch.full((m,), NAN) for _ in range(2))
        dx = checks.output((m, features), dtype, "cpu")
        triton_loss.cross_entropy_fwd(x, weight, b, target, options, loss, lse, dx)
        exact = [torch.empty(m, dtype=torch.float64) for _ in range(2)] + [torch.empty(m, features).double()]
        reference.cross_entropy_fwd(x.double(), wide_weight, wide_bias, target, options, *exact)
        for name, got, expected in zip(("loss", "lse", "dx"), (loss, lse, dx), exact, strict=True):
            testing.assert_close(got, expected, name, tolerance, scale=0.1)
        only_loss, again = torch.full((m,), NAN), torch.full((m,), NAN)
        triton_loss.cross_entropy_fwd(x, weight, b, target, options, only_loss, again, None)
        assert torch.equal(only_loss, loss)
        ones = (x.double(), target, exact[1], torch.ones(m).double())
        summed = torch.empty(vocabulary, features).double(), torch.empty(vocabulary).double() if bias else None
        reference.cross_entropy_wgrad([ones], summed, False, wide_weight, wide_bias, options)
        at_once = [None if wanted is None else torch.full_like(wanted, NAN, dtype=torch.float32) for wanted in summed]
        triton_loss.cross_entropy_fwd(x, weight, b, target, options, only_loss, again, None, at_once)
        assert torch.equal(only_loss, loss)
        for name, got, expected in zip(("dweight at once", "dbias at once"), at_once, summed, strict=True):
            if got is not None and m:
                testing.assert_close(got, expected, name, tolerance, scale=0.1)
        dloss = torch.randn(m)
        segments.append((x, target, lse, dloss))
        wide.append((x.double(), target, exact[1], dloss.double()))
    start = 1.0 if accumulate else NAN
    dweight, dbias = torch.full((vocabulary, features), start), torch.full((vocabulary,), start) if bias else None
    triton_loss.cross_entropy_wgrad(segments, (dweight, dbias), accumulate, weight, b, options)
    outputs = torch.ones(vocabulary, features).double(), torch.ones(vocabulary).double() if bias else None
    reference.cross_entropy_wgrad(wide, outputs, accumulate, wide_weight, wide_bias, options)
    for name, got, expected in zip(("dweight", "dbias"), (dweight, dbias), outputs, strict=True):
        if got is not None:
            testing.assert_close(got, expected, name, tolerance, scale=0.1)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_loss, "_PIECE", 32)
    monkeypatch.setattr(triton_loss, "_BLOCK", 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 3}], ids=str)
def test_options(options: dict, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check([7, 5], 50, 24, CrossEntropyOptions(**options, chunk=4), dtype)


@examples(4, 12)
@given(
    st.sampled_from([torch.float32, torch.float16]),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.sampled_from([2, 31, 32, 33, 65]),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["plain", "transposed"]),
)
def test_any_shape(
    dtype: torch.dtype, rows: list[int], vocabulary: int, chunk: int, bias: bool, accumulate: bool, weight_layout: str
) -> None:
    torch.manual_seed(sum(rows))
    check(rows, vocabulary, 8, CrossEntropyOptions(chunk=chunk), dtype, bias, accumulate, weight_layout)


def test_w_writes_each_part_of_the_vocabulary_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    launch = triton_loss.linear_wgrad

    def record(segments: list, outputs: list, accumulate: bool) -> None:
        calls.append((len(segments), *outputs[0].shape))
        launch(segments, outputs, accumulate)

    monkeypatch.setattr(triton_loss, "linear_wgrad", record)
    check([8, 8], 64, 8, CrossEntropyOptions(chunk=8))
    at_once = [(1, 64, 8)] * 2  # a forward of each segment
    assert calls == [*at_once, (2, 32, 8), (2, 32, 8)]


def test_infinity_and_nan_stay_in_their_rows() -> None:
    """Logits of -inf, as masks leave them in a whole piece of the vocabulary, count nothing."""
    masked = torch.where(torch.arange(70) < 40, float("-inf"), 0.0)
    z = torch.stack([masked, torch.full((70,), NAN), torch.zeros(70), torch.full((70,), float("-inf"))])
    loss, lse, target = torch.full((4,), NAN), torch.full((4,), NAN), torch.tensor([50, 1, 1, 0])
    arguments = (z, target, loss, lse, 0, 0.0, 0.0, 70, 70, 1, 1, 1)
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
