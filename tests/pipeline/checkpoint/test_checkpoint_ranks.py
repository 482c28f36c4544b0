"""Checkpoints of two ranks of which one fails: all get an error that names it, the old checkpoint stays, they go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from zbkern.pipeline import Pipeline, checkpoint, schedules
from zbkern.pipeline.checkpoint import dcp_format

pytestmark = pytest.mark.dist


def module_of(rank: int, value: float, width: int = 2) -> dict[int, nn.Module]:
    module = nn.Sequential()
    module.add_module(f"layer{rank}", nn.Linear(2, width))
    nn.init.constant_(module[0].weight, value)
    return {rank: module}


def save_with(folder: Path, case: str, failing: int) -> tuple[str, str, float]:
    """Saves step 2 with weights 2 after step 1 with weights 1; (kind, message, seconds) of what this rank raises."""
    rank = dist.get_rank()
    modules = module_of(rank, 1.0)
    checkpoint.save(folder, 1, modules, timeout=60)
    nn.init.constant_(modules[rank][0].weight, 2.0)
    arguments: dict[str, Any] = {"folder": folder, "step": 2, "modules": modules, "extra": None, "timeout": 600}
    real = dcp_format.write_tensors

    def write(*given: Any) -> Any:
        if case == "disk":
            raise OSError(28, "No space left on device")
        if case == "interrupt":
            raise KeyboardInterrupt
        pieces = real(*given)
        if case == "lost":
            (given[0] / "__1_0.distcp").unlink()
        return pieces

    kind, message, start = "nothing", "", time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == (1 if case == "lost" else failing):
            patch.setattr(dcp_format, "write_tensors", write)
            other = {
                "folder": {"folder": Path("/proc/nowhere")},
                "own folder": {"folder": folder / "of rank 1"},
                "extra": {"extra": {"data": object()}},
                "step": {"step": "2"},
                "timeout": {"timeout": -1},
                "modules": {"modules": [3]},
                "number": {"step": 3},
            }
            arguments.update(other.get(case, {}))
        try:
            checkpoint.save(**arguments)
        except BaseException as error:
            kind, message = type(error).__name__, str(error)
    seconds = time.monotonic() - start
    again = module_of(rank, 0.0)
    assert checkpoint.load(folder, again, timeout=60) == (1, None)
    assert again[rank][0].weight[0, 0] == 1.0
    checkpoint.save(folder, 3, modules, timeout=60)
    assert checkpoint.load(folder, again, timeout=60) == (3, None)
    assert again[rank][0].weight[0, 0] == 2.0
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    return kind, message, seconds


@pytest.mark.parametrize(
    ("case", "failing", "kind", "cause"),
    [
        ("disk", 0, "OSError", "[Errno 28] No space left on device"),
        ("disk", 1, "OSError", "[Errno 28] No space left on device"),
        ("interrupt", 1, "KeyboardInterrupt", ""),
        ("folder", 0, "FileNotFoundError", "/proc/nowhere"),
        ("folder", 1, "ValueError", "and this rank does not; folder must be one place shared by all ranks"),
        ("own folder", 1, "ValueError", "and this rank does not; folder must be one place shared by all ranks"),
        ("lost", 0, "ValueError", "__1_0.distcp, where rank 0 finds no file; folder must be one place shared by all"),
        ("extra", 1, "TypeError", "extra['data'] must be a number"),
        ("step", 1, "TypeError", "step must be an int"),
        (
            "timeout",
            1,
            "ValueError",
            "timeout must be a number of seconds above 0 and at most 31536000 (a year)",
        ),
        ("modules", 1, "AttributeError", "'list' object has no attribute 'items'"),
        ("number", 0, "ValueError", "step must be the same on all ranks; rank 0 has 3, rank 1 2"),
    ],
)
def test_a_save_that_fails_on_one_rank(
    two_ranks: Any, tmp_path: Path, case: str, failing: int, kind: str, cause: str
) -> None:
    found = two_ranks.run(save_with, tmp_path, case, failing)
    assert found[failing][0] == kind
    assert cause in found[failing][1]
    assert found[1 - failing][0] == "PipelineError"
    assert f"checkpoint.save: rank {failing}: {kind}: " in found[1 - failing][1]
    assert cause in found[1 - failing][1]
    assert max(seconds for _, _, seconds in found) < 60


def load_with(folder: Path, case: str) -> tuple[str, str]:
    rank = dist.get_rank()
    base = folder / "shared"
    checkpoint.save(base, 1, module_of(rank, 1.0), timeout=60)
    checkpoint.save(folder / "other", 1, module_of(rank, 3.0), timeout=60)
    path = base / "step-00000001"
    if case == "damaged" and rank == 1:
        file = path / "__1_0.distcp"
        file.write_bytes(bytes(file.stat().st_size))
    dist.barrier()
    modules, place, step = module_of(rank, 0.0), base, None
    if rank == 1:
        if case == "shapes":
            modules = module_of(rank, 0.0, width=3)
        if case == "elsewhere":
            place = folder / "nothing"
        if case == "another":
            place = folder / "other"
        if case == "step":
            step = 1
    elif case == "nothing on rank 0":
        place = folder / "nothing"
    kind, message = "nothing", ""
    try:
        checkpoint.load(place, modules, step=step, timeout=60)
    except BaseException as error:
        kind, message = type(error).__name__, str(error)
    if kind != "nothing":
        assert modules[rank][0].weight[0, 0] == 0.0, "something was loaded"
    checkpoint.save(base, 2, module_of(rank, 5.0), timeout=60)
    again = module_of(rank, 0.0)
    assert checkpoint.load(base, again, timeout=60) == (2, None)
    assert again[rank][0].weight[0, 0] == 5.0
    return kind, message


@pytest.mark.parametrize(
    ("case", "failing", "cause"),
    [
        ("shapes", 1, "'layer1.weight' is [3, 2] here and [2, 2] in it"),
        ("damaged", 1, "in {folder}/shared/step-00000001/__1_0.distcp is damaged"),
        ("another", 1, "other/step-00000001 is another one on rank 0; folder must be one place shared by all ranks"),
        ("elsewhere", 1, "this rank does not; folder must be one place shared by all ranks"),
        ("nothing on rank 0", 0, "rank 1 sees {folder}/nothing/step-00000001, and rank 0 does not; folder must be one"),
        ("step", 0, "step must be the same on all ranks; rank 0 has None, rank 1 1"),
    ],
)
def test_a_load_that_fails_on_one_rank(two_ranks: Any, tmp_path: Path, case: str, failing: int, cause: str) -> None:
    found = two_ranks.run(load_with, tmp_path, case)
    cause = cause.format(folder=tmp_path)
    assert found[failing][0] == "ValueError"
    assert cause in found[failing][1]
    assert found[1 - failing][0] == "PipelineError"
    assert f"checkpoint.load: rank {failing}: ValueError: " in found[1 - failing][1]
    assert cause in found[1 - failing][1]


def fail_in_a_pipeline(folder: Path) -> str:
    rank = dist.get_rank()
    schedule = schedules.zb_h1(2, 2)
    with Pipeline([*module_of(rank, 1.0).values()], schedule, nn.functional.mse_loss, timeout=60) as pipe:
        try:
            checkpoint.save(folder, 1, pipe, extra=object() if rank else 1)
        except (TypeError, RuntimeError) as error:
            message = str(error)
        checkpoint.save(folder, 1, pipe, extra=1)
        assert checkpoint.load(folder, pipe) == (1, 1)
    return message


def test_ranks_of_a_pipeline_go_on_after_a_save_that_has_failed(two_ranks: Any, tmp_path: Path) -> None:
    for message in two_ranks.run(fail_in_a_pipeline, tmp_path):
        assert "extra must be a number" in message
