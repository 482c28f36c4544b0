"""Lightning's own Trainer over gloo drives the page's module: its losses are those of one process."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.needs import installed
from tests.support.programs import block

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"
pytestmark = [pytest.mark.slow, pytest.mark.dist]

GIVEN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{own}
FOLDER, EPOCHS, STAGES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
LAYERS, loss_fn, losses = ["*"], torch.nn.functional.mse_loss, []
batches = held_out = DataLoader(rows(), batch_size=16)
"""
LOGGED = """
    def on_train_batch_end(self, *_):
        losses.append(self.trainer.callback_metrics["loss"].item())
"""
QUIET = ", accelerator='cpu', logger=False, enable_model_summary=False, enable_progress_bar=False)"
TOLD = "\nif trainer.global_rank == 0: print([*losses, trainer.callback_metrics['held-out loss'].item()], flush=True)\n"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(8)))


def rows() -> TensorDataset:
    return TensorDataset(*torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1)))


def in_one_process(epochs: int) -> list[float]:
    """The losses, and that of the held-out rows, which are the same ones in order."""
    model, loss_fn, losses = make_model(), nn.functional.mse_loss, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(rows(), num_replicas=1, rank=0)  # Lightning's order
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(rows(), batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return [*losses, loss_fn(model(rows().tensors[0]), rows().tensors[1]).item()]


def test_trainer(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    package = installed(tmp_path_factory, "lightning", "lightning==2.6.*", "lightning-utilities", "torchmetrics")
    program = block(PAGE, "ModelParallelStrategy").replace(
        "enable_checkpointing=False)", "enable_checkpointing=False" + QUIET
    )
    program = program.replace("    def teardown", LOGGED + "\n    def teardown")
    assert "on_train_batch_end" in program
    assert "logger=False" in program
    file = tmp_path / "train.py"
    own = "".join(map(inspect.getsource, (make_model, rows)))
    file.write_text(GIVEN.replace("{own}", own) + program + TOLD)
    path = os.pathsep.join([str(ROOT), package, os.environ.get("PYTHONPATH", "")])
    told: list[float] = []
    for epochs, stages in (2, 1), (3, 2):  # each rank imports it
        command = [sys.executable, str(file), str(tmp_path / "run"), str(epochs), str(stages)]
        ran = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
        told = [*told[:-1], *ast.literal_eval(ran.stdout.strip().splitlines()[-1])]
    assert told == pytest.approx(in_one_process(3), rel=1e-6)
