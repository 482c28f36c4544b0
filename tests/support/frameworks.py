"""Frameworks from PyPI for tests, each in a folder of its own, beside the torch that is here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


def installed(factory: pytest.TempPathFactory, module: str, *requirements: str) -> str:
    """The folder to append to sys.path: "" where the module is here already. Skips where it cannot be had."""
    if importlib.util.find_spec(module) is not None:
        return ""
    folder = str(factory.mktemp(module))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--target", folder, *requirements], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{requirements[0]} could not be installed: {done.stderr[-200:]}")
    return folder
