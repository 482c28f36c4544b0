"""AdamW, norm and copies of the CUDA extension on a GPU, against torch's in float64 and bit for bit where they copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zbkern import testing
from zbkern.kernels import cuda, cuda_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=str(cuda.why_not()))]

SIZES = (1, 7, 4096, 16384, 16385, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensors(dtype: torch.dtype, seed: int, count: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(size, device="cuda").to(dtype) for _ in range(count) for size in SIZES]


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw(dtype: torch.dtype, grad_dtype: torch.dtype, masters: bool) -> None:
    params, grads = tensors(dtype, 0), tensors(grad_dtype, 1)
    wide = [param.double().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(wide, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    state = [[torch.zeros_like(p, dtype=torch.float32) for p in params] for _ in range(2)]
    copies = [param.float() for param in params] if masters else None
    control = cuda_optimizer.control("cuda")
    for step in (1, 2, 3):
        for twin, grad in zip(wide, grads, strict=True):
            twin.grad = grad.double() * 0.5
        optimizer.step()
        control.copy_(torch.tensor([0.01, step, 0.5, 0.0]))
        options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "masters": copies}
        cuda_optimizer.adamw(params, grads, *state, control, **options)
    for i, twin in enumerate(wide):
        testing.assert_close(params[i], twin.detach(), f"param {i}")
        testing.assert_close(state[0][i], optimizer.state[twin]["exp_avg"], f"exp_avg {i}")
        testing.assert_close(state[1][i], optimizer.state[twin]["exp_avg_sq"], f"exp_avg_sq {i}")
        if copies is not None:
            testing.assert_close(copies[i], twin.detach(), f"master {i}")


def test_undo_from_a_snapshot_is_exact_and_by_arithmetic_close() -> None:
    params, grads = tensors(torch.bfloat16, 0), tensors(torch.bfloat16, 1)
    state = [[torch.rand_like(p, dtype=torch.float32) for p in params] for _ in range(2)]
    masters = [param.float() for param in params]
    everything = [*params, *masters, *state[0], *state[1]]
    before = [tensor.clone() for tensor in everything]
    saved = [torch.empty_like(tensor) for tensor in everything]
    control = cuda_optimizer.control("cuda")
    control[0] = 0.01
    cuda_optimizer.copy_all(saved, everything)
    cuda_optimizer.adamw(params, grads, *state, control, masters=masters, weight_decay=0.1)
    cuda_optimizer.adamw(params, grads, *state, control, masters=masters, weight_decay=0.1, undo=True)
    for i, (tensor, was) in enumerate(zip(everything[len(params) :], before[len(params) :], strict=True)):
        testing.assert_close(tensor, was, f"tensor {i}")
    cuda_optimizer.adamw(params, grads, *state, control, masters=masters, weight_decay=0.1)
    cuda_optimizer.copy_all(everything, saved)
    assert all(torch.equal(a, b) for a, b in zip(everything, before, strict=True))


def test_a_step_in_a_graph_reads_its_numbers_on_the_device() -> None:
    params, grads = tensors(torch.float32, 0), tensors(torch.float32, 1)
    state = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    control = cuda_optimizer.control("cuda")
    control.copy_(torch.tensor([0.01, 1.0, 1.0, 1.0]))
    before = [param.clone() for param in params]
    cuda_optimizer.adamw(params, grads, *state, control)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_optimizer.adamw(params, grads, *state, control)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))  # skip was set
    control[3] = 0.0
    graph.replay()
    wide = [param.double().requires_grad_() for param in before]
    for twin, grad in zip(wide, grads, strict=True):
        twin.grad = grad.double()
    torch.optim.AdamW(wide, lr=0.01, weight_decay=0.0).step()
    for param, twin in zip(params, wide, strict=True):
        testing.assert_close(param, twin.detach(), "param")


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_more_tensors_than_a_launch_takes(dtype: torch.dtype) -> None:
    grads = tensors(dtype, 0, count=50)
    assert len(grads) > 256
    result = torch.full((2,), float("nan"), device="cuda")
    cuda_optimizer.squared_norm(grads, result)
    expected = torch.stack([grad.double().square().sum() for grad in grads]).sum()
    testing.assert_close(result[0], expected, "norm")
    again = torch.empty_like(result)
    workspace = torch.empty(cuda_optimizer.squared_norm_workspace(grads), device="cuda")
    cuda_optimizer.squared_norm(grads, again, workspace=workspace)
    assert torch.equal(result, again)
    assert result[1] == 0
    cuda_optimizer.squared_norm(grads[:3], again, accumulate=True, workspace=workspace)
    testing.assert_close(again[0], expected + sum(g.double().square().sum() for g in grads[:3]), "norm")


@pytest.mark.parametrize("where", [0, 16383, 16384, 100_002])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_found(where: int, value: float) -> None:
    grads = tensors(torch.float32, 0)
    grads[-1][where] = value
    result = torch.zeros(2, device="cuda")
    cuda_optimizer.squared_norm(grads, result)
    assert result[1] == 1
