"""What communicators of NCCL are given, as docs/gpus.md says; there is none on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from zbkern.pipeline.transport import nccl, process_groups
from zbkern.pipeline.transport.nccl import check_backend, check_hardware_queues

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
    made = nccl.new_nccl([3, 5])
    assert (made.rank, made.size) == (1, 2)
    assert made.options.config.max_ctas == 4
    assert made.options._timeout == process_groups.FOREVER
    assert made.handling == "0"
    assert os.environ.get(HANDLING) == before


@pytest.mark.parametrize(
    ("config", "has"),
    [("cpu:gloo", "no backend"), ("cpu:gloo,cuda:gloo", "gloo"), ("cpu:gloo,cuda:ucc", "ucc"), ("cuda:nccl", "")],
)
def test_a_group_without_nccl_for_gpus_is_refused(config: str, has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    if not has:
        check_backend(None)
        return
    with pytest.raises(ValueError, match=rf"the process group has {has} for them \({config}\); call torch"):
        check_backend(None)


@pytest.mark.parametrize("mps", ["", "variable", "folder"])
@pytest.mark.parametrize("given", ["", "1", "7", "8", "32", "many"])
def test_few_hardware_queues_are_refused(given: str, mps: str, tmp_path: Path) -> None:
    """Under MPS, which its folder shows, or the variable, too few are the default."""
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": given} if given else {}
    if mps == "variable":
        environ["CUDA_MPS_PIPE_DIRECTORY"] = str(tmp_path / "not there")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os.path, "exists", lambda path: mps == "folder" and str(path) == "/tmp/nvidia-mps/control")
        if given in ("8", "32") or (given in ("", "many") and not mps):
            check_hardware_queues(environ)
            return
        with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS=32 before the process first uses its GPU"):
            check_hardware_queues(environ)
