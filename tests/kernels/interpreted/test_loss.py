"""The Triton cross-entropy with its head in the interpreter against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import launch_checks as checks
from tests.support import row_checks
from tests.support.examples import examples
from zbkern.kernels.spec import CrossEntropyOptions
from zbkern.kernels.triton import loss as triton_loss

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
