"""Runs a module of Python with every launch through Triton's Python: `python -m bench.no_replay bench.gpu --rows W`.

As a plugin of pytest (`-p bench.no_replay`) it does so for tests, and tells processes that these start.
"""

from __future__ import annotations

import os
import runpy
import sys

from zbkern.kernels.triton.replay import replay

_paused = replay.paused()
_paused.__enter__()  # until the process ends
os.environ["PYTEST_ADDOPTS"] = "-p bench.no_replay"

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
