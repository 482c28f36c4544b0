"""The program of docs/lora.md runs as it stands; what it writes is read by the libraries that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pages import blocks, run_program
from tests.support.small_llama import save_model, write_lines

transformers = pytest.importorskip("transformers", reason="needs the transformers library: pip install zbkern[test]")
peft = pytest.importorskip("peft", reason="needs the peft library: pip install zbkern[test]")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("cut is for transformers 5", allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "lora.md"
STEPS = 4


def loss_of(model: Any, folder: Path, lines: list[str]) -> float:
    batch = transformers.AutoTokenizer.from_pretrained(folder)(lines, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        return model(**batch, labels=labels).loss.item()


@pytest.mark.dist
def test_the_program_runs_as_it_stands(two_ranks: Any, tmp_path: Path) -> None:
    folder, text, out = tmp_path / "model", tmp_path / "text", tmp_path / "out"
    save_model(folder)
    lines = write_lines(text, 8) * STEPS
    text.write_text("\n".join(lines) + "\n")  # the same eight lines in every step, so that losses compare
    (program,) = blocks(PAGE)
    printed = [
        line for of_rank in two_ranks.run(run_program, program, str(folder), str(text), str(out)) for line in of_rank
    ]
    assert printed.pop().startswith(f"wrote the adapter to {out}/adapter")
    losses = [float(re.fullmatch(r"lines \d+ to \d+: loss ([\d.]+)", line)[1]) for line in printed]
    assert len(losses) == STEPS
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert losses[0] == pytest.approx(loss_of(base, folder, lines[:8]), abs=1e-4)  # adapters begin at zero

    adapted = peft.PeftModel.from_pretrained(base, out / "adapter")
    assert loss_of(adapted, folder, lines[:8]) < losses[-1] < losses[0]
    assert transformers.AutoTokenizer.from_pretrained(out / "merged")("the pipeline").input_ids == [1, 2]
    merged = transformers.AutoModelForCausalLM.from_pretrained(out / "merged").state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())
