"""What a Pipeline knows of an optimizer whose last step may still be validated while the next forwards run."""

from __future__ import annotations


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

    @property
    def steps_begun(self) -> int:
        """How many steps were called; where ranks differ, one has left one out."""
        return 0

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
