from __future__ import annotations

import pytest

from tests.support import needs_gpu


@pytest.fixture(autouse=True, scope="session")
def kernels_have_the_names_that_others_compiled_them_under() -> None:
    """Of a session's --prepare, or of another process: else each would be compiled again."""
    if needs_gpu.why_not() is None:
        from bench import ahead

        ahead.name_kernels()
