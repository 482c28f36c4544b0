"""What communicators of NCCL are given, as docs/gpus.md says; there is none on a CPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from zbkern.pipeline.transport import process_groups

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Recorded:
    """ProcessGroupNCCL, as far as it is made."""

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.options, self.handling = rank, size, options, os.environ[HANDLING]

    @staticmethod
    def Options() -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(max_ctas=32))


@pytest.mark.parametrize("before", [None, "3"])
def test_messages_take_few_multiprocessors_and_end_no_process(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(HANDLING, before)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Recorded, raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(process_groups, "place_in_store", lambda *_: None)
    made = process_groups.new_communicator([3, 5], "nccl")
    assert (made.rank, made.size) == (1, 2)
    assert made.options.config.max_ctas == 4
    assert made.options._timeout == process_groups.FOREVER
    assert made.handling == "0"
    assert os.environ.get(HANDLING) == before
