"""Checks of what happens when time is up, on a machine that may be busy meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest


def patiently(check: Callable[[float], None]) -> None:
    """Calls check(scale), which multiplies all its seconds by it: by 1, and where it fails by 4 and 16.

    On a busy machine a rank that is well is late, too, and others name it. What is wrong fails at every scale. A
    warning tells that the first did not do.
    """
    for scale in (1.0, 4.0):
        try:
            return check(scale)
        except (Exception, pytest.fail.Exception) as error:
            warnings.warn(f"is tried again with {4 * scale:g} times as long, for: {error}", stacklevel=2)
    return check(16.0)
