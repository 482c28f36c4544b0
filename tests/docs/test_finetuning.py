"""Programs that fine-tune a model of the transformers library, of pages and examples, run as they stand on two ranks:
their losses fall from that of one process, and what they write is read by the libraries that the pages name."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import zbkern
from tests.support.programs import block, blocks, run_program, save_model, write_lines
from zbkern.pipeline import check_slices
from zbkern.planning.planner import native

transformers = pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FINETUNE, PACKED = (ROOT / "examples" / name for name in ("finetune.py", "finetune_packed.py"))


def loss_of(model: Any, folder: Path, lines: list[str]) -> torch.Tensor:
    batch = transformers.AutoTokenizer.from_pretrained(folder)(lines, padding=True, return_tensors="pt")
    return model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss


def losses_of_one_process(folder: Path, lines: list[str]) -> list[float]:
    model, losses = transformers.AutoModelForCausalLM.from_pretrained(folder), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for first in range(0, len(lines), 8):
        optimizer.zero_grad()
        loss = loss_of(model, folder, lines[first : first + 8])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses(
    ranks: Any, program: str, folder: Path, lines: int = 8, times: int = 3, wrote: str = "the model and its tokenizer",
    tied: bool = True,
) -> list[float]:  # fmt: skip
    """Of a program that is given folder/model, folder/text and folder/out. wrote: what it says at the end."""
    save_model(folder / "model", tied=tied)
    text = write_lines(folder / "text", lines) * times
    (folder / "text").write_text("\n".join(text) + "\n")
    ran = ranks.run(run_program, program, *(str(folder / name) for name in ("model", "text", "out")))
    printed = [line for of_rank in ran for line in of_rank]
    said = [line for line in printed if line.startswith(f"wrote {wrote} to {folder / 'out'}")]
    assert len(said) == 1
    found = [float(re.fullmatch(r"[\w ]+: loss ([\d.]+)", line)[1]) for line in printed if line not in said]
    assert found[-1] < found[0]
    return found


def tokenizes(folder: Path) -> bool:
    return transformers.AutoTokenizer.from_pretrained(folder)("the pipeline").input_ids == [1, 2]


@pytest.mark.dist
def test_the_readmes_program_trains_like_one_process(two_ranks: Any, tmp_path: Path) -> None:
    assert block(ROOT / "README.md", "AutoTokenizer").strip() == FINETUNE.read_text().strip()
    found = losses(two_ranks, FINETUNE.read_text(), tmp_path, lines=24, times=1, tied=False)
    expected = losses_of_one_process(tmp_path / "model", (tmp_path / "text").read_text().splitlines())
    assert found == pytest.approx(expected, abs=1e-4)  # printed with four places
    before, trained = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "out"))
    assert all(not torch.equal(now, then) for now, then in zip(trained.parameters(), before.parameters(), strict=True))
    assert tokenizes(tmp_path / "out")


@pytest.mark.dist
@pytest.mark.skipif(native.core is None, reason="plans need the compiled search")
def test_planned_batches(two_ranks: Any, tmp_path: Path) -> None:
    assert block(DOCS / "batches.md", "PlannedBatches").strip() == PACKED.read_text().strip()
    assert len(losses(two_ranks, PACKED.read_text(), tmp_path, lines=32)) == 3
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 4


@pytest.mark.dist
def test_adapters(two_ranks: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the peft library: pip install zbkern[test]")
    (program,) = blocks(DOCS / "lora.md")
    found = losses(two_ranks, program, tmp_path, times=4, wrote="the adapter")
    assert len(found) == 4
    model, lines = tmp_path / "model", (tmp_path / "text").read_text().splitlines()[:8]
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert found[0] == pytest.approx(loss_of(base, model, lines).item(), abs=1e-4)  # adapters begin at zero
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    assert loss_of(adapted, model, lines).item() < found[-1]
    assert tokenizes(tmp_path / "out" / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged").state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())


@pytest.mark.dist
def test_long_contexts(two_ranks: Any, tmp_path: Path) -> None:
    found = losses(two_ranks, blocks(DOCS / "long_context.md")[0], tmp_path)
    expected = losses_of_one_process(tmp_path / "model", (tmp_path / "text").read_text().splitlines()[:8])
    assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert [*(tmp_path / "out").glob("*.safetensors")]
    assert tokenizes(tmp_path / "out")


def test_the_modules_take_slices() -> None:
    code: dict[str, Any] = {"torch": torch, "functional": zbkern.functional}
    exec(textwrap.dedent(blocks(DOCS / "long_context.md")[1]), code)
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
