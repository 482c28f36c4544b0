from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("triton") is None or not (os.environ.get("CXX") or shutil.which("g++")):
    collect_ignore_glob = ["test_*.py"]  # tests/conftest.py says so


@pytest.fixture(autouse=True, scope="session")
def allocations_are_watched() -> None:
    """From before the first test: to the emulator, a tensor that is older is not there."""
    from tests.emulator import library

    library.load()


@pytest.fixture
def hopper() -> Iterator[None]:
    """Inside, tensors of the CPU lie on a GPU of 9.0 with four SMs, whose launches must have no fault."""
    from tests.emulator import library
    from tests.emulator.gpu import gpu

    library.findings()  # of others
    with gpu(90):
        yield
    assert not library.findings()
