"""What `torchrun --max-restarts 1` does, with two ranks forked from a process that has imported torch already."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch.multiprocessing as mp

from tests.support.ranks import PRELOAD

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def restarted(function: Callable[..., Any], *arguments: Any) -> dict[int, Any]:
    """What function(*arguments) returns on each rank, in the second attempt where the first one fails."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    mp.get_context("forkserver").set_forkserver_preload(PRELOAD)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        monitor_interval=0.1,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
    )
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with pytest.MonkeyPatch.context() as patch:
            # torch's agent keeps one store over restarts, where ranks then find the addresses of those that have ended
            patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
            return elastic_launch(config, function)(*arguments)
    finally:
        for number, handler in kept.items():  # the agent installs its own, and leaves them
            signal.signal(number, handler)
