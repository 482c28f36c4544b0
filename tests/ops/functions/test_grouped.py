"""Experts: what waits for W, that the host asks a device for nothing, and what is not finite stays in its group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zbkern
from zbkern import functional as Z
from zbkern import testing
from zbkern.kernels import reference
from zbkern.kernels.reference import grouped as reference_grouped
from zbkern.kernels.spec import GateOptions
from zbkern.ops.functions import grouped as grouped_functions


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("counts", ["counts", "offsets"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_host_asks_a_device_for_nothing(counts: str, transposed: bool) -> None:
    """On a meta device there is nothing to be asked for: F, B and W all run."""
    module = zbkern.nn.Experts(4, 6, 3, GateOptions(interleaved=True, limit=7.0), True, transposed, device="meta")
    weight = torch.nn.Parameter(torch.empty(3, 4, 4, device="meta"))
    queue, rows = zbkern.WGradQueue(), {counts: torch.empty(3, dtype=torch.int64, device="meta")}
    with queue.defer():
        x = torch.empty(7, 4, device="meta", requires_grad=True)
        zbkern.functional.grouped_linear(module(x, **rows), weight, **rows).sum().backward()
    queue.run()
    assert x.grad is not None
    for parameter in (*module.parameters(), weight):
        assert parameter.grad is not None


@pytest.mark.parametrize("biased", [False, True])
def test_torchs_own_product_of_groups_where_it_takes_the_shapes(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16, whose counts a compiler does not know: rows of no group are zeros in both directions there, too."""
    monkeypatch.setattr(reference_grouped, "readable", lambda ends: False)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        torch.manual_seed(0)
        x, weight, bias = (torch.randn(*s).bfloat16() for s in ((7, 16), (3, 24, 16), (3, 24)))
        tensors = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
        y = grouped_functions.grouped_linear_with_torch(
            tensors[1], tensors[2] if biased else None, tensors[0], ends(0, 3, 5)
        )
        y.backward(torch.ones_like(y))
        assert not y[5:].any()
        assert not tensors[0].grad[5:].any()
        launched = torch.full_like(y, float("nan"))
        with torch.no_grad():
            vectors = tensors[2] if biased else None
            reference.grouped_linear_fwd(tensors[0], tensors[1], vectors, ends(0, 3, 5), launched)
        found.append([y, launched, *(t.grad for t in tensors[: 2 + biased])])
    for got, expected in zip(*found, strict=True):
        testing.assert_close(got, expected)


def test_what_waits_is_inputs_and_output_gradients() -> None:
    m, dim, hidden, groups = 20, 8, 16, 4
    module, queue = zbkern.nn.Experts(dim, hidden, groups), zbkern.WGradQueue()
    with queue.defer():
        y = module(torch.randn(m, dim), [5, 0, 12, 3])
        y.backward(torch.randn(m, dim))
    assert queue.bytes == 4 * m * (dim + 2 * hidden + hidden + dim) + 4 * groups  # x, dz, h, dy, and the ends
    queue.discard()


@pytest.mark.parametrize("knows", [True, False])
def test_rows_of_no_group_and_of_others_leave_no_trace(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not finite in one group, or in rows of none, stays there."""
    monkeypatch.setattr(reference_grouped, "readable", lambda ends: knows)
    x, weight = random(8, 4), torch.nn.Parameter(random(3, 5, 4))
    x[2:4], x[6:] = float("inf"), float("nan")
    x.requires_grad_()
    y = Z.grouped_linear(x, weight, offsets=ends(2, 4, 6))
    assert y[[0, 1, 4, 5]].isfinite().all()
    assert not y[2:4].isfinite().all()
    assert torch.equal(y[6:], torch.zeros(2, 5).double())
    y.backward(torch.ones_like(y).index_fill(0, torch.tensor([6, 7]), float("nan")))
    assert x.grad is not None
    assert torch.equal(x.grad[6:], torch.zeros(2, 4).double())
    assert weight.grad is not None
    assert weight.grad[[0, 2]].isfinite().all()
    assert not weight.grad[1].isfinite().all()
