"""The examples of docs/pipeline.md and docs/models.md run: the first on two ranks, up to its first checkpoint."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from zbkern import __main__
from zbkern.pipeline import (
    Optimizer,
    Pipeline,
    Schedule,
    StepOptions,
    cut,
    layers_of,
    plan,
    profile,
    schedules,
    token_loss,
    token_targets,
)
from zbkern.pipeline.transport.local import LocalTransport

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str = "pipeline.md") -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def make_chunk(number: int) -> nn.Module:
    chunk = nn.Sequential()
    chunk.add_module(f"layer{number}", nn.Linear(8, 8))
    return chunk


def run_example(folder: str) -> tuple[int, bool]:
    """What the page's first block leaves: how many steps it did, and whether this rank has a loss."""
    code = blocks()[0]
    code = code.replace("dist.init_process_group()", "pass").replace('"run"', repr(folder)).replace("1000", "3")
    code = code.replace("999", "2")
    batches = [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(4)]
    names: dict[str, Any] = {
        "make_chunk": make_chunk,
        "loss_fn": nn.functional.mse_loss,
        "batches": batches,
    }
    exec(code, names)
    return names["step"], names["loss"] is not None


@pytest.mark.dist
def test_the_example_runs(two_ranks: Any, tmp_path: Path) -> None:
    assert two_ranks.run(run_example, str(tmp_path / "run")) == [(3, True), (3, False)]
    assert (tmp_path / "run" / "step-00000002").is_dir()


def test_cutting_a_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llama(layers=2)
    monkeypatch.chdir(tmp_path)
    whole.save_pretrained("llama")
    tokens = torch.randint(3, 61, (4, 7))
    mask = (torch.arange(7) < torch.tensor([7, 3, 5, 6])[:, None]).long()
    labels = tokens.masked_fill(mask == 0, -100)
    names: dict[str, Any] = {"zbkern": zbkern, "tokens": tokens, "mask": mask, "labels": labels}
    names["schedule"] = schedules.one_f_one_b(1, 4)
    names["Pipeline"] = functools.partial(Pipeline, group=LocalTransport.ring(1)[0])
    exec(next(block for block in blocks("models.md") if "cut(" in block), names)
    logits = whole(tokens, attention_mask=mask).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(names["loss"], expected.detach())
    assert zbkern.unconverted(names["chunks"][0]) == {}
    exported = type(whole).from_pretrained("trained")
    assert all(torch.equal(value, exported.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_plan_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llama(layers=32)
    monkeypatch.chdir(tmp_path)
    whole.save_pretrained("llama")
    sizes = ["--stages", "4", "--microbatches", "8", "--chunks", "1", "--sequence", "64", "--effort", "0"]
    assert __main__.main(["plan", "--config", "llama/config.json", *sizes, "--out", "plan.csv"]) == 0
    names: dict[str, Any] = {"zbkern": zbkern, "Path": Path, "Schedule": Schedule, "config": whole.config}
    names["cut"] = functools.partial(cut, rank=0)
    exec(next(block for block in blocks("models.md") if "from_csv" in block), names)
    assert names["schedule"].stages == 4
    (chunk,) = names["chunks"]
    state = whole.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in chunk.state_dict().items())
    assert {int(name.split(".")[2]) for name in chunk.state_dict() if ".layers." in name} == {*range(8)}


def logging_example(line: str) -> str:
    """What the page's log line prints on the rank that has the loss, with a torch scheduler as the page says."""
    rank = torch.distributed.get_rank()
    chunk = zbkern.convert(make_chunk(rank))
    printed: list[str] = []
    with Pipeline(chunk, schedules.zb_h1(2, 4), nn.functional.mse_loss) as pipe:
        optimizer = Optimizer(torch.optim.AdamW(chunk.parameters(), lr=1.0), pipe, max_norm=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        loss = pipe.step(torch.ones(8, 8), torch.ones(8, 8))
        optimizer.step()
        scheduler.step()
        names = {"pipe": pipe, "optimizer": optimizer, "loss": loss, "step": 0, "print": printed.append}
        exec(line, names)
        assert optimizer.param_groups[0]["lr"] == 0.5
    return " ".join(printed)


@pytest.mark.dist
def test_the_log_line(two_ranks: Any) -> None:
    line = next(block for block in blocks() if "bubble_rate" in block and "print" in block)
    nothing, text = two_ranks.run(logging_example, line)
    assert nothing == ""
    assert re.fullmatch(r"step 0: loss [\d.]+, norm [\d.]+, idle [\d.]+%", text)


def planned_example(code: str) -> tuple[str, bool]:
    rank = torch.distributed.get_rank()
    names: dict[str, Any] = {"chunk": zbkern.convert(make_chunk(rank)), "dist": torch.distributed}
    names |= {
        "profile": profile,
        "plan": plan,
        "Pipeline": Pipeline,
        "loss_fn": nn.functional.mse_loss if rank == 1 else None,
    }
    names |= {"inputs": torch.ones(16, 8), "targets": torch.ones(16, 8)}
    exec(code.replace("range(4)", "range(2)").replace("stages=4", "stages=2, effort=1"), names)
    with names["pipe"] as pipe:
        return pipe.schedule.to_csv(), pipe.step(names["inputs"], names["targets"]) is not None


@pytest.mark.dist
def test_the_measured_plan(two_ranks: Any) -> None:
    (first, nothing), (second, loss) = two_ranks.run(
        planned_example, next(b for b in blocks("models.md") if "broadcast" in b)
    )
    assert first == second
    assert (nothing, loss) == (False, True)


def llama(layers: int) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install zbkern[test]")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the page is about transformers 5")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 61, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=2)
    config.tie_word_embeddings = True
    return transformers.LlamaForCausalLM(config)


def test_a_plan_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llama(layers=6)
    monkeypatch.chdir(tmp_path)
    whole.save_pretrained("llama")
    tokens, asked = torch.randint(3, 61, (4, 7)), []

    def pipeline(chunks: Any, schedule: Any, loss_fn: Any) -> int:
        return len(chunks)

    names: dict[str, Any] = {
        "zbkern": zbkern,
        "config": whole.config,
        "tokens": tokens,
        "labels": tokens,
        "mask": torch.ones(4, 7),
        "token_loss": token_loss,
        "token_targets": token_targets,
        "Pipeline": pipeline,
        "cut": functools.partial(cut, rank=1),
        "dist": SimpleNamespace(broadcast_object_list=lambda found: asked.append(len(found))),
    }
    block = next(block for block in blocks("models.md") if "profile_layers" in block)
    exec(block.replace("memory_limit=70e9", "memory_limit=70e9, effort=0"), names)
    found = names["found"][0]
    assert [layer.name for layer in names["costs"].layers] == [layer.name for layer in layers_of(whole)]
    assert len(found.partition) == len(found.schedule.placement)
    assert found.schedule.stages == 4
    assert asked == [1]
    state = whole.state_dict()
    assert names["pipe"] == len(names["chunks"]) == found.schedule.chunks
    for chunk in names["chunks"]:
        assert all(torch.equal(value, state[name]) for name, value in chunk.state_dict().items())


def growing_batches() -> int:
    """Steps of 2 and 4 microbatches in turn, clipped or not, as one process does them; how many were undone."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).double() for _ in range(2)]
    layers[0].weight.data *= 10  # so that the first rank's gradients are the small ones, and do not tell of clipping
    plain = nn.Sequential(*copy.deepcopy(layers))
    chunk = zbkern.convert(layers[rank])
    with contextlib.ExitStack() as stack:
        pipes = [
            stack.enter_context(Pipeline(chunk, schedules.zb_h1(2, count), nn.functional.mse_loss)) for count in (2, 4)
        ]
        optimizer = Optimizer(torch.optim.SGD(chunk.parameters(), 0.5), pipes[0], max_norm=0.5, adaptive=False)
        pipes[1].attach(optimizer)
        reference = torch.optim.SGD(plain.parameters(), 0.5)
        for step in range(8):
            inputs, targets = torch.randn(2, 8, 8, dtype=torch.double) * (0.3 if step in (2, 3, 6) else 0.03)
            optimizer.zero_grad()
            pipes[step % 2].step(inputs, targets)
            optimizer.step()
            reference.zero_grad()
            nn.functional.mse_loss(plain(inputs), targets).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step()
        optimizer.validate()
        for ours, theirs in zip(chunk.parameters(), plain[rank].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
        return optimizer.undone


@pytest.mark.dist
def test_another_number_of_microbatches(two_ranks: Any) -> None:
    assert two_ranks.run(growing_batches)[0] == 3


def drift_example(code: str, folder: str) -> tuple[str, int]:
    rank = torch.distributed.get_rank()
    chunk, printed = zbkern.convert(make_chunk(rank)), []
    with Pipeline(chunk, schedules.zb_h1(2, 4), nn.functional.mse_loss, options=StepOptions(record=True)) as pipe:
        pipe.step(torch.ones(8, 8), torch.ones(8, 8))
        exec(code.replace("step.html", f"{folder}/{rank}.html"), {"pipe": pipe, "print": printed.append})
        return printed[0], len(pipe.samples)


@pytest.mark.dist
def test_what_happened(two_ranks: Any, tmp_path: Path) -> None:
    code = next(block for block in blocks() if "drift" in block)
    for rank, (text, samples) in enumerate(two_ranks.run(drift_example, code, str(tmp_path))):
        assert text.startswith("measured ")
        assert 8 < samples <= 12  # F, B and W of four microbatches; neighbouring W are one
        assert (tmp_path / f"{rank}.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("pipeline.md", ["torchrun", "bubble_rate", "drift"]),
        ("models.md", ["cut(", "broadcast_object_list", "profile_layers", "from_csv"]),
    ],
)
def test_no_program_of_the_pages_is_left_out(page: str, told: list[str]) -> None:
    assert [mark in block for mark, block in zip(told, blocks(page), strict=True)] == [True] * len(told)
