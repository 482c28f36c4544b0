"""AdamW of the CUDA extension on a GPU: its launches against the reference, and zbkern.optim against torch.optim."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbkern import testing
from zbkern.kernels import dispatch, reference
from zbkern.kernels.cuda import adamw as cuda_adamw
from zbkern.kernels.cuda import wgrad as cuda_wgrad
from zbkern.kernels.spec import AdamWOptions
from zbkern.optim import AdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda_wgrad.why_not() is not None, reason=str(cuda_wgrad.why_not()))]

SIZES = (1, 7, 4096, 16384, 16385, 0, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FINITE, CLIPPED, SKIPPED, INFINITE = (4.0, 0.0, 8.0), (400.0, 0.0, 2.0), (4.0, 1.0, 1.0), (math.inf, 0.0, 1.0)


def tensors(dtype: torch.dtype, seed: int, count: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(size, device="cuda").to(dtype) for _ in range(count) for size in SIZES]


def lists(dtype: torch.dtype, grad_dtype: torch.dtype, masters: bool, count: int = 1) -> list[list[Tensor] | None]:
    """What the launch takes, as it is after three steps."""
    params, grads = tensors(dtype, 0, count), tensors(grad_dtype, 1, count)
    averages = [[torch.rand_like(param, dtype=torch.float32) for param in params] for _ in range(2)]
    steps = [torch.tensor(3.0, device="cuda") for _ in params]
    return [params, grads, *averages, steps, [param.float() for param in params] if masters else None]


def twins(of: list[list[Tensor] | None], dtype: torch.dtype | None = None) -> list[list[Tensor] | None]:
    """Copies; in another dtype but for the steps."""
    return [
        tensors
        and [tensor.clone() if index == 4 else tensor.to(dtype or tensor.dtype, copy=True) for tensor in tensors]
        for index, tensors in enumerate(of)
    ]


def close(ours: list[list[Tensor] | None], theirs: list[list[Tensor] | None], what: str) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for i, (got, want) in enumerate(zip(a or (), b or (), strict=True)):
            if got.numel():
                testing.assert_close(got, want, f"{what}: list {index}, tensor {i}")


@pytest.mark.parametrize("numbers", [None, FINITE, CLIPPED])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_and_its_inverse(
    dtype: torch.dtype, grad_dtype: torch.dtype, masters: bool, numbers: tuple[float, ...] | None
) -> None:
    options = AdamWOptions(0.01, (0.8, 0.95), 1e-6, 0.1, maximize=masters, max_norm=1.0)
    ours = lists(dtype, grad_dtype, masters)
    before, wide = twins(ours), twins(ours, torch.float64)
    control = None if numbers is None else torch.tensor(numbers, device="cuda")
    cuda_adamw.adamw(*ours, options, control)
    reference.adamw(*wide, options, control)
    close(ours, wide, "step")
    assert all(step == 4 for step in ours[4])
    if masters or dtype == torch.float32:
        cuda_adamw.adamw(*ours, options, control, undo=True)
        close(ours[2:], before[2:], "undone")
        assert all(step == 3 for step in ours[4])


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("numbers", [SKIPPED, INFINITE])
def test_what_is_skipped_stays(numbers: tuple[float, ...], undo: bool) -> None:
    ours = lists(torch.bfloat16, torch.float32, True)
    before, control = twins(ours), torch.tensor(numbers, device="cuda")
    cuda_adamw.adamw(*ours, AdamWOptions(0.01), control, undo=undo)
    assert all(torch.equal(a, b) for x, y in zip(ours, before, strict=True) for a, b in zip(x, y, strict=True))


def test_more_tensors_than_a_launch_takes_and_more_steps() -> None:
    ours, memory, options = lists(torch.float32, torch.bfloat16, False, count=50), {}, AdamWOptions(0.01)
    assert len(ours[0]) > 256
    wide = twins(ours, torch.float64)
    for step in range(3):
        ours[1] = tensors(torch.bfloat16, 10 + step, count=50)  # elsewhere, as a rule
        wide[1] = [grad.double() for grad in ours[1]]
        cuda_adamw.adamw(*ours, options, memory=memory)
        reference.adamw(*wide, options)
    close(ours, wide, "steps")


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_more_tensors_than_a_launch_takes(dtype: torch.dtype) -> None:
    grads = tensors(dtype, 0, count=50)
    control = torch.full((3,), float("nan"), device="cuda")
    cuda_adamw.squared_norm(grads, control)
    expected = torch.stack([grad.double().square().sum() for grad in grads]).sum()
    testing.assert_close(control[0], expected, "norm")
    assert control[1] == 0
    again, memory = torch.empty_like(control), {}
    for _ in range(2):
        cuda_adamw.squared_norm(grads, again, memory=memory)
    assert torch.equal(control[:2], again[:2])
    cuda_adamw.squared_norm(grads[:3], again, accumulate=True, memory=memory)
    testing.assert_close(again[0], expected + sum(g.double().square().sum() for g in grads[:3]), "norm")


@pytest.mark.parametrize("where", [0, 16383, 16384, 100_002])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_found(where: int, value: float) -> None:
    grads = tensors(torch.float32, 0)
    grads[-1][where] = value
    control = torch.zeros(3, device="cuda")
    cuda_adamw.squared_norm(grads, control)
    assert control[1] == 1


# ---- zbkern.optim.AdamW


def model(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in tensors(dtype, 5)]


def copies(parameters: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(parameter.detach().to(dtype, copy=True)) for parameter in parameters]


def give(parameters: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Into main_grad where there is one, else into .grad; in place where it is there."""
    for parameter, gradient in zip(parameters, tensors(torch.bfloat16, 100 + step), strict=True):
        into = getattr(parameter, "main_grad", None)
        if into is None:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            into = parameter.grad
        into.copy_(gradient * scale)


def same(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    for i, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        if got.numel():
            testing.assert_close(got.detach(), want.detach(), f"{what}: {i}")


def wide_weights(optimizer: AdamW, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [optimizer.state[parameter].get("master", parameter) for parameter in parameters]


@pytest.mark.parametrize("impl", ["auto", "cuda", "torch"])
@pytest.mark.parametrize("max_norm", [None, 50.0])
@pytest.mark.parametrize("main_grad", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_torchs(dtype: torch.dtype, main_grad: torch.dtype | None, max_norm: float | None, impl: str) -> None:
    assert dispatch.resolve("adamw", "auto", torch.device("cuda", 0), dtype) is cuda_adamw
    ours = model(dtype)
    theirs = copies(ours, torch.float32)
    for parameter in ours if main_grad is not None else ():
        parameter.main_grad = torch.zeros_like(parameter, dtype=main_grad)
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = AdamW(ours, master_weights=True, max_norm=max_norm, impl=impl, **options)
    other = torch.optim.AdamW(theirs, fused=True, **options)
    for step in range(10):
        give(ours, step, 1.0 if step % 3 else 0.1)
        give(theirs, step, 1.0 if step % 3 else 0.1)
        if step == 4 and max_norm is not None:
            give(ours, step, math.inf)
            optimizer.step()
            continue
        if max_norm is not None:
            nn.utils.clip_grad_norm_(theirs, max_norm)
        optimizer.step()
        other.step()
    same(wide_weights(optimizer, ours), theirs, "weights")
    assert all(
        torch.equal(parameter, optimizer.state[parameter].get("master", parameter).to(dtype)) for parameter in ours
    )
    kept = copy.deepcopy(optimizer.state_dict())
    optimizer.undo_step()
    optimizer.step()
    for index, state in optimizer.state_dict()["state"].items():
        same(list(state.values()), list(kept["state"][index].values()), f"undone and done again: {index}")


@pytest.mark.parametrize("impl", ["cuda", "torch"])
def test_a_captured_step_reads_lr_and_gradients_and_counts(impl: str) -> None:
    """Also clips, and skips what is not finite, as each replay finds it."""
    ours, lr = model(torch.bfloat16), torch.tensor(0.01, device="cuda")
    theirs = copies(ours, torch.float32)
    optimizer = AdamW(ours, lr=lr, master_weights=True, max_norm=50.0, impl=impl)
    other = torch.optim.AdamW(theirs, lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    their_scheduler = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def theirs_steps(step: int, scale: float) -> None:
        give(theirs, step, scale)
        nn.utils.clip_grad_norm_(theirs, 50.0)
        other.step()

    give(ours, 0)
    theirs_steps(0, 1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        optimizer.step()  # makes the state
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    for step, scale in ((1, 1.0), (2, 0.01), (3, math.nan), (4, 1.0)):
        give(ours, step, scale)
        graph.replay()
        if math.isfinite(scale):
            theirs_steps(step, scale)
        scheduler.step()
        their_scheduler.step()
        assert bool(optimizer.last_norm.isfinite()) is math.isfinite(scale)
    same(wide_weights(optimizer, ours), theirs, "weights")
    assert {state["step"].item() for state in optimizer.state.values()} == {4.0}
    assert optimizer.param_groups[0]["lr"] is lr


def test_the_state_must_be_there_before_a_capture() -> None:
    ours = model(torch.float32)
    give(ours, 0)
    optimizer, graph = AdamW(ours), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="step once before the capture"), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.parametrize("impl", ["cuda", "torch"])
def test_a_step_waits_for_nothing(impl: str) -> None:
    ours = model(torch.bfloat16)
    optimizer = AdamW(ours, lr=torch.tensor(0.01, device="cuda"), master_weights=True, max_norm=1.0, impl=impl)
    for step in range(3):
        give(ours, step)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
            assert optimizer.last_norm is not None
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_grad_scaler_with_fp16_gradients() -> None:
    ours = model(torch.float16)
    theirs = copies(ours, torch.float32)
    optimizer, other = AdamW(ours, master_weights=True), torch.optim.AdamW(theirs)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    for step in range(4):
        give(ours, step, math.inf if step == 2 else scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            give(theirs, step)
            other.step()
    assert scaler.get_scale() == 4.0
    same(wide_weights(optimizer, ours), theirs, "weights")
