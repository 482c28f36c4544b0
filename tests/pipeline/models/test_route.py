"""From a configuration to a trained model in files: measure its layers, plan, cut, train, save, export."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from tests.support.chunks import gradients_of, one_rank, results_on_threads
from tests.support.small_models import batch, make, transformers
from zbkern.pipeline import (
    ModelCosts,
    Optimizer,
    Pipeline,
    ProfileOptions,
    checkpoint,
    cut,
    export,
    layer_chunks,
    layers_of,
    plan,
    profile_layers,
    schedules,
    token_loss,
    token_targets,
)

STEPS, MICROBATCHES = 3, 4
FAMILIES = ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_moe", "deepseek_v3"))]


def measure(config: Any, **where: Any) -> ModelCosts:
    """Costs of every layer, of microbatches as those of training; where: of layer_chunks, and the group."""
    group = where.pop("group", None)
    layers = {name: zbkern.convert(chunk.double()) for name, chunk in layer_chunks(config, **where).items()}
    tokens, mask, labels = batch()
    side = {"attention_mask": mask}
    return profile_layers(
        layers, token_loss, tokens, token_targets(labels, 2), 2, group, side=side, options=ProfileOptions(repeats=1)
    )


def eager(family: str) -> Any:
    config = make(family).config
    config._experts_implementation = "eager"  # the library's grouped product takes no float64
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_measured_layers_are_those_of_the_cut(family: str) -> None:
    config = eager(family)
    whole = measure(config)
    parts = results_on_threads(2, lambda transport: measure(config, rank=transport.rank, ranks=2, group=transport))
    layers = layers_of(make(family))
    for costs in (whole, *parts):
        assert [layer.name for layer in costs.layers] == [layer.name for layer in layers]
        assert [layer.tied for layer in costs.layers] == [layer.tied for layer in layers]
        assert all(layer.forward > 0 and layer.static > 0 for layer in costs.layers)
        # weight, gradient and two moments in float64
        assert costs.layers[1].static == pytest.approx(32 * layers[1].parameters, rel=0.01)
    assert parts[0] == parts[1]
    assert [layer.activation for layer in parts[0].layers] == [layer.activation for layer in whole.layers]
    found = plan(whole, 2, MICROBATCHES, effort=0)
    names = {number: chunk.layer_names for rank in range(2) for number, chunk in of_rank(config, found, rank)}
    assert [name for number in sorted(names) for name in names[number]] == [layer.name for layer in layers]
    assert [names[n][0] for n in sorted(names)] == [layers[first].name for first in found.partition or ()]


def of_rank(config: Any, found: Any, rank: int) -> list[tuple[int, Any]]:
    return [*zip(found.schedule.chunks_of(rank), cut(config, found, rank=rank), strict=True)]


def trained(chunks: list[Any], step: Any, optimizer: Any) -> list[float]:
    """Losses of some steps on this rank."""
    tokens, mask, labels = batch()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(tokens, token_targets(labels, MICROBATCHES), {"attention_mask": mask})
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    return losses


def adam(chunks: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(dict.fromkeys(p for c in chunks for p in c.parameters())), 1e-2, eps=1e-4)


def route(family: str, folder: Path, memory_limit: float) -> tuple[list[float], tuple[int, ...]]:
    config = eager(family)
    costs = measure(config)
    found = [plan(costs, dist.get_world_size(), MICROBATCHES, memory_limit=memory_limit, effort=0)]
    dist.broadcast_object_list(found)
    chunks = [zbkern.convert(chunk.double()) for chunk in cut(config, found[0], seed=5)]
    with Pipeline(chunks, found[0].schedule, token_loss) as pipe:
        optimizer = Optimizer(adam(chunks), pipe, max_norm=0.5)
        losses = trained(chunks, pipe.step, optimizer)
        checkpoint.save(folder / "checkpoints", STEPS, pipe, optimizer)
        losses += trained(chunks, pipe.step, optimizer)
        again = checkpoint.load(folder / "checkpoints", pipe, optimizer)
        losses += trained(chunks, pipe.step, optimizer)
        export(folder / "exported", pipe)
    assert again is not None
    return losses, found[0].partition


@pytest.mark.dist
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_by_a_plan_from_measured_layers(two_ranks: Any, family: str, tmp_path: Path) -> None:
    config = eager(family)
    (chunk,) = cut(config, schedules.one_f_one_b(1, 1), seed=5)
    optimizer = adam([chunk.double()])

    def step(tokens: Tensor, targets: Any, side: dict[str, Tensor]) -> Tensor:
        ends = [*range(0, len(tokens), len(tokens) // MICROBATCHES)]
        rows = [slice(start, start + len(tokens) // MICROBATCHES) for start in ends]
        outputs = [chunk(tokens[row], attention_mask=side["attention_mask"][row]) for row in rows]
        loss = sum(token_loss(y, target) for y, target in zip(outputs, targets, strict=True)) / MICROBATCHES
        loss.backward()
        nn.utils.clip_grad_norm_(chunk.parameters(), 0.5)
        return loss.detach()

    expected = [*trained([chunk], step, optimizer), *trained([chunk], step, optimizer)]
    results = two_ranks.run(route, family, tmp_path, 1e9)
    assert results[0][1] == results[1][1]
    (losses,) = [losses for losses, _ in results if losses]
    assert losses[: 2 * STEPS] == pytest.approx(expected, rel=1e-6)  # token_loss computes in fp32
    assert losses[2 * STEPS :] == losses[STEPS : 2 * STEPS], "the checkpoint is not what was saved"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    for name, value in chunk.state_dict().items():
        found = model.state_dict()[name].double()  # of routers the library has float32 alone
        torch.testing.assert_close(found, value, rtol=1e-5, atol=2e-6, msg=name)


def test_a_share_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"at most the 7 layers; got 2 of 2"):
        layer_chunks(make("llama"), rank=2, ranks=2)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module or a configuration"):
        layer_chunks(3)


@pytest.mark.slow
def test_a_chunk_compiles_its_layers_one_by_one() -> None:
    tokens, mask, labels = batch()
    model, schedule = make("llama"), schedules.zb_v(stages=1, microbatches=2)
    given = {"input_ids": tokens, "attention_mask": mask}, token_targets(labels, 2)
    found = []
    for compiled in (False, True):
        chunks = [zbkern.convert(chunk) for chunk in cut(copy.deepcopy(model), schedule, rank=0)]
        if compiled:
            for chunk in chunks:
                chunk.compile(backend="aot_eager")
        with one_rank(chunks, schedule, token_loss) as pipe:
            found.append(({"loss": pipe.step(*given), **gradients_of(chunks)}, pipe.queue.peak_bytes))
    (expected, _), (gradients, deferred) = found
    assert deferred > 0
    assert chunks[0].whole.model.layers[0]._compiled_call_impl is not None
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)
    with pytest.raises(TypeError, match="Chunk compiles its layers one by one: call compile"):
        one_rank([torch.compile(chunk) for chunk in chunks], schedule, token_loss)


def test_a_chunk_that_is_compiled_as_a_whole_says_how_to_compile_it() -> None:
    chunk, tokens = cut(make("llama"), schedules.zb_v(stages=1, microbatches=2), rank=0)[0], batch()[0]
    with pytest.raises(TypeError, match=r"^cut: a chunk compiles its layers one by one.* call compile\(\)"):
        torch.compile(chunk, backend="eager")(tokens)
