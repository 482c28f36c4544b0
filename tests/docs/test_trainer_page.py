"""The programs of docs/trainer.md run as they stand: the first one's losses are those of transformers' Trainer."""

from __future__ import annotations

import functools
import logging.handlers
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.support.programs import block, blocks, save_model, write_lines
from zbkern.pipeline import Optimizer, Pipeline, schedules, token_loss, token_targets

transformers = pytest.importorskip("transformers", minversion="5.0", reason="cut is for transformers 5")
pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install zbkern[test]")
pytest.importorskip("tensorboard", reason="needs tensorboard: pip install zbkern[test]")

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
ROWS, STEPS, EVERY = 8, 20, 5
LINES = 60  # an epoch is six batches, so that the program begins its text anew


def run_page(*arguments: str, stop_in: int | None = None) -> int:
    """The page's program, to which the system says after some step that it must stop; the step that it came to."""
    return told_by_page(*arguments, stop_in=stop_in)[0]


def told_by_page(*arguments: str, stop_in: int | None = None) -> tuple[int, list[str]]:
    """And what it has printed."""
    printed: list[str] = []
    names: dict[str, Any] = {"print": lambda line, flush: printed.append(line)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *arguments])
        patch.setattr(dist, "init_process_group", lambda backend: None)  # there is one already
        patch.setattr(Pipeline, "step", interrupted(Pipeline.step, stop_in))
        before = signal.getsignal(signal.SIGTERM)
        try:
            exec(block(PAGE, "SummaryWriter"), names)
        finally:
            signal.signal(signal.SIGTERM, before)
    postfix = getattr(names["bar"], "postfix", None)  # of a bar that is shown
    return names["step"], [*printed, postfix] if postfix else printed


def interrupted(step: Any, number: int | None) -> Any:
    calls = []

    @functools.wraps(step)
    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        if len(calls) == number and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments, **keywords)

    return counted


def stopped_and_resumed(*arguments: str) -> list[tuple[int, list[str]]]:
    return [told_by_page(*arguments, stop_in=8), told_by_page(*arguments)]


def scalars(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    found = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    return {event.step: event.value for run in found.Runs() for event in found.Scalars(run, name)}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def by_trainer(model: Path, lines: list[str], out: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, losses of held-out text, and weights, from the same rows in the same order."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    examples = [dict(tokenizer(line)) for line in lines]
    held_out, examples = examples[:ROWS], examples[ROWS:]
    order = []
    for epoch in range(STEPS * ROWS // len(examples) + 1):
        drawn = torch.randperm(len(examples), generator=torch.Generator().manual_seed(epoch)).tolist()
        order += drawn[: len(examples) // ROWS * ROWS]
    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_steps=STEPS,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=EVERY,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=arguments,
        train_dataset=[examples[index] for index in order[: STEPS * ROWS]],
        eval_dataset=held_out,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    log = trainer.state.log_history
    losses = [line["loss"] for line in log if "loss" in line]
    return losses, [line["eval_loss"] for line in log if "eval_loss" in line], trainer.model.state_dict()


@pytest.mark.slow
@pytest.mark.dist
def test_the_program_does_what_trainer_does(two_ranks: Any, tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "text", tmp_path / "out"
    save_model(model)
    lines = write_lines(text, LINES)
    assert two_ranks.run(run_page, str(model), str(text), str(out)) == [STEPS, STEPS]
    losses, held_out, weights = by_trainer(model, lines, tmp_path / "trainer")
    assert [*scalars(out, "loss").values()] == pytest.approx(losses, rel=1e-6)
    assert scalars(out, "loss of held-out text") == pytest.approx(
        dict(zip(range(EVERY, STEPS + 1, EVERY), held_out, strict=True)), rel=1e-6
    )
    torch.testing.assert_close(tensors(out), dict(weights), rtol=1e-4, atol=1e-6)

    again = tmp_path / "again"
    (stopped, resumed), elsewhere = two_ranks.run(stopped_and_resumed, str(model), str(text), str(again))
    assert elsewhere == [(8, []), (STEPS, [])]
    eighth, last = (f"loss={scalars(out, 'loss')[step]:.4f}" for step in (8, STEPS))
    assert stopped == (8, [eighth])
    wrote = f"wrote the model and its tokenizer to {again}"
    assert resumed == (STEPS, [f"goes on after step 8, from {again}/checkpoints", wrote, last])
    assert transformers.AutoTokenizer.from_pretrained(again)("the pipeline").input_ids == [1, 2]
    assert scalars(again, "loss") == scalars(out, "loss")
    torch.testing.assert_close(tensors(again), tensors(out), rtol=0, atol=0)


def packed_and_padded(model: str) -> tuple[Any, Any]:
    import zbkern
    from zbkern.pipeline import cut

    folder = Path(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(line) for line in write_lines(folder / f"lines{dist.get_rank()}", ROWS)]
    padded = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    schedule = schedules.zb_v(2, 4)
    config = transformers.AutoConfig.from_pretrained(folder)
    chunks = [zbkern.convert(chunk) for chunk in cut(config, schedule, weights=folder)]
    with Pipeline(chunks, schedule, token_loss) as pipe:
        names = {"rows": rows, "pipe": pipe, "MICROBATCHES": 4, "token_targets": token_targets}
        exec(block(PAGE, "DataCollatorWithFlattening"), names)
        return names["loss"], pipe.step(dict(padded), token_targets(padded["labels"], 4))


@pytest.mark.dist
def test_packed_rows_have_the_loss_of_padded_ones(two_ranks: Any, tmp_path: Path) -> None:
    save_model(tmp_path)
    (packed, padded), nothing = two_ranks.run(packed_and_padded, str(tmp_path))
    assert nothing == (None, None)
    torch.testing.assert_close(packed, padded, rtol=1e-6, atol=0)


def step_of_five_rows(model: str) -> tuple[float | None, dict[str, torch.Tensor]]:
    import zbkern
    from zbkern.pipeline import cut

    names: dict[str, Any] = {"torch": torch}
    exec(block(PAGE, "def filled"), names)
    batch = names["filled"](five_rows(), 4)
    schedule = schedules.zb_v(2, 4)
    config = transformers.AutoConfig.from_pretrained(model)
    chunks = [zbkern.convert(chunk.double()) for chunk in cut(config, schedule, weights=model)]
    with Pipeline(chunks, schedule, token_loss) as pipe:
        loss = pipe.step(batch, token_targets(batch["labels"], 4))
    gradients = {name: each.grad for chunk in chunks for name, each in chunk.named_parameters()}
    return None if loss is None else loss.item(), gradients


def five_rows() -> dict[str, torch.Tensor]:
    tokens = torch.arange(30).view(5, 6) % 7
    mask = (torch.arange(6) < torch.tensor([6, 3, 4, 2, 5])[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@pytest.mark.dist
def test_a_batch_that_is_filled_has_the_loss_and_gradients_of_its_rows(two_ranks: Any, tmp_path: Path) -> None:
    save_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = model(**five_rows()).loss
    expected.backward()
    (loss, first), (_, second) = two_ranks.run(step_of_five_rows, str(tmp_path))
    assert loss == pytest.approx(expected.item(), rel=1e-6)  # cross-entropy is in float32
    for name, parameter in model.named_parameters():
        torch.testing.assert_close((first | second)[name], parameter.grad, rtol=1e-5, atol=1e-8)


def with_accelerate() -> tuple[str, Any, str]:
    """The error of a prepared chunk, the batch of a prepared loader, what is said of it; the optimizer is prepared."""
    import accelerate

    import zbkern

    heard = logging.handlers.BufferingHandler(100)
    rows = torch.arange(32.0).view(8, 4)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": dist.get_rank(), "WORLD_SIZE": 2, "LOCAL_RANK": dist.get_rank()}.items():
            patch.setenv(name, str(value))
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("OMP_NUM_THREADS", "1")
        accelerator = accelerate.Accelerator(cpu=True)
    logging.getLogger("zbkern").addHandler(heard)
    try:
        assert accelerator.num_processes == 2
        torch.manual_seed(0)
        chunk = zbkern.convert(torch.nn.Linear(4, 4))
        with pytest.raises(ValueError, match="shared with ranks") as caught:
            Pipeline([accelerator.prepare(chunk)], schedules.zb_h1(2, 2), torch.nn.functional.mse_loss, timeout=60)
        torch.manual_seed(0)
        chunk = zbkern.convert(torch.nn.Linear(4, 4))
        adamw = accelerator.prepare(torch.optim.AdamW(chunk.parameters()))
        with Pipeline([chunk], schedules.zb_h1(2, 2), torch.nn.functional.mse_loss, timeout=60) as pipe:
            optimizer = Optimizer(adamw, pipe, max_norm=1.0)
            (batch,) = next(iter(accelerator.prepare(DataLoader(TensorDataset(rows), batch_size=4))))
            pipe.step(batch, batch)
            optimizer.zero_grad()
            before = chunk.weight.detach().clone()
            pipe.step(rows, rows)
            optimizer.step()
            assert not torch.equal(before, optimizer.weights()[0])
    finally:
        logging.getLogger("zbkern").removeHandler(heard)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return str(caught.value), batch.tolist(), "".join(record.getMessage() for record in heard.buffer)


@pytest.mark.slow  # imports it
@pytest.mark.dist
def test_accelerate_prepares_optimizers_and_nothing_else(two_ranks: Any) -> None:
    (first, rows, said), (second, others, also_said) = two_ranks.run(with_accelerate)
    assert "weights of chunk 0 are shared with ranks [1]" in first
    assert "weights of chunk 1 are shared with ranks [0]" in second
    assert rows != others
    assert "ranks of one pipeline need one batch, so a DataLoader must not be sharded over them" in said + also_said


def test_no_program_of_the_page_is_left_out() -> None:
    marks = ["SummaryWriter", "DataCollatorWithFlattening", "SFTTrainer", "rows[number::MICROBATCHES]", "def filled"]
    assert [mark in each for mark, each in zip(marks, blocks(PAGE), strict=True)] == [True] * len(marks)
