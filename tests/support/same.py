"""What tests compare trees of tensors and modules by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def assert_same(*found: Any) -> None:
    """All are the same trees of tensors and numbers, to the bit."""
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def assert_gradients(ours: Iterable[nn.Module], theirs: Iterable[nn.Module]) -> None:
    """Their parameters have the same gradients but for the rounding of float64."""
    for index, pair in enumerate(zip(ours, theirs, strict=True)):
        for (name, a), b in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12, msg=f"{index}.{name}")
