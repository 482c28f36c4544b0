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

transformers = pytest.importorskip("transformers", reason="needs the transformers library: pip install zbkern[test]")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("cut is for transformers 5", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "finetune.py"
WORDS = ["the", "pipeline", "has", "a", "bubble", "and", "W", "runs", "in", "it", "while", "B", "is", "sent"]
STEPS = 3


def save_model(folder: Path) -> None:
    """A small Llama with a tokenizer of a few words, which pads on the right."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", *dict.fromkeys(WORDS)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(vocabulary), pad_token_id=0)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def write_lines(file: Path) -> list[str]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (8 * STEPS,), generator=generator).tolist()
    lines = [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator)) for n in lengths]
    file.write_text("\n".join(lines) + "\n")
    return lines


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
    save_model(model)
    lines = write_lines(text)
    printed = [line for lines_of_rank in two_ranks.run(run, str(model), str(text), str(out)) for line in lines_of_rank]
    losses = [float(re.fullmatch(r"lines \d+ to \d+: loss ([\d.]+)", line)[1]) for line in printed]
    assert losses == pytest.approx(losses_of_one_process(model, lines), abs=1e-4)  # printed with four places
    assert losses[-1] < losses[0]
    trained = transformers.AutoModelForCausalLM.from_pretrained(out)
    before = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert all(not torch.equal(now, then) for now, then in zip(trained.parameters(), before.parameters(), strict=True))
    assert transformers.AutoTokenizer.from_pretrained(out)("the pipeline").input_ids == [1, 2]


def test_the_readme_shows_it_as_it_stands() -> None:
    assert block(ROOT / "README.md", "AutoTokenizer").strip() == PROGRAM.read_text().strip()
