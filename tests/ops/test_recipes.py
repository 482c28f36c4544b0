"""Linear layers in blockwise-scaled FP8: what forward and B round, that W does not, and how modules are given it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import zbkern
from tests.support.launch_checks import dequantised
from zbkern import functional as Z
from zbkern import testing
from zbkern.kernels.reference import fp8
from zbkern.pipeline import Pipeline, schedules
from zbkern.pipeline.transport.local import LocalTransport


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_a_value_is_rounded_by_a_sixteenth_of_itself_at_most(rows: int, size: float) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(200, 300) * size
    tensor[:rows, :128] = 0
    values, scales = fp8.quantised(tensor, rows)
    assert values.dtype == torch.float8_e4m3fn
    assert values.shape == tensor.shape
    assert scales.shape == (200 if rows == 1 else 2, 3)
    assert float(values.float().abs().amax()) == 448
    difference = (dequantised(tensor, rows) - tensor).abs()
    each = scales.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)[:200, :300]
    assert bool((difference <= tensor.abs().double() / 16 + each * 2**-10).all())  # below 2^-6 steps are equal


def test_forward_and_b_multiply_rounded_numbers_and_w_the_numbers_themselves() -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2, 5, 130, requires_grad=True), torch.randn(2, 5, 140)
    layer = zbkern.nn.Linear(130, 140, recipe="fp8_blockwise")
    y = layer(x)
    rows, weight = x.detach().flatten(0, 1), layer.weight.detach()
    testing.assert_close(y.flatten(0, 1), dequantised(rows, 1) @ dequantised(weight, 128).T + layer.bias.double())
    queue = zbkern.WGradQueue()
    with queue.defer():
        y.backward(dy)
    above = dy.flatten(0, 1)
    testing.assert_close(x.grad.flatten(0, 1), dequantised(above, 1) @ dequantised(weight, 128))
    assert layer.weight.grad is None
    queue.run()
    testing.assert_close(layer.weight.grad, above.double().T @ rows.double())
    testing.assert_close(layer.bias.grad, above.double().sum(0))


@pytest.mark.parametrize("merge", [True, False])
def test_w_multiplies_rounded_numbers_where_the_recipe_says_so(merge: bool) -> None:
    torch.manual_seed(0)
    layer, queue = zbkern.nn.Linear(130, 140, recipe="fp8_blockwise_wgrad"), zbkern.WGradQueue(merge=merge)
    expected = torch.zeros(140, 130)
    for tokens in (200, 5):
        x, dy = torch.randn(tokens, 130, requires_grad=True), torch.randn(tokens, 140)
        with queue.defer():
            layer(x).backward(dy)
        testing.assert_close(x.grad, dequantised(dy, 1) @ dequantised(layer.weight.detach(), 128))
        segment = [(x.detach(), dy)]
        fp8.fp8_linear_wgrad(segment, (expected, None), accumulate=True)
        testing.assert_close(
            dequantised(dy.t(), 1) @ dequantised(x.detach().t(), 1).t(), wanted(segment), tolerance=1e-6
        )
    queue.run()
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("tokens", [128, 1000])
def test_the_error_of_w_is_the_documented_one(tokens: int) -> None:
    torch.manual_seed(0)
    x, dy, dweight = torch.randn(tokens, 130), torch.randn(tokens, 140), torch.empty(140, 130)
    fp8.fp8_linear_wgrad([(x, dy)], (dweight, None), accumulate=False)
    exact = dy.double().T @ x.double()
    assert float((dweight - exact).norm() / exact.norm()) == pytest.approx(0.036, abs=0.001)


def wanted(segment: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """W of a segment alone."""
    dweight = torch.empty(140, 130)
    fp8.fp8_linear_wgrad(segment, (dweight, None), accumulate=False)
    return dweight


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen_and_spares_the_numbers_beside_a_nan(value: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 300), torch.randn(200, 300)
    for number, place in enumerate((x, weight)):
        before = place[3, 200].item()
        expected = Z.linear(x, weight, recipe="fp8_blockwise")
        place[3, 200] = value
        y = Z.linear(x, weight, recipe="fp8_blockwise")
        place[3, 200] = before
        spoiled = torch.zeros_like(y, dtype=torch.bool)
        lost = slice(128) if number and value == float("inf") else slice(3, 4)  # a weight's blocks have 128 rows
        (spoiled[:, lost] if number else spoiled[lost])[:] = True
        assert torch.equal(~y.isfinite(), spoiled)
        if value != value:  # its block's scale is that of the others, whose largest it may have been
            testing.assert_close(y[~spoiled], expected[~spoiled], tolerance=0.02)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 4), (4, 0, 4), (4, 4, 0), (1, 1, 1)])
def test_empty_tensors(m: int, n: int, k: int) -> None:
    x, layer = torch.randn(m, k, requires_grad=True), zbkern.nn.Linear(k, n, recipe="fp8_blockwise")
    y = layer(x)
    y.backward(torch.ones_like(y))
    assert (y.shape, x.grad.shape, layer.weight.grad.shape) == ((m, n), (m, k), (n, k))
    if not k:
        assert torch.equal(y, layer.bias.expand(m, n))
    if not n:
        assert not x.grad.any()


def test_second_derivatives_are_those_without_rounding() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    found = []
    for recipe in ("fp8_blockwise", None):
        (dx,) = torch.autograd.grad(Z.linear(x, weight, recipe=recipe).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), weight)[0])
    testing.assert_close(*found)


def test_convert_gives_the_recipe_to_the_linears_that_the_filter_takes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    zbkern.convert(model)
    zbkern.convert(model, filter=lambda name, module: name != "2", recipe="fp8_blockwise")
    assert "recipe='fp8_blockwise'" in repr(model[0])
    assert "recipe" not in repr(model[1]) + repr(model[2])
    x = torch.randn(3, 4)
    rounded = Z.linear(x, model[0].weight, model[0].bias, recipe="fp8_blockwise")
    assert torch.equal(model(x), model[2](model[1](rounded)))
    zbkern.restore(model)
    assert "zbkern_recipe" not in vars(model[0])


def quantised_weights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each weight that is quantised."""
    found, real = [], fp8._rounded

    def counted(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        if rows == fp8.BLOCK:
            found.append(tensor._version)
        return real(tensor, rows)

    monkeypatch.setattr(fp8, "_rounded", counted)
    return found


def step_of(layer: nn.Linear, queue: zbkern.WGradQueue, x: torch.Tensor) -> list[torch.Tensor]:
    """Forward and B of two microbatches; their y and dx."""
    found = []
    for rows in x.chunk(2):
        rows = rows.detach().requires_grad_()
        with queue.defer():
            y = layer(rows)
            y.square().sum().backward()
        found += [y.detach(), rows.grad]
    return found


def write(layer: nn.Linear, how: str) -> None:
    weight = layer.weight
    if how == "in place":
        with torch.no_grad():
            weight.mul_(1.5)
    elif how == "another tensor":
        weight.data = torch.randn_like(weight)
    elif how == "another dtype":
        layer.bfloat16()
    elif how == "data":
        weight.data.mul_(1.5)
    else:
        torch.optim.AdamW([weight], lr=0.1, **{how: True}).step()


@pytest.mark.parametrize("how", ["in place", "another tensor", "another dtype", "foreach"])
def test_a_weight_is_quantised_once_until_it_is_written(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x, queue = zbkern.nn.Linear(130, 140, recipe="fp8_blockwise"), torch.randn(6, 130), zbkern.WGradQueue()
    times = quantised_weights(monkeypatch)
    expected = step_of(layer, queue, x)
    assert len(times) == 4
    queue.weight_copies = WeakIdKeyDictionary()
    assert all(map(torch.equal, step_of(layer, queue, x), expected))
    assert len(times) == 5
    queue.run()
    write(layer, how)
    x = x.to(layer.weight.dtype)
    found = step_of(layer, queue, x)
    assert len(times) == 6
    queue.weight_copies = None
    assert all(map(torch.equal, found, step_of(layer, queue, x)))


@pytest.mark.parametrize("how", ["data", "fused"])
def test_a_write_that_torch_does_not_count_is_an_error_where_values_are_compared(how: str) -> None:
    layer, x, queue = zbkern.nn.Linear(130, 140, recipe="fp8_blockwise"), torch.randn(6, 130), zbkern.WGradQueue()
    queue.weight_copies, queue.check_values = WeakIdKeyDictionary(), True
    step_of(layer, queue, x)
    step_of(layer, queue, x)
    queue.run()
    write(layer, how)
    with pytest.raises(RuntimeError, match=r"linear: its weight, \[140, 130\], was written within a step"):
        step_of(layer, queue, x)


def test_copies_are_of_one_step_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = zbkern.nn.Linear(130, 140, recipe="fp8_blockwise"), torch.randn(6, 130)
    pipe = Pipeline([layer], schedules.one_f_one_b(1, 3), lambda y, _: y.square().mean(), LocalTransport.ring(1)[0])
    times = quantised_weights(monkeypatch)
    for step in range(1, 4):
        loss = pipe.step(x, x)
        assert len(times) == step
        assert pipe.queue.weight_copies is None  # an optimizer's step comes before the next forward
        testing.assert_close(loss, Z.linear(x, layer.weight, layer.bias, recipe="fp8_blockwise").square().mean())
        times.pop()
        write(layer, "data")
    monkeypatch.setattr(type(pipe._calls.replicas), "frees_weights", True)  # as FSDP2 does
    pipe.step(x, x)
    assert len(times) == 6
