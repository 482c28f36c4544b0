"""torch does not need NumPy, and neither do pipelines and checkpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
sys.modules["numpy"] = None  # an import raises
import warnings
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
import torch.distributed as dist
import zbkern
from zbkern.pipeline import Optimizer, Pipeline, checkpoint, schedules

folder = sys.argv[1]
child = os.fork()  # two ranks for one import of torch, which takes seconds
rank = int(child == 0)
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
chunk = zbkern.convert(torch.nn.Sequential())
chunk.add_module(f"layer{rank}", zbkern.convert(torch.nn.Linear(8, 8)))
with Pipeline(chunk, schedules.zb_h1(2, 4), torch.nn.functional.mse_loss, timeout=60) as pipe:
    optimizer = Optimizer(torch.optim.AdamW(chunk.parameters()), pipe, max_norm=1.0)
    pipe.step(torch.ones(8, 8), torch.zeros(8, 8))
    optimizer.step()
    pipe.gather("x" * 5000)  # longer than a header
    checkpoint.save(folder + "/run", 1, pipe, optimizer, {"name": "a"})
    print(checkpoint.load(folder + "/run", pipe, optimizer), flush=True)
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.dist
def test_a_step_and_a_checkpoint(tmp_path: Path) -> None:
    printed = subprocess.check_output([sys.executable, "-c", PROGRAM, str(tmp_path)], text=True, timeout=120)
    assert printed == "Loaded(step=1, extra={'name': 'a'})\n" * 2
