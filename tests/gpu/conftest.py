from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.support import needs
from zbkern.kernels import dispatch


@pytest.fixture(autouse=True, scope="session")
def kernels_have_the_names_that_others_compiled_them_under() -> None:
    """Of bench.gpu_prepare, or of another process: else each would be compiled again."""
    if needs.why_no_gpu() is None:
        from build_tools.kernels.jobs import name_kernels

        name_kernels()


@pytest.fixture(scope="session")
def launches() -> ModuleType:
    """Triton's."""
    return dispatch.resolve("linear", "triton", "cuda", torch.bfloat16)


@pytest.fixture(autouse=True)
def a_process_that_has_lost_the_gpu_ends() -> Iterator[None]:
    """After an illegal access no call of it reaches the GPU any more: pytest-xdist starts another for the tests that
    follow, and names the test that ran."""
    yield
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit("this process has lost the GPU")
