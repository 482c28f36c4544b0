"""Checkpoints of a pipeline: one file per rank and step; a step counts once every rank has written its file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes this rank's state; when all ranks have, `latest` names the step and older steps go. Collective."""
    target = folder / f"step-{step:08d}"
    target.mkdir(parents=True, exist_ok=True)
    _replace(target / f"rank-{dist.get_rank()}.pt", lambda path: torch.save(state, path))
    dist.barrier()
    if dist.get_rank() == 0:
        _replace(folder / "latest", lambda path: path.write_text(target.name))
        for old in folder.glob("step-*"):
            if old != target:
                shutil.rmtree(old)


def load(folder: Path) -> dict[str, Any] | None:
    """This rank's state of the latest complete step, or None when there is none."""
    latest = folder / "latest"
    if not latest.exists():
        return None
    file = folder / latest.read_text() / f"rank-{dist.get_rank()}.pt"
    if not file.exists():
        raise SystemExit(f"--resume: {file} is missing; resume with the number of ranks that wrote {folder}")
    return torch.load(file, weights_only=True)


def _replace(path: Path, write: Any) -> None:
    """Writes beside the file and renames: whoever is interrupted leaves the old file whole."""
    scratch = path.with_name(path.name + ".part")
    write(scratch)
    os.replace(scratch, path)
