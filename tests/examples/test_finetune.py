"""examples/finetune.py, the README's first program, trains like one process, and what it writes is read back."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pages import block
from tests.support.small_llama import save_model, write_lines

transformers = pytest.importorskip("transformers", reason="needs the transformers library: pip install zbkern[test]")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("cut is for transformers 5", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "finetune.py"
STEPS = 3


def run(*arguments: str) -> list[str]:
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(PROGRAM), *arguments])
        patch.setattr(torch.distributed, "init_process_group", lambda backend: None)  # there is one already
        patch.setattr("builtins.print", lambda line, flush: printed.append(line))
        runpy.run_path(str(PROGRAM))
    return printed


def losses_of_one_process(folder: Path, lines: list[str]) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer, optimizer = (
        transformers.AutoTokenizer.from_pretrained(folder),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
    )
    losses = []
    for first in range(0, len(lines), 8):
        batch = tokenizer(lines[first : first + 8], padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        optimizer.zero_grad()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.dist
def test_it_trains_like_one_process_and_its_model_is_read_back(two_ranks: Any, tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "text", tmp_path / "out"
    save_model(model, tied=False)
    lines = write_lines(text, 8 * STEPS)
    printed = [line for lines_of_rank in two_ranks.run(run, str(model), str(text), str(out)) for line in lines_of_rank]
    assert printed.pop() == f"wrote the model and its tokenizer to {out}"  # by rank 0, which is last of a V
    losses = [float(re.fullmatch(r"lines \d+ to \d+: loss ([\d.]+)", line)[1]) for line in printed]
    assert losses == pytest.approx(losses_of_one_process(model, lines), abs=1e-4)  # printed with four places
    assert losses[-1] < losses[0]
    trained = transformers.AutoModelForCausalLM.from_pretrained(out)
    before = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert all(not torch.equal(now, then) for now, then in zip(trained.parameters(), before.parameters(), strict=True))
    assert transformers.AutoTokenizer.from_pretrained(out)("the pipeline").input_ids == [1, 2]


def test_the_readme_shows_it_as_it_stands() -> None:
    assert block(ROOT / "README.md", "AutoTokenizer").strip() == PROGRAM.read_text().strip()
