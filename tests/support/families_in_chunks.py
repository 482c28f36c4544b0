"""Small models of every family in chunks that pass on tensors alone: what ranks compute, in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.families import ATTEMPTS, loss_of, small
from zbkern.pipeline import cut, schedules, token_loss, token_targets

SIZES = {"num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "num_key_value_heads": 4}
QUIET = {
    "resid_dropout": 0.0,
    "residual_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "embedding_size": 32,
}


def made(name: str) -> nn.Module:
    """Four blocks, so that each of four ranks can have one."""
    reasons = []
    for heads in (4, 2):
        for without, other in ATTEMPTS:
            sizes = {**SIZES, "num_key_value_heads": heads, **QUIET}
            torch.manual_seed(0)
            try:
                loss_of(small(name, without, {**other, **sizes}).float())
            except Exception as error:  # whatever a configuration that does not fit raises
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            return small(name, without, {**other, **sizes}).float().train()
    pytest.skip(f"no small configuration: {reasons[0]}")


def batch() -> tuple[Tensor, Tensor, Any]:
    tokens = torch.randint(3, 60, (4, 10), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(10) < torch.tensor([10, 4, 7, 2])[:, None]).long()
    tokens = tokens.masked_fill(mask == 0, 0)
    return tokens, mask, token_targets(tokens.masked_fill(mask == 0, -100), 1)[0]


def tensors(passed: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(passed) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def received(passed: Any) -> Any:
    """What the next rank gets of it: values without their history."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), passed)


def through_ranks(model: nn.Module, partition: Sequence[float]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients by name of chunks that pass on tensors alone, and sum gradients of what they share."""
    tokens, mask, targets = batch()
    schedule = schedules.one_f_one_b(len(partition), 1)
    chunks = [cut(copy.deepcopy(model), schedule, partition, rank=rank)[0] for rank in range(len(partition))]
    given: list[Any] = [tokens]
    outputs: list[Any] = []
    for chunk in chunks:
        inputs = given[-1]
        positional, keywords = ([], inputs) if isinstance(inputs, dict) else ([inputs], {})
        outputs.append(chunk(*positional, attention_mask=mask, **keywords))
        given.append(received(outputs[-1]))
    loss = token_loss(outputs[-1], targets)
    loss.backward()
    for output, passed in reversed([*zip(outputs[:-1], given[1:-1], strict=True)]):
        pairs = [(y, x.grad) for y, x in zip(tensors(output), tensors(passed), strict=True) if x.grad is not None]
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
    gradients = {name: p.grad for chunk in chunks for name, p in chunk.named_parameters(remove_duplicate=False)}
    shared: dict[str, dict[int, Tensor]] = {}
    for chunk in chunks:
        for label, parameter in chunk.tied_parameters.items():
            if parameter.grad is not None:
                shared.setdefault(label, {})[id(parameter)] = parameter.grad
    names = [pair for chunk in chunks for pair in chunk.shared_names.items()]
    gradients.update({name: sum(shared[label].values(), torch.tensor(0.0)) for label, name in names if label in shared})
    return loss.detach(), gradients
