"""From a configuration to a plan, and to chunks that are compiled: what `layer_chunks` measures is what `cut` makes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zbkern
from tests.support.chunks import gradients_of, one_rank, results_on_threads
from tests.support.small_models import batch, make
from zbkern.pipeline import (
    ModelCosts,
    ProfileOptions,
    cut,
    layer_chunks,
    layers_of,
    plan,
    profile_layers,
    schedules,
    token_loss,
    token_targets,
)

MICROBATCHES = 4
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
    parts = results_on_threads(2, lambda transport: measure(config, rank=transport.rank, ranks=2, group=transport))
    layers = layers_of(make(family))
    for costs in parts:
        assert [layer.name for layer in costs.layers] == [layer.name for layer in layers]
        assert [layer.tied for layer in costs.layers] == [layer.tied for layer in layers]
        assert all(layer.forward > 0 and layer.static > 0 for layer in costs.layers)
        # weight, gradient and two moments in float64
        assert costs.layers[1].static == pytest.approx(32 * layers[1].parameters, rel=0.01)
    assert parts[0] == parts[1]
    found = plan(parts[0], 2, MICROBATCHES, effort=0)
    names = {number: chunk.layer_names for rank in range(2) for number, chunk in of_rank(config, found, rank)}
    assert [name for number in sorted(names) for name in names[number]] == [layer.name for layer in layers]
    assert [names[n][0] for n in sorted(names)] == [layers[first].name for first in found.partition or ()]


def of_rank(config: Any, found: Any, rank: int) -> list[tuple[int, Any]]:
    return [*zip(found.schedule.chunks_of(rank), cut(config, found, rank=rank), strict=True)]


def test_a_share_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"at most the 7 layers; got 2 of 2"):
        layer_chunks(make("llama"), rank=2, ranks=2)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module or a configuration"):
        layer_chunks(3)


@pytest.mark.slow
@pytest.mark.parametrize("partition", [None, [0, 2.5]], ids=str)
def test_a_chunk_compiles_its_layers_one_by_one(partition: list[float] | None) -> None:
    tokens, mask, labels = batch()
    model, schedule = make("llama"), schedules.zb_v(stages=1, microbatches=2)
    given = {"input_ids": tokens, "attention_mask": mask}, token_targets(labels, 2)
    found = []
    for compiled in (False, True):
        chunks = [zbkern.convert(chunk) for chunk in cut(copy.deepcopy(model), schedule, partition, rank=0)]
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
