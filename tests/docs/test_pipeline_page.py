"""The examples of docs/pipeline.md run: the first on two ranks, up to its first checkpoint."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

import zbkern
from tests.support.chunks import one_rank, results_on_threads
from tests.support.programs import block, blocks
from zbkern.pipeline import Optimizer, Pipeline, StepOptions, cut, schedules, token_loss, token_targets

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


def make_chunk(number: int) -> nn.Module:
    chunk = nn.Sequential()
    chunk.add_module(f"layer{number}", nn.Linear(8, 8))
    return chunk


def run_example(folder: str) -> tuple[int, bool]:
    """What the page's first block leaves: how many steps it did, and whether this rank has a loss."""
    code = blocks(PAGE)[0]
    code = code.replace("dist.init_process_group()", "pass").replace('"run"', repr(folder)).replace("1000", "3")
    code = code.replace("999", "2")
    batches = [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(4)]
    names: dict[str, Any] = {"make_chunk": make_chunk, "loss_fn": nn.functional.mse_loss, "batches": batches}
    exec(code, names)
    return names["step"], names["loss"] is not None


@pytest.mark.dist
def test_the_example_runs(two_ranks: Any, tmp_path: Path) -> None:
    assert two_ranks.run(run_example, str(tmp_path / "run")) == [(3, True), (3, False)]
    assert (tmp_path / "run" / "step-00000002").is_dir()


def test_a_module_adds_its_loss() -> None:
    code = block(PAGE, "import add_loss")
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    router, inputs = names["Router"](8, 4), torch.randn(6, 8)
    with one_rank(router, schedules.zb_h1(1, 2)) as pipe:
        pipe.step(inputs, torch.zeros(6, 4))
        expected = 1e-3 * router.gate(inputs).logsumexp(-1).square().mean().item()
        assert pipe.last.auxiliary_losses() == pytest.approx({"z-loss": expected})


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
    line = block(PAGE, "gather_timeline().bubble_rate")
    nothing, text = two_ranks.run(logging_example, line)
    assert nothing == ""
    assert re.fullmatch(r"step 0: loss [\d.]+, norm [\d.]+, idle [\d.]+%", text)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_several_optimizers() -> None:
    """Embeddings, norms and the head are not the matrices' optimizer's, and a step is one of both."""
    from tests.support.small_models import batch, make

    code = block(PAGE, "torch.optim.Muon")
    schedule = schedules.zb_h1(1, 2)
    chunks = [zbkern.convert(chunk) for chunk in cut(make("llama"), schedule, rank=0)]
    with one_rank(chunks, schedule, token_loss) as pipe:
        names: dict[str, Any] = {"torch": torch, "chunks": chunks, "pipe": pipe, "Optimizer": Optimizer}
        exec(code, names)
        tokens, _, labels = batch()
        pipe.step({"input_ids": tokens}, token_targets(labels, 2))
        norms = [get_total_norm([p.grad for p in names[part]]).item() for part in ("matrices", "rest")]
        names["optimizer"].step()
    assert len(names["matrices"]) == 4 * 7
    assert names["optimizer"].last_norms == pytest.approx(norms, rel=1e-6)


class Engine:
    """An inference engine."""

    def load_weights(self, weights: Any) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}


def test_between_steps() -> None:
    """The engine has the whole model on each rank, the average is what is evaluated, and weights are as they were."""
    from torch.optim.swa_utils import AveragedModel

    from tests.support.small_models import batch, make

    code = block(PAGE, "full_weights")
    model, schedule, (tokens, _, labels) = make("gpt2"), schedules.zb_h1(2, 4), batch()

    def rank(transport: Any) -> Any:
        chunks = [zbkern.convert(chunk) for chunk in cut(copy.deepcopy(model), schedule, rank=transport.rank)]
        with Pipeline(chunks, schedule, token_loss, transport, timeout=60) as pipe:
            optimizer = Optimizer(torch.optim.AdamW(chunks[0].parameters(), 0.1), pipe)
            average = AveragedModel(nn.ParameterList(optimizer.weights()))  # of what the model began with
            average.update_parameters(nn.ParameterList(optimizer.weights()))
            names: dict[str, Any] = {"torch": torch, "pipe": pipe, "optimizer": optimizer, "average": average}
            names |= {"inputs": {"input_ids": tokens}, "targets": token_targets(labels, 4), "engine": Engine()}
            pipe.step(names["inputs"], names["targets"])
            optimizer.step()
            exec(code, names)
            after = {name: p.detach().clone() for name, p in chunks[0].named_parameters()}
        return names["engine"].weights, after, names["losses"], names["held_out"]

    (first, after, _, _), (second, more, losses, held_out) = results_on_threads(2, rank)
    trained = copy.deepcopy(model)
    trained.load_state_dict(first, strict=False)
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, {**after, **more}[name])
        assert torch.equal(second[name], first[name])
    for plain, loss in ((trained, sum(losses) / 4), (model, held_out)):
        parts = zip(tokens.chunk(4), token_targets(labels, 4), strict=True)
        of_parts = [token_loss(plain(input_ids=part, use_cache=False).logits, target) for part, target in parts]
        torch.testing.assert_close(loss, sum(of_parts).detach() / 4, rtol=1e-10, atol=0)


def test_an_average_of_weights() -> None:
    """tests/pipeline/optimizer/test_step_boundary.py reads weights of steps that are undone."""
    code = block(PAGE, "get_ema_multi_avg_fn")
    chunk, batches = make_chunk(0), [torch.randn(2, 8, 8).unbind() for _ in range(3)]
    plain, averages = copy.deepcopy(chunk), []
    with one_rank(chunk, schedules.zb_h1(1, 4)) as pipe:
        optimizer = Optimizer(torch.optim.SGD(chunk.parameters(), 0.5), pipe)
        names: dict[str, Any] = {"torch": torch, "pipe": pipe, "optimizer": optimizer, "batches": batches}
        exec(code, names)
    reference = torch.optim.SGD(plain.parameters(), 0.5)
    for inputs, targets in batches:
        reference.zero_grad()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        reference.step()
        weights = [weight.detach().clone() for weight in plain.parameters()]
        averages = torch._foreach_lerp(averages or weights, weights, 0.1)
    torch.testing.assert_close(list(names["average"].module), averages)


def drift_example(code: str, folder: str) -> tuple[str, int]:
    rank = torch.distributed.get_rank()
    chunk, printed = zbkern.convert(make_chunk(rank)), []
    with Pipeline(chunk, schedules.zb_h1(2, 4), nn.functional.mse_loss, options=StepOptions(record=True)) as pipe:
        pipe.step(torch.ones(8, 8), torch.ones(8, 8))
        exec(code.replace("step.html", f"{folder}/{rank}.html"), {"pipe": pipe, "print": printed.append})
        return printed[0], len(pipe.last.samples)


@pytest.mark.dist
def test_what_happened(two_ranks: Any, tmp_path: Path) -> None:
    code = block(PAGE, "drift")
    for rank, (text, samples) in enumerate(two_ranks.run(drift_example, code, str(tmp_path))):
        assert text.startswith("measured ")
        assert 8 < samples <= 12  # F, B and W of four microbatches; neighbouring W are one
        assert (tmp_path / f"{rank}.html").read_text().startswith("<!doctype html>")


def test_no_program_of_the_page_is_left_out() -> None:
    told = ["torchrun", "AveragedModel", "bubble_rate", "torch.optim.Muon", "full_weights", "drift", "import add_loss"]
    assert [mark in each for mark, each in zip(told, blocks(PAGE), strict=True)] == [True] * len(told)
