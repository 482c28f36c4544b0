"""What is in the folder of checkpoints: how many stay, and what is not a checkpoint although it is called one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from zbkern.pipeline import checkpoint, schedules
from zbkern.pipeline.checkpoint import dcp_format, directory, save_load
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.transport.local import LocalTransport


def make(value: float = 0.0) -> nn.Linear:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, value)
    return module


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def loaded(folder: Path, step: int | None = None) -> tuple[int, float]:
    """The step that was loaded, and the value that the weights had in it."""
    module = make(-1.0)
    found = checkpoint.load(folder, module, step=step)
    assert found is not None
    return found.step, module.weight[0, 0].item()


def test_the_timeout_of_a_pipeline_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real = save_load.RankExchange

    def watched(call: str, group: Any, timeout: float, **options: Any) -> Any:
        seen.append(timeout)
        return real(call, group, timeout, **options)

    monkeypatch.setattr(save_load, "RankExchange", watched)
    transport = LocalTransport.ring(1)[0]
    with Pipeline(make(), schedules.gpipe(1, 2), nn.functional.mse_loss, transport, timeout=7) as pipe:
        checkpoint.save(tmp_path, 1, pipe)
        checkpoint.load(tmp_path, pipe, timeout=3)
    checkpoint.save(tmp_path, 1, make())
    assert seen == [7, 3, 1800]


@pytest.mark.parametrize("steps", [(2, 3), (1, 2)])
def test_a_checkpoint_that_is_a_link_is_loaded_and_only_the_link_is_replaced(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpoint.save(folder, 1, make(1.0))
    os.rename(folder / "step-00000001", elsewhere)
    os.symlink(elsewhere, folder / "step-00000001")
    assert loaded(folder) == (1, 1.0)
    for step in steps:
        checkpoint.save(folder, step, make(step + 4))
        assert names(folder) == [f"step-0000000{step}"]
        assert loaded(folder) == (step, step + 4)
    os.symlink(elsewhere, folder / "step-00000001")
    assert loaded(folder, 1) == (1, 1.0)


STRAY_FILES = [
    "step-00000009",
    "step-00000009.part",
    "step-00000009.old",
    "step-00000009.12345678.part",
    "step-00000009.12345678.replaced",
    "step-²",
    "step-",
    "step-00000001 (copy)",
    "step-0000000000000003",
    "step-9",
    "notes.txt",
]


@pytest.mark.parametrize("kind", ["file", "folder", "broken link"])
@pytest.mark.parametrize("name", STRAY_FILES)
def test_what_is_only_called_like_a_checkpoint_breaks_nothing(tmp_path: Path, name: str, kind: str) -> None:
    checkpoint.save(tmp_path, 1, make(1.0))
    stray = tmp_path / name
    if kind == "file":
        stray.write_text("mine")
    elif kind == "folder":
        stray.mkdir()
    else:
        os.symlink(tmp_path / "nowhere", stray)
    assert loaded(tmp_path) == (1, 1.0)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    for step in (2, 3):
        checkpoint.save(tmp_path, step, make(step))
        assert loaded(tmp_path) == (step, step)
        assert set(names(tmp_path)) - {name} == {f"step-0000000{step}"}
    if kind == "file":
        assert stray.read_text() == "mine"


def test_a_checkpoint_that_has_lost_its_files_is_named(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, make(1.0))
    for file in path.iterdir():
        file.unlink()
    message = "step-00000003 is no checkpoint, as it has neither zbkern.json nor .metadata"
    for step in (None, 3):
        with pytest.raises(ValueError, match=message):
            checkpoint.load(tmp_path, make(), step=step)
    checkpoint.save(tmp_path, 2, make(2.0))
    assert loaded(tmp_path) == (2, 2.0)


@pytest.mark.parametrize("name", ["", "__0_0.distcp"])
def test_a_checkpoint_that_is_deleted_while_it_is_read_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By a save with keep=1, of another job."""
    module = make(1.0)
    checkpoint.save(tmp_path, 1, module)
    real = dcp_format.read_index

    def read_index(path: Path) -> Any:
        if not name:
            shutil.rmtree(path)
        index = real(path)
        (path / name).unlink(missing_ok=True)
        return index

    monkeypatch.setattr(dcp_format, "read_index", read_index)
    with pytest.raises(ValueError, match=r" was deleted.*load again.*keep=") as caught:
        checkpoint.load(tmp_path, module)
    assert f"step-00000001/{name}" in str(caught.value)


def test_a_save_says_what_is_in_its_way(tmp_path: Path) -> None:
    (tmp_path / "step-00000009").write_text("mine")
    with pytest.raises(ValueError, match="step-00000009 is in the way, and is no checkpoint"):
        checkpoint.save(tmp_path, 9, make())
    assert names(tmp_path) == ["step-00000009"]


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for call in (
        lambda: checkpoint.save(file, 1, make()),
        lambda: checkpoint.load(file, make()),
        lambda: checkpoint.latest(file),
    ):
        with pytest.raises(OSError, match=r"(File exists|Not a directory).*file"):
            call()
    assert file.read_text() == "mine"


def test_what_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(13, "Permission denied", str(path))

    checkpoint.save(tmp_path, 1, make(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(directory.shutil, "rmtree", refuse)
        for step in (2, 3):
            checkpoint.save(tmp_path, step, make(step))
            assert "could not be deleted: [Errno 13] Permission denied" in caplog.text
            assert loaded(tmp_path) == (step, step)
    checkpoint.save(tmp_path, 4, make(4.0))
    assert names(tmp_path) == ["step-00000004"]


def test_a_checkpoint_without_checksums_is_refused_and_kept(tmp_path: Path) -> None:
    dcp.save({"model.weight": torch.ones(2, 2)}, checkpoint_id=tmp_path / "step-00000005", no_dist=True)
    with pytest.raises(ValueError, match=r"step-00000005 has no zbkern.json.*torch.distributed.checkpoint.*trust"):
        checkpoint.load(tmp_path, make())
    with pytest.raises(ValueError, match="has no checkpoint of step 1; there are 5"):
        checkpoint.load(tmp_path, make(), step=1)


def test_rename_must_not_give_two_tensors_of_a_chunk_one_name(tmp_path: Path) -> None:
    module = nn.Sequential(make(), make())

    def strip(chunk: int, key: str) -> str:
        return key.split(".", 1)[1]

    message = "rename gives '0.weight' and '1.weight' of chunk 0 one name, 'weight'"
    with pytest.raises(ValueError, match=message):
        checkpoint.save(tmp_path, 1, module, rename=strip)
    assert names(tmp_path) == []
    checkpoint.save(tmp_path, 1, make())
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path, module, rename=strip)
