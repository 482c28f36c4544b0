"""Kernels compiled for a GPU that is not here and launched over a driver that does nothing (bench/fake_driver.py).

A process either interprets kernels or compiles them: tests/kernels/test_compiled.py runs these in one of their own.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "0":
    collect_ignore_glob = ["test_*.py"]
