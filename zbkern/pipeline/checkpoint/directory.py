"""The folder that checkpoints are in: which are whole, how one takes its name, which are deleted.

What is called a checkpoint is complete: it is written under another name, and renamed when everything in it is on the
disk. What has not one of the names below exactly is somebody else's, and stays as it is.

    step-00000042                  a checkpoint
    step-00000042.TOKEN.part       one that is being written
    step-00000042.TOKEN.replaced   whole, and read while the new one of its step has not its name yet
    step-00000042.TOKEN.old        one that is being deleted
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zbkern.pipeline.checkpoint.dcp_format import INDEX

logger = logging.getLogger("zbkern")

_NAME = re.compile(r"step-(?P<step>[0-9]{8,})(?:\.[0-9a-f]{8}\.(?P<state>part|replaced|old))?")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def complete(folder: Path) -> dict[int, Path]:
    """The folder's checkpoints by their steps, oldest first."""
    checkpoints: dict[int, Path] = {}
    for path, step, state in sorted(_entries(folder), key=lambda entry: entry[2] is None):  # whole names replace others
        if state in (None, "replaced") and _is_checkpoint(path):
            checkpoints[step] = path
    return dict(sorted(checkpoints.items()))


def find(folder: Path, step: int | None) -> Path | None:
    """The checkpoint of that step, the newest for None."""
    checkpoints = complete(folder)
    return checkpoints.get(max(checkpoints, default=0) if step is None else step)


def lost(folder: Path, step: int | None) -> list[Path]:
    """Folders that have the whole name of a checkpoint (of that step), and nothing in them that makes them one."""
    named = [path for path, of, state in _entries(folder) if state is None and step in (None, of)]
    return [path for path in named if path.is_dir() and not _is_checkpoint(path)]


def begin(folder: Path, step: int) -> Path:
    """Makes the new folder that a checkpoint is written into, after what interrupted saves have left is deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / name_of(step)
    if os.path.lexists(final) and not _is_checkpoint(final):
        raise ValueError(f"checkpoint.save: {final} is in the way, and is no checkpoint; move it elsewhere")
    whole = complete(folder).values()
    for path, _, state in _entries(folder):
        if state is not None and path not in whole:
            _delete(path)
    scratch = _temporary(final, "part")
    scratch.mkdir()
    return scratch


def commit(scratch: Path, step: int, keep: int) -> Path:
    """Gives a finished checkpoint its name, and deletes all but it and the newest `keep` - 1 others."""
    folder, final = scratch.parent, scratch.parent / name_of(step)
    _flush(scratch)
    if _exists(final):  # this run began before that step once more
        os.rename(final, _temporary(final, "replaced"))
    os.rename(scratch, final)
    _flush(folder)
    replaced = [path for path, of, state in _entries(folder) if of == step and state == "replaced"]
    others = [path for path in complete(folder).values() if path != final]
    for path in replaced + others[: max(0, len(others) - (keep - 1))]:
        _retire(path)
    return final


def _entries(folder: Path) -> list[tuple[Path, int, str | None]]:
    """(path, step, state) of what is ours in the folder by its name; state: None for a whole name."""
    if not _exists(folder):
        return []
    named = [(path, _NAME.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    entries = [(path, int(match["step"]), match["state"]) for path, match in named if match is not None]
    return [(path, step, state) for path, step, state in entries if path.name.split(".")[0] == name_of(step)]


def _is_checkpoint(path: Path) -> bool:
    """Ours, or torch's alone, as without checksums; a link to one, too."""
    return _exists(path / INDEX) or _exists(path / ".metadata")


def _exists(path: Path) -> bool:
    """Raises OSError where a disk fails: what cannot be seen just now may be there, and be the newest checkpoint."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return True


def _temporary(final: Path, state: str) -> Path:
    return final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}.{state}")


def _retire(path: Path) -> None:
    """Deletes a checkpoint; half deleted, it is not called one."""
    old = _temporary(path.with_name(path.name.split(".")[0]), "old")
    with _deleting(path):
        os.rename(path, old)
        _delete(old)


def _delete(path: Path) -> None:
    """Of a link, the link."""
    with _deleting(path):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


@contextmanager
def _deleting(path: Path) -> Iterator[None]:
    """A checkpoint that cannot be deleted is no reason not to write another, or to call one that is whole a failure."""
    try:
        yield
    except OSError as error:
        logger.warning("checkpoint.save: %s could not be deleted: %s; delete it yourself", path, error)


def _flush(folder: Path) -> None:
    """Entries of a folder on the disk; the files themselves were flushed by their writers."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
