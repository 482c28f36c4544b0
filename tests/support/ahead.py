"""What tests of forwards that run ahead train: blocks whose buffers every forward changes; the same in one process."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.support.optimizer_cases import clip_in_float64

WIDTH, MICROBATCHES, MAX_NORM = 6, 6, 20.0


class Block(nn.Module):
    """Counts its training forwards; its buffers change with every one of them, in place and by being replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.forwards = [0]  # a number alone would be put back with the buffers

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards[0] += 1
            self.seen.mul_(0.9).add_(x.detach().mean(dim=(0, 1)), alpha=0.1)
            self.last = self.last * 0.9 + x.detach().mean(dim=(0, 1))
        return x + torch.tanh(self.linear(x)) + 0.01 * self.seen


def make_model(chunks: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(chunks)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, MICROBATCHES, 3, WIDTH, generator=generator).unbind()


def make_optimizer(modules: list[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.ModuleList(modules).parameters(), lr=0.02)


def force(module: nn.Module, value: float | None) -> None:
    """Replaces one element of a gradient, as if the backward had produced it."""
    if value is not None:
        module.linear.weight.grad[1, 1] = value


def plain_loop(chunks: int, steps: int, forced: dict[tuple[int, int], float]) -> tuple[list[nn.Module], list[float]]:
    """One process, plain torch: the model after all steps, and the losses."""
    model, losses = make_model(chunks), []
    optimizer = make_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for x, y in zip(*(part.split(1) for part in batch(step)), strict=True):
            loss = nn.functional.mse_loss(nn.Sequential(*model)(x), y) / MICROBATCHES
            loss.backward()
            losses[-1] += loss.item()
        for chunk, module in enumerate(model):
            force(module, forced.get((chunk, step)))
        if math.isfinite(clip_in_float64(list(nn.Sequential(*model).parameters()), MAX_NORM)):
            optimizer.step()
    return model, losses
