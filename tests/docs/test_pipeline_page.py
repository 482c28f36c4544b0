"""The example of docs/pipeline.md runs, on two ranks, up to its first checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


def make_chunk(number: int) -> nn.Module:
    chunk = nn.Sequential()
    chunk.add_module(f"layer{number}", nn.Linear(8, 8))
    return chunk


def run_example(folder: str) -> tuple[int, bool]:
    """What the page's first block leaves: how many steps it did, and whether this rank has a loss."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    code = code.replace("dist.init_process_group()", "pass").replace('"run"', repr(folder)).replace("1000", "3")
    code = code.replace("999", "2")
    batches = [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(4)]
    names: dict[str, Any] = {
        "make_chunk": make_chunk,
        "loss_fn": nn.functional.mse_loss,
        "batches": batches,
    }
    exec(code, names)
    return names["step"], names["loss"] is not None


@pytest.mark.dist
def test_the_example_runs(two_ranks: Any, tmp_path: Path) -> None:
    assert two_ranks.run(run_example, str(tmp_path / "run")) == [(3, True), (3, False)]
    assert (tmp_path / "run" / "step-00000002").is_dir()
