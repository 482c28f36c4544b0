"""A torch.optim.Optimizer around another, for code that requires one: learning-rate schedules, above all."""

from __future__ import annotations

from typing import Any

import torch

_REGISTER = tuple(
    f"register_{when}_hook"
    for what in ("step", "state_dict", "load_state_dict")
    for when in (f"{what}_pre", f"{what}_post")
)


class OptimizerWrapper(torch.optim.Optimizer):
    """Has the groups, defaults, state and hooks of `optimizer`; a subclass says what a step is.

    torch.optim.Optimizer.__init__ is left out: it would make groups and state of its own, and `load_state_dict` of the
    inner one replaces its lists, so they are looked up every time.
    """

    _step_supports_amp_scaling = True  # has GradScaler.step call `step` on every rank, also where it found infinity

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        for name in _REGISTER:
            setattr(self, name, getattr(optimizer, name))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the torch optimizer; learning-rate schedules may change them right after `step`."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Settings of groups that name none of their own."""
        return self.optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the torch optimizer, as its last update left it."""
        return self.optimizer.state

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: is tied to the other ranks and cannot be copied or pickled; keep its state_dict()"
        )
