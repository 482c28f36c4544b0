"""TRL's dataset and collator as docs/trainer.md uses them: losses and metrics are those of its SFTTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zbkern
from tests.support.programs import WORDS, block, save_model
from zbkern.pipeline import Optimizer, Pipeline, cut, schedules, token_loss, token_targets

transformers = pytest.importorskip("transformers", reason="needs the transformers library: pip install zbkern[test]")
trl = pytest.importorskip("trl", reason="needs TRL: pip install trl")
datasets = pytest.importorskip("datasets", reason="comes with TRL")

pytestmark = [pytest.mark.slow, pytest.mark.dist]

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
ROWS, STEPS, MICROBATCHES = 8, 4, 4


def words(count: int, generator: torch.Generator) -> str:
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator))


def conversations() -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = [(words(3 + i % 4, generator), words(2 + i % 5, generator)) for i in range(ROWS * STEPS)]
    return datasets.Dataset.from_list([{"prompt": f"{prompt} ", "completion": answer} for prompt, answer in rows])


def by_page(folder: str, out: str) -> list[tuple[float | None, float | None]]:
    """The loss and the accuracy of every step."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    schedule = schedules.zb_v(2, MICROBATCHES)
    config = transformers.AutoConfig.from_pretrained(folder)
    chunks = [zbkern.convert(chunk.float()) for chunk in cut(config, schedule, weights=folder)]
    found = []
    with Pipeline(chunks, schedule, token_loss) as pipe:
        inner = torch.optim.AdamW(torch.nn.ModuleList(chunks).parameters(), lr=1e-3, weight_decay=0.0)
        optimizer = Optimizer(inner, pipe, max_norm=1.0)
        names = {"torch": torch, "pipe": pipe, "tokenizer": tokenizer, "rows": conversations(), "OUT": out}
        exec(block(PAGE, "SFTTrainer"), names)
        for first in range(0, ROWS * STEPS, ROWS):
            batch = names["collate"](names["examples"][first : first + ROWS])
            accuracy = names["mean_token_accuracy"](batch)
            optimizer.zero_grad()
            loss = pipe.step(dict(batch), token_targets(batch["labels"], MICROBATCHES))
            optimizer.step()
            optimizer.validate()
            found.append((None if loss is None else loss.item(), accuracy))
    return found


def by_trl(folder: Path, out: Path) -> list[tuple[float, float]]:
    arguments = trl.SFTConfig(
        str(out),
        per_device_train_batch_size=ROWS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_steps=STEPS,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    trainer = trl.SFTTrainer(model, arguments, train_dataset=conversations(), processing_class=tokenizer)
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    return [(line["loss"], line["mean_token_accuracy"]) for line in log]


def packed_by_page(folder: str, out: str) -> list[float | None]:
    """The loss of every step of rows that SFTTrainer has packed."""
    schedule, config = schedules.zb_v(2, MICROBATCHES), transformers.AutoConfig.from_pretrained(folder)
    chunks = [zbkern.convert(chunk.float()) for chunk in cut(config, schedule, weights=folder)]
    found = []
    with Pipeline(chunks, schedule, token_loss) as pipe:
        names = {"torch": torch, "pipe": pipe, "rows": conversations(), "OUT": out}
        names |= {"tokenizer": transformers.AutoTokenizer.from_pretrained(folder), "token_targets": token_targets}
        exec(block(PAGE, "SFTTrainer").replace("max_length=1024", "max_length=16, packing=True"), names)
        assert any(len(row["seq_lengths"]) > 1 for row in names["examples"])
        step = block(PAGE, "collate(rows[number::MICROBATCHES])").replace("pipe.step", "pipe.evaluate")
        for first in range(0, 2 * ROWS, ROWS):
            names |= {"rows": names["examples"][first : first + ROWS], "MICROBATCHES": MICROBATCHES}
            exec(step, names)
            found.append(None if names["loss"] is None else names["loss"].item())
    return found


def packed_by_trl(folder: Path, out: Path) -> list[float]:
    arguments = trl.SFTConfig(
        str(out),
        per_device_train_batch_size=ROWS,
        learning_rate=0.0,
        max_steps=2,
        logging_steps=1,
        max_length=16,
        packing=True,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    trainer = trl.SFTTrainer(model, arguments, train_dataset=conversations(), processing_class=tokenizer)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_steps_of_a_pipeline_have_the_losses_and_the_accuracy_of_sfttrainer(two_ranks: Any, tmp_path: Path) -> None:
    """In one test also those of rows that it packs: workers that share them would each import TRL."""
    save_model(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model", eos_token="sent")
    tokenizer.save_pretrained(tmp_path / "model")
    packed = packed_by_trl(tmp_path / "model", tmp_path / "trl")
    found, elsewhere = two_ranks.run(packed_by_page, str(tmp_path / "model"), str(tmp_path / "out"))
    assert elsewhere == [None, None]
    assert found == pytest.approx(packed, rel=1e-6)
    expected = by_trl(tmp_path / "model", tmp_path / "trl")
    found, elsewhere = two_ranks.run(by_page, str(tmp_path / "model"), str(tmp_path / "out"))
    assert elsewhere == [(None, None)] * STEPS
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert len({loss for loss, _ in found}) == STEPS
