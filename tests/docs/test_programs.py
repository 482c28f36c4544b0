"""The programs of pages that have one or two: of schedules, offload, long context, kernels and gradients."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import one_rank
from tests.support.programs import block, blocks
from tests.support.schedules import schedule_of
from tests.support.simulated_streams import Device
from zbkern.pipeline import Costs, Pipeline, ProfileOptions, StepOptions, plan, profile, schedules
from zbkern.pipeline.transport.local import LocalTransport

DOCS = Path(__file__).parents[2] / "docs"


def test_from_layers_to_a_plan() -> None:
    names: dict[str, Any] = {}
    planning, fusing = blocks(DOCS / "schedules.md")
    exec(planning.replace("memory_limit=150", "memory_limit=150, effort=0"), names)
    found = names["found"]
    assert names["even"].partition == (0, 9, 17, 25)
    assert found.timeline.cost <= names["even"].timeline.cost * (1 + 1e-9)
    assert len(found.partition) == len(found.schedule.placement)
    assert max(found.timeline.peak_memory) <= 150
    assert found.idle is not None
    exec(fusing, names)
    names["fused"].validate()
    assert {action.kind for row in names["fused"].actions for action in row} == {"F", "BW"}


def test_a_plan_that_offloads_and_recomputes() -> None:
    """1F1B's first rank would hold six microbatches of 5 GB, which is more than the page's memory."""
    names: dict[str, Any] = {"costs": Costs(10, 11, 9, activation=5e9, held=5.75e9, recompute=10, checkpoint=1e8)}
    code = block(DOCS / "offload.md", "offload_bandwidth")
    exec(code.replace("stages=8, microbatches=32", "stages=6, microbatches=8, effort=0"), names)
    assert max(names["p"].timeline.peak_memory) <= 20e9
    assert {action.kind for row in names["p"].schedule.actions for action in row} & {"O", "R"}


@pytest.mark.parametrize("causal", [True, False])
def test_slices_are_checked(causal: bool) -> None:
    names = {"module": zbkern.nn.Attention(8, 2, causal=causal), "inputs": torch.randn(2, 16, 8)}
    with contextlib.nullcontext() if causal else pytest.raises(ValueError, match="slices"):
        exec(block(DOCS / "long_context.md", "import check_slices"), names)


def test_parts_of_a_chunk() -> None:
    torch.manual_seed(0)
    layers = [("first", nn.Linear(8, 8)), ("norm", nn.LayerNorm(8)), ("act", nn.SiLU()), ("last", nn.Linear(8, 8))]
    chunk = nn.Sequential(OrderedDict(layers)).double()
    inputs = torch.randn(16, 8).double()
    expected = torch.autograd.grad(nn.functional.mse_loss(chunk(inputs), inputs), [*chunk.parameters()])
    names: dict[str, Any] = {"modules": [zbkern.convert(chunk)], "placement": [0], "loss_fn": nn.functional.mse_loss}
    names |= {"inputs": inputs, "targets": inputs, "plan": plan}
    names["profile"] = functools.partial(profile, group=LocalTransport.ring(1)[0])
    names["Pipeline"] = functools.partial(Pipeline, group=LocalTransport.ring(1)[0])
    code = block(DOCS / "offload.md", "StepOptions(recompute=parts)")
    names |= {"StepOptions": StepOptions, "ProfileOptions": ProfileOptions}
    code = code.replace("from zbkern.pipeline import Pipeline, ProfileOptions, StepOptions, plan, profile", "")
    exec(code.replace("stages=8, microbatches=32", "stages=1, microbatches=4, effort=0"), names)
    with names["pipe"] as pipe:
        pipe.step(inputs, inputs)
    for parameter, gradient in zip(chunk.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_kernels_of_the_page() -> None:
    names: dict[str, Any] = {}
    exec(block(DOCS / "kernels.md", "dispatch.resolve"), names)
    torch.testing.assert_close(names["dx"], names["dy"] @ names["weight"])
    torch.testing.assert_close(names["dweight"], 2 * names["dy"].T @ names["x"])


def test_a_layer_of_ones_own() -> None:
    names: dict[str, Any] = {}
    exec(block(DOCS / "gradients.md", "class Convolution"), names)
    ours, plain = (kind(3, 4, 3, padding=1, bias=False) for kind in (names["Conv1d"], torch.nn.Conv1d))
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 8)
    plain(x).square().sum().backward()
    queue = zbkern.WGradQueue()
    with queue.defer():
        ours(x).square().sum().backward()
    assert queue.pending() == 1
    queue.run()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad)


def test_w_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated device: B and forward on one stream, and the W of the loss on another."""
    device = Device(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: device.main if priority else device.side)
    monkeypatch.setattr(torch.cuda, "stream", device.on)
    layer = zbkern.nn.Linear(3, 4)
    x = torch.randn(2, 3)
    exec(
        block(DOCS / "gradients.md", "stream=torch.cuda.Stream()"),
        {"torch": torch, "zbkern": zbkern, "loss": layer(x).sum()},
    )
    device.finish()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(4, 3))
    gc.collect()  # a queue joins its stream as it goes


def test_what_tells_of_a_conversion_and_undoes_it() -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            return SimpleNamespace(loss=super().forward(x).square().mean())

    model = zbkern.convert(Model(nn.Linear(3, 3), nn.Embedding(2, 3, sparse=True))[:1])
    sparse = zbkern.convert(nn.Sequential(nn.Embedding(2, 3, sparse=True)))
    printed: list[Any] = []
    names = {"zbkern": zbkern, "model": model, "batch": {"x": torch.ones(2, 3)}, "print": printed.append}
    exec(block(DOCS / "gradients.md", "zbkern.unconverted(model)"), names)
    unconverted, coverage = printed
    assert unconverted == {}
    assert [*zbkern.unconverted(sparse)] == ["0"]
    assert coverage.share == 1.0
    assert [type(each) for each in model] == [nn.Linear]


def test_layers_and_megatrons_layouts() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="the page is about transformers 5")
    names: dict[str, Any] = {"config": transformers.LlamaConfig(num_hidden_layers=28)}
    exec(block(DOCS / "models.md", "import layers_of"), names)
    assert names["letters"] == "E" + 28 * "t" + "LL"
    assert [*names["partition"]] == [0, 8, 15, 22]
    assert names["layout"] == "Et*7|(t*7|)*2t*7L"


def test_a_collective_of_ones_own_lets_passes_and_w_go_on() -> None:
    """Whatever library has it: here one that notes what happens, in F and in B of a pipeline."""
    events: list[str] = []
    work = SimpleNamespace(wait=lambda: events.append("wait"), is_completed=lambda: True)

    def all_to_all_single(received: torch.Tensor, tokens: torch.Tensor, async_op: bool) -> Any:
        events.append("start")
        received.copy_(tokens)
        return work

    names: dict[str, Any] = {
        "torch": torch,
        "dist": SimpleNamespace(all_to_all_single=all_to_all_single),
        "zbkern": zbkern,
    }
    exec(block(DOCS / "overlap.md", "zbkern.in_flight(work.wait"), names)

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return names["exchanged"](x)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return names["exchanged"](dy)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = zbkern.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Exchange.apply(self.linear(x))

    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(Layer(), Layer()), torch.randn(2, 3, 4)
    for microbatch in zip(x, y, strict=True):
        (nn.functional.mse_loss(model(microbatch[0]), microbatch[1]) / 3).backward()
    expected = [p.grad for p in model.parameters()]
    pairs = schedules.dualpipe_v(1, 3)
    row = " ".join(f"0F{n} 1F{n} 1B{n} 0B{n} 1W{n} 0W{n}" for n in range(3))
    late_w = schedule_of(row, microbatches=3, placement=(0, 0))
    for schedule, wgrads, seen in (
        (replace(pairs, beside=()), 0, "start wait start wait start wait"),
        (pairs, 0, "start start wait wait start start"),
        (late_w, 1, "start W wait"),
    ):
        model.zero_grad()
        events.clear()
        with one_rank([*model], schedule) as pipe:
            pipe.queue.wgrads_per_collective = wgrads
            pipe.queue.listeners.append(lambda tasks: events.append("W"))
            pipe.step(x, y)
        happened = " ".join(events)
        assert seen in happened
        assert ("start start" in happened) == (schedule is pairs)
        assert happened.count("start") == happened.count("wait") == 12
        for found, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(found.grad, wanted)
