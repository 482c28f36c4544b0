"""Experts: what waits for W, what is one kernel, and that the host asks a device for nothing."""

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

GATES = (
    GateOptions(),
    GateOptions("gelu", interleaved=True),
    GateOptions(interleaved=True, limit=0.5, alpha=1.702, offset=1.0),
)


def random(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device)


def ends(*numbers: int, device: str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize("options", GATES)
@pytest.mark.parametrize("limits", [(2, 2, 7), (0, 0, 0), (0, 3, 5), (7, 7, 7)])
def test_without_knowing_the_counts(
    limits: tuple[int, ...], options: GateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the reference does on a device gives what it does on a CPU."""
    x, z, dh = random(7, 4), random(7, 12), random(7, 5)
    first, bias, second = random(3, 12, 4), random(3, 12), random(3, 5, 6)

    def results() -> list[Tensor]:
        e = ends(*limits)
        y, dx, h, dz = (torch.full_like(t, float("nan")) for t in (z, x, z[:, :6], z))
        reference.grouped_gated_fwd(x, first, bias, e, options, y, h)
        reference.grouped_linear_dgrad(z, first, e, dx)
        gradients = [torch.ones_like(first), torch.ones_like(bias)]
        reference.grouped_linear_wgrad([(x, z, e), (x, z, ends(1, 2, 3))], gradients, True)
        once_more = torch.full_like(h, float("nan"))
        reference.grouped_gated_dgrad(dh, second, e, y, options, dz, once_more)
        testing.assert_close(once_more, h)
        return [y, dx, h, dz, *gradients]

    expected = results()
    monkeypatch.setattr(reference_grouped, "readable", lambda ends: False)
    for got, wanted in zip(results(), expected, strict=True):
        testing.assert_close(got, wanted)


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


def test_second_derivatives_without_knowing_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [t.requires_grad_() for t in (random(3, 12, 4), random(3, 5, 6), random(3, 12), random(3, 5))]
    x = random(7, 4)

    def run(knows: bool) -> Tensor:
        monkeypatch.setattr(reference_grouped, "readable", lambda ends: knows)
        return grouped_functions.grouped_mlp_with_torch(*arguments, x, ends(0, 3, 5), GATES[2])

    expected, found = run(True), run(False)
    testing.assert_close(found, expected)
    for got, wanted in zip(
        torch.autograd.grad(found.square().sum(), arguments),
        torch.autograd.grad(expected.square().sum(), arguments),
        strict=True,
    ):
        testing.assert_close(got, wanted)


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


def test_under_autocast() -> None:
    """x in autocast's dtype, gradients in the weights' own."""
    module, queue = zbkern.nn.Experts(8, 16, 2, bias=True), zbkern.WGradQueue()
    with queue.defer(), torch.autocast("cpu", torch.bfloat16):
        y = module(torch.randn(6, 8), [4, 2])
    assert y.dtype == torch.bfloat16
    with queue.defer():
        y.float().sum().backward()
    queue.run()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


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
