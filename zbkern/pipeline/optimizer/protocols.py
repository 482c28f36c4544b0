"""What an Optimizer needs of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.transport.base import Transport

if TYPE_CHECKING:
    from zbkern.pipeline.optimizer.post_validation import Optimizer


@runtime_checkable
class PipelineLike(Protocol):
    """A Pipeline, as its Optimizer knows it."""

    schedule: Schedule
    timeout: float
    tied: dict[str, Tensor]

    @property
    def transport(self) -> Transport:
        """The connection to the other ranks, over which norms travel, too."""

    @property
    def optimizer(self) -> object | None:
        """What is attached, None before."""

    def attach(self, validator: Optimizer) -> None:
        """From now on steps wait for the optimizer's to be validated. Raises ValueError where one is attached."""

    def abandon(self) -> None:
        """Drops what was begun, after a failure."""
