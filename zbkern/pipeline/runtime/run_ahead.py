"""Forwards of the next step that run while the last optimizer step is still to be validated."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class StepValidator(Protocol):
    """An optimizer that steps before its step is validated over all ranks, as a Pipeline knows it."""

    @property
    def pending(self) -> bool:
        """True until the last step is validated."""

    @property
    def has_stepped(self) -> bool:
        """True when the weights are those of the last step, as far as this rank can tell."""

    def validate(self) -> None:
        """Waits until the last step is validated; no-op where it is."""

    def try_validate(self) -> bool:
        """Validates if that is possible without waiting; True when no step is pending."""

    def take_rollbacks(self) -> int:
        """How many steps since the last call were clipped or skipped, the same number on all ranks."""

    def recover(self) -> None:
        """Validates the last step after a failure, over a transport that works again; collective."""
