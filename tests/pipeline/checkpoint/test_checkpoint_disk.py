"""A file system that fails at its n-th operation, for every n of a save and of a load: no checkpoint is lost by it.

By default n are the first operations of each kind on each file; with --slow they are all.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zbkern.pipeline import checkpoint
from zbkern.pipeline.checkpoint import dcp_format

NAMES = ("open", "fsync", "rename", "mkdir", "unlink", "rmdir", "scandir", "listdir", "stat", "lstat")


class Disk:
    """Counts operations; number `fails_at` raises. So do all later ones that need space where the error is ENOSPC, and
    all whatsoever where `code` is None: of a process that is killed nothing more reaches the disk."""

    def __init__(self, fails_at: int, code: int | None) -> None:
        self.fails_at, self.code = fails_at, code
        self.done: list[str] = []  # every operation, with the file but without the random part of its name

    @property
    def count(self) -> int:
        return len(self.done)

    def operate(self, name: str, path: Any, needs_space: bool) -> None:
        self.done.append(f"{name} {TOKEN.sub('', Path(path).name) if isinstance(path, (str, Path)) else ''}")
        later = self.code is None or (self.code == errno.ENOSPC and needs_space)
        if self.count == self.fails_at or (later and self.count > self.fails_at):
            if self.code is None:
                raise KeyboardInterrupt(f"operation {self.fails_at}: killed")
            raise OSError(self.code, f"operation {self.count}: {os.strerror(self.code)}")

    @property
    def failed(self) -> bool:
        return self.count >= self.fails_at

    def function(self, name: str, needs_space: bool) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.operate(name, arguments[0] if arguments else "", needs_space)
            return real(*arguments, **options)

        return call

    def open(self, path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        self.operate("open", path, "w" in mode)
        return File(self, path, OPEN(path, mode, *arguments, **options))

    @contextmanager
    def mounted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in NAMES:
                patch.setattr(os, name, self.function(name, name in ("fsync", "mkdir")))
            patch.setattr(builtins, "open", self.open)
            patch.setattr(io, "open", self.open)
            yield


OPEN = builtins.open
TOKEN = re.compile(r"(?<=\.)[0-9a-f]{8}(?=\.)")


class File:
    def __init__(self, disk: Disk, path: Any, file: Any) -> None:
        self._disk, self._path, self._file = disk, path, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        try:
            self._disk.operate("write", self._path, needs_space=True)
        except (OSError, KeyboardInterrupt):  # part of it is there
            self._file.write(bytes(data)[: len(data) // 2])
            raise
        return self._file.write(data)

    def read(self, *arguments: Any) -> bytes:
        self._disk.operate("read", self._path, needs_space=False)
        return self._file.read(*arguments)


def make(value: float) -> nn.Module:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def loaded(folder: Path, step: int | None = None) -> float:
    module = make(-1.0)
    assert checkpoint.load(folder, module, step=step) is not None
    return module.weight.item()


def first_of_each_kind(done: list[str]) -> list[int]:
    return [n for n, operation in enumerate(done, 1) if operation not in done[: n - 1]]


@pytest.mark.parametrize(
    ("step", "code", "every"),
    [
        (3, errno.EIO, False),
        pytest.param(3, None, False, marks=pytest.mark.slow),
        pytest.param(3, errno.ENOSPC, True, marks=pytest.mark.slow),
        pytest.param(2, errno.EIO, True, marks=pytest.mark.slow),
        pytest.param(2, None, True, marks=pytest.mark.slow),
    ],
)
def test_a_save_that_fails_at_any_operation_loses_nothing(
    tmp_path: Path, step: int, code: int | None, every: bool
) -> None:
    """Steps 1 and 2 are there with their numbers as weights; 3 is saved, or 2 once more, with weights 10."""
    for before in (1, 2):
        checkpoint.save(tmp_path / "before", before, make(before), keep=2)

    def save(at: int) -> tuple[Path, Disk, str]:
        folder, disk, message = tmp_path / str(at) / "run", Disk(at, code), ""
        shutil.copytree(tmp_path / "before", folder)
        try:
            with disk.mounted():
                checkpoint.save(folder, step, make(10.0), keep=2)
        except (OSError, KeyboardInterrupt) as error:
            message = str(error)
        return folder, disk, message

    _, whole, _ = save(sys.maxsize)
    failures, places = 0, list(range(1, whole.count + 1)) if every else first_of_each_kind(whole.done)
    for at in places:
        folder, disk, message = save(at)
        assert disk.done[:at] == whole.done[:at]
        newest = checkpoint.load(folder, make(0.0))
        assert newest is not None
        if message:
            failures += 1
            assert code == errno.ENOSPC or f"operation {at}:" in message
            assert loaded(folder) in (2.0, 10.0), message
        else:
            assert loaded(folder) == 10.0, f"operation {at}: the save has returned"
        if loaded(folder) == 2.0:  # it has not got its name
            assert (newest.step, loaded(folder, 1)) == (2, 1.0), message
        elif step == 3:
            assert (newest.step, loaded(folder, 2)) == (3, 2.0), message
        else:
            assert (newest.step, loaded(folder, 1)) == (2, 1.0), message
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dcp_format, "write_tensors", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                checkpoint.save(folder, 4, make(4.0))
        assert checkpoint.load(folder, make(0.0)) == newest, "a save that fails has deleted it"
        checkpoint.save(folder, 4, make(4.0), keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-00000004"], f"operation {at}"
        assert loaded(folder) == 4.0
    assert failures > 15
    if code is not None:
        assert len(places) > failures + 4, "what only deletes is no failure of a save"


def test_a_load_that_fails_at_any_operation_can_be_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has changed nothing, or says that it may have."""
    checkpoint.save(tmp_path, 1, make(1.0))
    random_state = torch.get_rng_state()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    failures, partly, at = 0, 0, 0
    while True:
        at += 1
        disk, module, message = Disk(at, errno.EIO), make(-1.0), f"operation {at}:"
        torch.manual_seed(at)
        caplog.clear()
        try:
            with disk.mounted():
                checkpoint.load(tmp_path, module)
        except OSError as error:
            message, failures = str(error), failures + 1
            if "are partly loaded" in caplog.text:
                partly += 1
            else:
                assert module.weight.item() == -1.0
                assert not torch.equal(torch.get_rng_state(), random_state)
            checkpoint.load(tmp_path, module)
        assert f"operation {at}:" in message
        assert module.weight.item() == 1.0
        assert torch.equal(torch.get_rng_state(), random_state)
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
        if not disk.failed:
            break
    assert partly <= 2  # of the second reading: its file is opened, and its one tensor read
    assert failures == at - 1 > 8  # no error is taken for a file that is not there


def test_the_error_of_a_full_device_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device; older checkpoints are as they were: .*__0_0\.distcp"):
        checkpoint.save(tmp_path, 1, nn.Linear(2, 2))
