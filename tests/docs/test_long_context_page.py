"""The programs of docs/long_context.md: the first runs as it stands, and the modules of the second take slices."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pages import blocks, run_program
from tests.support.small_llama import save_model, write_lines
from zbkern import functional
from zbkern.pipeline import check_slices

transformers = pytest.importorskip("transformers", reason="needs the transformers library: pip install zbkern[test]")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("cut is for transformers 5", allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "long_context.md"


@pytest.mark.dist
def test_the_program_runs_as_it_stands(two_ranks: Any, tmp_path: Path) -> None:
    folder, text, out = tmp_path / "model", tmp_path / "text", tmp_path / "out"
    save_model(folder)
    lines = write_lines(text, 8) * 3
    text.write_text("\n".join(lines) + "\n")
    printed = [
        line
        for of_rank in two_ranks.run(run_program, blocks(PAGE)[0], str(folder), str(text), str(out))
        for line in of_rank
    ]
    printed.remove(f"wrote the model and its tokenizer to {out}")
    losses = [float(re.fullmatch(r"lines \d+ to \d+: loss ([\d.]+)", line)[1]) for line in printed]
    batch = transformers.AutoTokenizer.from_pretrained(folder)(lines[:8], padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(**batch, labels=labels).loss.item()
    assert losses[0] == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0]
    assert [*out.glob("*.safetensors")]
    assert transformers.AutoTokenizer.from_pretrained(out)("the pipeline").input_ids == [1, 2]


def test_the_modules_take_slices() -> None:
    code: dict[str, Any] = {"torch": torch, "functional": functional}
    exec(textwrap.dedent(blocks(PAGE)[1]), code)
    attention, recurrent = code["Attention"]().double(), code["Recurrent"]().double()
    attention.inner, attention.output = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
    attention.project = lambda x: attention.inner(x).unflatten(2, (6, 4)).chunk(3, dim=2)
    recurrent.inner = torch.nn.Linear(8, 8)

    def scan(x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        sums = recurrent.inner(x).cumsum(1) + (0 if state is None else state)
        return sums, sums[:, -1:]

    recurrent.scan = scan
    for module in (attention.double(), recurrent.double()):
        check_slices(module, torch.randn(2, 24, 8, dtype=torch.float64), (9, 4, 11))
