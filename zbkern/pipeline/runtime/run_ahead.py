"""Forwards of the next step that run while the last optimizer step is still to be validated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from zbkern.pipeline.runtime.forward_state import ForwardState


class StepValidator:
    """An optimizer that steps before its step is validated over all ranks, as a Pipeline knows it; here, one that has
    nothing to validate."""

    @property
    def pending(self) -> bool:
        """True until the last step is validated."""
        return False

    @property
    def has_stepped(self) -> bool:
        """True when the weights are those of the last step, as far as this rank can tell."""
        return True

    def validate(self) -> None:
        """Waits until the last step is validated; no-op where it is."""

    def try_validate(self) -> bool:
        """Validates if that is possible without waiting; True when no step is pending."""
        return True

    def take_rollbacks(self) -> int:
        """How many steps since the last call were clipped or skipped, the same number on all ranks."""
        return 0

    def recover(self) -> None:
        """Validates the last step after a failure, over a transport that works again; collective."""


class SpeculativeForwards:
    """The first forwards of a step, which run while the last step of its `validator` is still to be validated.

    modules: this rank's. in_step: forwards are collective over other pipelines, so all of them run the same number.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, in_step: bool) -> None:
        self.validator = StepValidator()
        self._modules = modules
        self._device = device
        self._in_step = in_step

    def run(self, limit: int, forward: Callable[[int], object]) -> tuple[int, ForwardState | None]:
        """Calls forward(0), forward(1), ... until the optimizer step is validated, at most `limit` times.

        Returns how many have run, and what to restore if they have to run again; None if none has. After the last that
        may run, this waits for the validation.
        """
        before, begun = None, 0
        while begun < limit and self.validator.has_stepped and not self._validated():
            before = before or ForwardState(self._modules, self._device)
            forward(begun)
            begun += 1
        self.validator.validate()
        return begun, before

    def _validated(self) -> bool:
        if self._in_step:  # the total arrives sooner on some pipelines, which would then run fewer forwards
            return not self.validator.pending
        return self.validator.try_validate()
