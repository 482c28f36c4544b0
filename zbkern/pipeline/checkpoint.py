"""Checkpoints through torch.distributed.checkpoint, by the names of the whole model.

No key says which stage wrote it, so a checkpoint loads with any number of stages, under any schedule, in one process.
`save` writes into a folder of its own and renames it when everything in it is on the disk: whatever interrupts it, the
checkpoints before are whole, and what is called a checkpoint is complete. A checkpoint is read with pickle (that is
torch.distributed.checkpoint's format): load only what you trust.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from zbkern.pipeline.named_state import NamedState, Rename, pack, some, unpack

logger = logging.getLogger("zbkern")

_PREFIX, _UNFINISHED, _RETIRED = "step-", ".part", ".old"
_REPLACED = ".replaced"  # whole, and read while the new one of its step has not its name yet


class Loaded(NamedTuple):
    """What `load` found: the step of the checkpoint, and the `extra` that was saved with it."""

    step: int
    extra: Any


def save(
    folder: str | os.PathLike,
    step: int,
    modules: Any,
    optimizer: Any = None,
    extra: Any = None,
    *,
    rename: Rename | None = None,
    keep: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes `folder`/step-00000042 and returns its path on every rank once it is complete and on the disk; collective.

    folder: on a file system that all ranks share. modules: a Pipeline; or {chunk number in model order: module} of this
    rank; or one module, the whole model. optimizer: an Optimizer or a torch optimizer of their parameters. extra: what
    else a run needs to go on, the same on all ranks, such as the data position: numbers, strings, tensors, and lists
    and dicts of them. rename: rename(chunk, key) is the name in the whole model of what the chunk's module calls `key`;
    needed where every chunk numbers its layers from zero. keep: how many checkpoints stay, the newest. group: the ranks
    that take part, None for all; without torch.distributed this process alone. States of random number generators
    (torch's, Python's) are saved by rank.
    Raises ValueError when two chunks use one name, or when a parameter of the optimizer is in no module, and TypeError
    for an `extra` that could not be read again.
    """
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"checkpoint.save: step must be a number of steps, at least 0; got {step!r}")
    if keep < 1:
        raise ValueError(f"checkpoint.save: keep must be at least 1; got {keep}")
    if hasattr(optimizer, "validate"):
        optimizer.validate()  # before a weight is read
    state = NamedState(modules, optimizer, rename, group)
    tensors = state.tensors()
    tensors[f"random.{state.rank}"] = pack(_random_state(state.device), "the random state")
    pack(extra, "extra")  # raises on every rank: on one alone the others would wait for it
    if state.rank == 0:
        own = optimizer.common_state() if hasattr(optimizer, "common_state") else {}
        tensors["common"] = pack({"step": step, "extra": extra, "optimizer": own}, "the state")
    folder = Path(folder)
    final = folder / f"{_PREFIX}{step:08d}"
    scratch = Path(f"{final}{_UNFINISHED}")
    if state.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        whole = _complete(folder)
        for leftover in folder.glob(f"{_PREFIX}*"):
            if leftover.suffix in (_UNFINISHED, _RETIRED, _REPLACED) and leftover not in whole:
                shutil.rmtree(leftover)
    _barrier(group)
    with _alone_is_fine():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(scratch), process_group=group)
    if state.rank == 0:
        _flush(scratch)
        replaced = Path(f"{final}{_REPLACED}")
        if final.exists():  # this run began before that step once more
            os.rename(final, replaced)
        os.rename(scratch, final)
        _flush(folder)
        if replaced.exists():
            _retire(replaced)
        others = [path for path in _complete(folder) if path != final]
        for path in others[: len(others) - (keep - 1)]:
            _retire(path)
    _barrier(group)
    return final


def load(
    folder: str | os.PathLike,
    modules: Any,
    optimizer: Any = None,
    *,
    step: int | None = None,
    rename: Rename | None = None,
    group: dist.ProcessGroup | None = None,
) -> Loaded | None:
    """Loads the newest checkpoint, or that of `step`, into modules and optimizer; None where there is none; collective.

    Arguments as for `save`; stages, schedule and placement may differ from those that saved. Random number generators
    go on where those of the same rank stopped; a rank that did not exist keeps its own.
    Raises ValueError when there is no checkpoint of `step`, or when it does not hold this model; warns where it holds
    more than that.
    """
    state = NamedState(modules, optimizer, rename, group)
    path = _agree(_find(Path(folder), step), group)
    if path is None and step is not None:
        raise ValueError(
            f"checkpoint.load: {folder} has no checkpoint of step {step}; there are {_steps(Path(folder))}"
        )
    if path is None:
        return None
    if hasattr(optimizer, "abandon"):
        optimizer.abandon()
    if hasattr(modules, "completed"):  # a Pipeline: from here its ranks are at one step again
        modules.completed = 0
    reader = dcp.FileSystemReader(path)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    wanted = state.targets(stored)
    if state.rank == 0 and (unused := state.unused(stored)):
        logger.warning("%s holds %d tensors that no rank's model has: %s", path, len(unused), some(unused))
    mine = f"random.{state.rank}"
    wanted.update({key: torch.empty(stored[key].size, dtype=torch.uint8) for key in ("common", mine) if key in stored})
    with _alone_is_fine():
        dcp.load(wanted, storage_reader=reader, process_group=group)
    common = unpack(wanted.pop("common"))
    kept = wanted.pop(mine, None)
    state.take(wanted)
    if hasattr(optimizer, "load_common_state"):
        optimizer.load_common_state(common["optimizer"])
    if kept is not None:
        _set_random_state(unpack(kept), state.device)
    else:
        logger.info("rank %d: %s has no random state for this rank, which keeps its own", state.rank, path)
    return Loaded(common["step"], common["extra"])


def latest(folder: str | os.PathLike) -> Path | None:
    """The newest checkpoint of a folder, None where there is none."""
    return _find(Path(folder), None)


# ---- files


def _complete(folder: Path) -> list[Path]:
    """The folder's checkpoints, oldest first."""
    named = [path for path in folder.glob(f"{_PREFIX}*") if path.stem[len(_PREFIX) :].isdigit()]
    found = {path.stem: path for suffix in (_REPLACED, "") for path in named if path.suffix == suffix}
    return sorted(found.values(), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem[len(_PREFIX) :])


def _steps(folder: Path) -> str:
    return ", ".join(str(_step_of(path)) for path in _complete(folder)) or "none"


def _find(folder: Path, step: int | None) -> Path | None:
    found = [path for path in _complete(folder) if step is None or _step_of(path) == step]
    return found[-1] if found else None


def _retire(path: Path) -> None:
    """Deletes a checkpoint; half deleted, it is not called one."""
    old = Path(f"{path}{_RETIRED}")
    os.rename(path, old)
    shutil.rmtree(old)


def _flush(folder: Path) -> None:
    """Entries of a folder on the disk; the files themselves were flushed by their writers."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- ranks


def _barrier(group: dist.ProcessGroup | None) -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier(group)


def _agree(path: Path | None, group: dist.ProcessGroup | None) -> Path | None:
    """What rank 0 has found: others may see an older state of the file system."""
    if not (dist.is_available() and dist.is_initialized()):
        return path
    found = [path]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return found[0]


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


# ---- random numbers


def _random_state(device: torch.device) -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
