"""Parameters, gradients and comparisons for the tests of zbkern.optim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zbkern import testing

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = ((5, 3), (7,), (2, 4, 3), ())
SETTINGS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def weights(dtype: torch.dtype = FP32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = FP32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def twins_of(parameters: list[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(parameter.detach().clone().to(dtype or parameter.dtype)) for parameter in parameters]


def give(parameters: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = None if grad is None else grad.clone().to(parameter.dtype)


def same(ours: list[Any], theirs: list[Any], exact: bool = True) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.detach(), b.detach()
        assert torch.equal(a, b) if exact else testing.assert_close(a, b, f"tensor {i}") is None, f"{i}: {a} {b}"


def two_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:2], "weight_decay": 0.2, "lr": 0.03},
        {"params": parameters[2:], "betas": (0.7, 0.9), "eps": 1e-4, "maximize": True},
    ]


def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> list[nn.Parameter]:
    for step in steps:
        give(parameters, gradients(step))
        optimizer.step()
    return parameters
