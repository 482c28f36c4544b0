"""Load-balancing losses of the transformers library : compiled, reentrant and unknown ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbkern
from tests.support.chunks import one_rank
from tests.support.ranks import cpu_mesh
from tests.support.small_models import batch, config_of, make, transformers
from zbkern.pipeline import Pipeline, cut, layers_of, schedules, token_loss, token_targets

COEFFICIENT = 0.7  # so that experts out of balance cost as much as wrong tokens


def routed(family: str) -> Any:
    model = make(family)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = COEFFICIENT
    return model


def test_checkpoints_that_are_reentrant_are_refused() -> None:
    model = routed("mixtral")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    schedule, (tokens, mask, labels) = schedules.zb_h1(1, 2), batch()
    with one_rank(cut(model, schedule, rank=0), schedule, token_loss) as pipe:
        given = {"input_ids": tokens, "attention_mask": mask}
        with pytest.raises(RuntimeError, match=r"checkpoints must not be reentrant.*'use_reentrant': False"):
            pipe.step(given, token_targets(labels, 2))


def test_compiled_layers() -> None:
    model = routed("qwen3_moe")
    plain = copy.deepcopy(model)
    (chunk,) = cut(model, schedules.zb_h1(1, 1), rank=0)
    tokens, mask, labels = batch()
    (targets,) = token_targets(labels, 1)
    chunk.compile(backend="eager")
    token_loss(chunk(tokens, attention_mask=mask), targets).backward()
    outputs = plain(tokens, attention_mask=mask, use_cache=False)
    (token_loss(outputs.logits, targets) + COEFFICIENT * outputs.aux_loss).backward()
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
    model, schedule = routed("qwen3_moe"), schedules.gpipe(1, 2)
    plain, (loss, balance) = copy.deepcopy(model), (0.0, 0.0)
    tokens, mask, labels = batch()
    targets = token_targets(labels, 2)
    for rows, own, target in zip(tokens.chunk(2), mask.chunk(2), targets, strict=True):
        outputs = plain(rows, attention_mask=own, use_cache=False)
        losses = token_loss(outputs.logits, target) / 2, COEFFICIENT * outputs.aux_loss / 2
        (losses[0] + losses[1]).backward()
        loss, balance = loss + losses[0].item(), balance + losses[1].item()
    (chunk,) = cut(model, schedule, rank=0)
    if converts:
        zbkern.convert(chunk)
    divide(chunk)
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with Pipeline(chunk, schedule, token_loss, own, timeout=60) as pipe:
        found = pipe.step({"input_ids": tokens, "attention_mask": mask}, targets)
        differences = {"loss": abs(found.item() - loss)}
        differences["balance"] = abs(pipe.last.auxiliary_losses()["router_aux_loss"] - balance)
    gradients = {name: parameter.grad for name, parameter in chunk.named_parameters()}
    gradients = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients.items()}
    for name, parameter in plain.named_parameters():
        differences[name] = ((gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()).item()
    return differences


@pytest.mark.dist
@pytest.mark.parametrize("converts", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("divide", [divided, sharded])
def test_routers_in_parts(two_ranks: Any, divide: Any, converts: bool) -> None:
    for differences in two_ranks.run(of_a_router_in_parts, divide, converts):
        assert max(differences.values()) < (1e-6 if converts else 1e-12), differences


def test_losses_that_are_not_known_are_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    with pytest.raises(ValueError, match="output_router_logits must be False for DogeForCausalLM"):
        layers_of(config_of("Doge", {**sizes, "is_moe": True, "output_router_logits": True}))
    assert len(layers_of(transformers.MixtralConfig(num_hidden_layers=2, output_router_logits=True))) == 5
