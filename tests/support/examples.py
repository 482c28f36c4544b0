"""How many examples a property is tried on: some in every run, all in `make test-all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings


def examples(some: int, all_of_them: int, **more: Any) -> Callable[[Any], Any]:
    """Settings of a property whose examples take long, and the mark `more_examples`. The profile `thorough` tries all
    of them.
    """
    thorough = settings.get_current_profile_name() == "thorough"
    found = settings(max_examples=all_of_them if thorough else some, deadline=None, **more)
    return lambda function: pytest.mark.more_examples(found(function))
