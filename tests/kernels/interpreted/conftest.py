from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # tests/conftest.py says so


@pytest.fixture(autouse=True)
def quick_interpreter() -> None:
    from tests.support.interpreter import quicken

    quicken()
