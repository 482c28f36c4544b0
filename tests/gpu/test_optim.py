"""zbkern.optim.AdamW on a GPU: the steps of torch's, none of which waits, and what a CUDA graph replays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.optim_cases import twins_of
from zbkern import testing
from zbkern.optim import AdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZES = (1, 7, 4096, 0, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors(dtype: torch.dtype, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(size, device="cuda").to(dtype) for size in SIZES]


def model(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in tensors(dtype, 5)]


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


@pytest.mark.parametrize("max_norm", [None, 50.0])
@pytest.mark.parametrize("main_grad", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_torchs(dtype: torch.dtype, main_grad: torch.dtype | None, max_norm: float | None) -> None:
    ours = model(dtype)
    theirs = twins_of(ours, torch.float32)
    for parameter in ours if main_grad is not None else ():
        parameter.main_grad = torch.zeros_like(parameter, dtype=main_grad)
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = AdamW(ours, master_weights=True, max_norm=max_norm, **options)
    other = torch.optim.AdamW(theirs, fused=True, **options)
    for step in range(6):
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
    assert all(map(torch.equal, ours, [weight.to(dtype) for weight in wide_weights(optimizer, ours)]))


def test_a_captured_step_reads_lr_and_gradients_and_counts() -> None:
    """Also clips, and skips what is not finite, as each replay finds it."""
    ours, lr = model(torch.bfloat16), torch.tensor(0.01, device="cuda")
    theirs = twins_of(ours, torch.float32)
    optimizer = AdamW(ours, lr=lr, master_weights=True, max_norm=50.0)
    other = torch.optim.AdamW(theirs, lr=0.01, fused=True)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, other)]
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
        for scheduler in schedulers:
            scheduler.step()
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


def test_a_step_waits_for_nothing() -> None:
    ours = model(torch.bfloat16)
    optimizer = AdamW(ours, lr=torch.tensor(0.01, device="cuda"), master_weights=True, max_norm=1.0)
    for step in range(3):
        give(ours, step)
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
            assert optimizer.last_norm is not None
        finally:
            torch.cuda.set_sync_debug_mode("default")
