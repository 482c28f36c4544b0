"""Bytes of real text, and batches of them that depend only on a seed and the step."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LIMIT = 16 << 20


class Text:
    """The bytes of a file, or of every text file of a folder in sorted order, up to `LIMIT`; tokens are bytes.

    path: None takes the source files of Python's standard library, which every machine has.
    """

    def __init__(self, path: str | None = None, seed: int = 0) -> None:
        source = Path(path or sysconfig.get_path("stdlib"))
        if not source.exists():
            raise SystemExit(f"--data: {source} does not exist; give a file or a folder of text files")
        pattern = "*" if path else "*.py"
        files = [source] if source.is_file() else sorted(f for f in source.rglob(pattern) if f.is_file())
        data = bytearray()
        for file in files:
            if "site-packages" not in file.parts:
                data += file.read_bytes()[: LIMIT - len(data)]
            if len(data) >= LIMIT:
                break
        if len(data) < 1 << 12:
            raise SystemExit(f"--data: {source} holds only {len(data)} bytes; give at least {1 << 12}")
        self.bytes = torch.frombuffer(data, dtype=torch.uint8)
        self.source = source
        self.seed = seed

    def batch(self, step: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [rows, context] of a step: the same for the same seed and step, on every rank."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.bytes) - context - 1, (rows,), generator=generator)
        windows = self.bytes[starts[:, None] + torch.arange(context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
