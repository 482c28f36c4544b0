"""Load-balancing losses of the transformers library in a pipeline: those of its own models in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbkern
from tests.support.chunks import gradients_of, results_on_threads
from tests.support.meshes import cpu_mesh
from tests.support.saving import saved_in_turn, with_actions
from tests.support.small_models import batch, config_of, transformers
from tests.support.small_models import make as make_model
from zbkern.pipeline import Pipeline, Schedule, StepOptions, cut, layers_of, schedules, token_loss, token_targets
from zbkern.pipeline.transport.local import LocalTransport

COEFFICIENT = 0.7  # so that experts out of balance cost as much as wrong tokens


def make(family: str) -> nn.Module:
    model = make_model(family)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = COEFFICIENT
    return model


def one_process(model: Any, microbatches: int, masked: bool) -> tuple[float, float]:
    """The library's losses, and gradients in the model."""
    tokens, mask, labels = batch()
    found = [0.0, 0.0]
    for rows, own, targets in zip(
        tokens.chunk(microbatches), mask.chunk(microbatches), token_targets(labels, microbatches), strict=True
    ):
        outputs = model(rows, attention_mask=own if masked else None, use_cache=False)
        losses = token_loss(outputs.logits, targets), COEFFICIENT * outputs.aux_loss
        ((losses[0] + losses[1]) / microbatches).backward()
        found = [one + loss.item() / microbatches for one, loss in zip(found, losses, strict=True)]
    return found[0], found[1]


def check(
    family: str,
    schedule: Schedule,
    partition: Sequence[float] | None = None,
    masked: bool = True,
    converts: bool = False,
    change: Callable[[Any], None] = lambda model: None,
    **options: Any,
) -> None:
    model = make(family)
    tokens, mask, labels = batch()
    given = {"input_ids": tokens, "attention_mask": mask if masked else None}
    exact = 1e-6 if converts or schedule.is_sliced else 1e-12  # in float32: norms, the library's sums in another order

    def of_rank(transport: LocalTransport) -> Any:
        own = copy.deepcopy(model)
        change(own)
        chunks = cut(own, schedule, partition, rank=transport.rank)
        if converts:
            chunks = [*map(zbkern.convert, chunks)]
        with Pipeline(chunks, schedule, token_loss, transport, timeout=60, **options) as pipe:
            targets = token_targets(labels, schedule.microbatches)
            return [(call(given, targets), pipe.auxiliary_losses()) for call in (pipe.step, pipe.evaluate)], chunks

    found = results_on_threads(schedule.ranks, of_rank)
    loss, balance = one_process(model, schedule.microbatches, masked)
    for calls, _ in found:
        for own, added in calls:
            assert added == pytest.approx({"router_aux_loss": balance}, rel=exact)
            assert own is None or own.item() == pytest.approx(loss, rel=exact)
    gradients = gradients_of([chunk for _, chunks in found for chunk in chunks])
    for name, parameter in model.named_parameters():
        off = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert off < exact, (name, off)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("masked", [True, False])
def test_gradients_are_those_of_the_library(family: str, masked: bool) -> None:
    check(family, schedules.zb_v(2, 4), masked=masked)
    check(family, schedules.zb_h1(2, 2), masked=masked, converts=True)


@pytest.mark.parametrize("partition", [[0, 2, 3, 4], [0, 1, 5, 6], [0, 1.5, 2, 2.5]], ids=str)
def test_a_chunk_need_not_have_routers(partition: list[float]) -> None:
    check("qwen3_moe", schedules.zb_h1(4, 2), partition)
    check("qwen3_moe", schedules.interleaved(2, 2, chunks=2), partition)


def test_recomputed_forwards_count_once() -> None:
    schedule = with_actions(schedules.zb_h1(2, 4), saved_in_turn("recomputed"))
    check("mixtral", schedule)
    check("mixtral", schedule, options=StepOptions(recompute=("*.layers.*.mlp",)))


def test_sequences_in_slices_are_balanced_as_whole_ones() -> None:
    check("qwen3_moe", schedules.zb_v(2, 2, slices=(3, 2)), converts=True)
    check("qwen3_moe", with_actions(schedules.zb_h1(2, 2, slices=2), saved_in_turn("recomputed")), converts=True)


def checkpointed(reentrant: bool) -> Callable[[Any], None]:
    return lambda model: model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def test_checkpointed_layers() -> None:
    check("mixtral", schedules.zb_h1(2, 2), change=checkpointed(False))
    with pytest.raises(RuntimeError, match=r"checkpoints must not be reentrant.*'use_reentrant': False"):
        check("mixtral", schedules.zb_h1(2, 2), change=checkpointed(True))


def test_compiled_layers() -> None:
    model = make("qwen3_moe")
    (chunk,) = cut(model, schedules.zb_h1(1, 1), rank=0)
    tokens, mask, labels = batch()
    plain = copy.deepcopy(model)
    chunk.compile(backend="eager")
    token_loss(chunk(tokens, attention_mask=mask), token_targets(labels, 1)[0]).backward()
    one_process(plain, 1, True)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-6, atol=1e-9, msg=name)


def divided(chunk: nn.Module) -> None:
    """Each rank has half of the experts' rows of a router, and the model takes what it gives as a whole."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    mesh = cpu_mesh()

    def parts(name: str, module: nn.Module, mesh: Any) -> None:
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))

    def takes(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)

    def gives(module: nn.Module, outputs: Any, mesh: Any) -> Any:
        return tuple(output.full_tensor() for output in outputs)

    for router in [part for part in chunk.modules() if "Router" in type(part).__name__]:
        distribute_module(router, mesh, parts, takes, gives)


def sharded(chunk: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for name in chunk.layer_names:
        fully_shard(chunk.get_submodule(name), reshard_after_forward=False)
    fully_shard(chunk, reshard_after_forward=False)


def of_a_router_in_parts(divide: Callable[[Any], None], converts: bool) -> dict[str, float]:
    model, schedule = make("qwen3_moe"), schedules.gpipe(1, 2)
    loss, balance = one_process(plain := copy.deepcopy(model), 2, True)
    (chunk,) = cut(model, schedule, rank=0)
    if converts:
        zbkern.convert(chunk)
    divide(chunk)
    tokens, mask, labels = batch()
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with Pipeline(chunk, schedule, token_loss, own, timeout=60) as pipe:
        found = pipe.step({"input_ids": tokens, "attention_mask": mask}, token_targets(labels, 2))
        differences = {"loss": abs(found.item() - loss)}
        differences["balance"] = abs(pipe.auxiliary_losses()["router_aux_loss"] - balance)
    gradients = {name: parameter.grad for name, parameter in chunk.named_parameters()}
    gradients = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients.items()}
    for name, parameter in plain.named_parameters():
        differences[name] = ((gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()).item()
    return differences


@pytest.mark.dist
@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("divide", [divided, sharded])
def test_routers_in_parts(two_ranks: Any, divide: Any, converts: bool) -> None:
    for differences in two_ranks.run(of_a_router_in_parts, divide, converts):
        assert max(differences.values()) < (1e-6 if converts else 1e-12), differences


def test_losses_that_are_not_known_are_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    with pytest.raises(ValueError, match="output_router_logits must be False for DogeForCausalLM"):
        layers_of(config_of("Doge", {**sizes, "is_moe": True, "output_router_logits": True}))
    assert len(layers_of(transformers.MixtralConfig(num_hidden_layers=2, output_router_logits=True))) == 5
