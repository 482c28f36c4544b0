"""How many examples a property is tried on: some in every run, all in `make test-all`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(some: int, all_of_them: int, **more: Any) -> settings:
    """Settings of a property whose examples take long. The profile `thorough` tries all of them."""
    thorough = settings.get_current_profile_name() == "thorough"
    return settings(max_examples=all_of_them if thorough else some, deadline=None, **more)
