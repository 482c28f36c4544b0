"""What a checkpoint needs of a pipeline and of an optimizer that spans its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class PipelineLike(Protocol):
    """A Pipeline, as a checkpoint knows it."""

    timeout: float
    tied: dict[str, Tensor]
    completed: int  # calls of step and evaluate since all ranks were at the same step

    @property
    def modules(self) -> dict[int, nn.Module]:
        """This rank's modules by the number of their chunk."""

    @property
    def optimizer(self) -> object | None:
        """The Optimizer that is attached, None where there is none."""


@runtime_checkable
class OptimizerLike(Protocol):
    """An Optimizer, as a checkpoint knows it: around a torch optimizer, with steps that are to be validated."""

    optimizer: torch.optim.Optimizer
    masters: list[tuple[Tensor, Tensor]]  # (parameter, its fp32 copy)

    def validate(self) -> None:
        """Waits until the last step is validated: weights may be read."""

    def abandon(self) -> None:
        """Forgets a pending step, because everything is about to be loaded."""

    def common_state(self) -> dict[str, Any]:
        """The part of the state that is the same on all ranks."""

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `common_state` gave; what is missing stays as it is."""


Modules = PipelineLike | Mapping[int, nn.Module] | nn.Module
AnyOptimizer = OptimizerLike | torch.optim.Optimizer
