"""examples/finetune_packed.py, the program of docs/batches.md, trains on planned batches and writes a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import block, run_program
from tests.support.small_llama import save_model, write_lines
from zbkern.planning.planner import native

transformers = pytest.importorskip("transformers", reason="needs the transformers library: pip install zbkern[test]")
if int(transformers.__version__.split(".")[0]) < 5 or native.core is None:
    pytest.skip("cut is for transformers 5, and plans need the compiled search", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "finetune_packed.py"


@pytest.mark.dist
def test_it_trains_and_its_model_is_read_back(two_ranks: Any, tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "text", tmp_path / "out"
    save_model(model)
    lines = write_lines(text, 32)
    text.write_text("\n".join(lines * 3) + "\n")
    ran = two_ranks.run(run_program, PROGRAM.read_text(), str(model), str(text), str(out))
    assert ran[0].pop() == f"wrote the model and its tokenizer to {out}"
    found = [re.fullmatch(r"32 sequences in \d+ microbatches: loss ([\d.]+)", line)[1] for rank in ran for line in rank]
    losses = [*map(float, found)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert transformers.AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 4


def test_the_page_shows_it_as_it_stands() -> None:
    assert block(ROOT / "docs" / "batches.md", "PlannedBatches").strip() == PROGRAM.read_text().strip()
