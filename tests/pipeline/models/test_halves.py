"""Chunks that begin or end between attention and MLP of a block: losses, gradients and files are those of the model."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

from tests.support.chunks import gradients_of, step_and_evaluate
from tests.support.small_models import DECODERS, batch, config_of, make, make_kind
from zbkern.pipeline import (
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
from zbkern.pipeline.models.stand_ins import Zeros


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"])
def test_a_block_with_one_part_is_whole(family: str) -> None:
    model = make(family)
    assert layers_of(model, halves=True) == layers_of(model)
    with pytest.raises(
        ValueError, match=r"must have '.*layers.1' in one chunk, and not begin one at 2.5: it cannot be"
    ):
        cut(model, schedules.zb_h1(2, 2), [0, 2.5], rank=0)


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


class PostNorm(Parallel):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.attention(x))
        return self.second(x + self.mlp(x))


class PreNorm(PostNorm):
    """With dropout, which is one module for both halves, and has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.mlp(self.second(x)))


class Scaled(PreNorm):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize(("kind", "count"), [(Parallel, 1), (PostNorm, 1), (Scaled, 1), (PreNorm, 2)])
def test_only_a_residual_after_attention_cuts_a_block(kind: type[nn.Module], count: int) -> None:
    model = nn.Sequential(*(kind() for _ in range(3))).train()
    found = layers_of(model, halves=True)
    assert len(found) == 3 * count
    assert sum(layer.parameters for layer in found) == sum(p.numel() for p in model.parameters())
    if count == 2:
        assert [layer.name for layer in found[:3]] == ["0:attention", "0:mlp", "1:attention"]
        assert "dropout.1.norm" not in {*cut(model, schedules.zb_h1(2, 2), [0, 1.5], rank=1)[0].state_dict()}


def test_other_models_are_cut_within_their_first_layer() -> None:
    model = nn.Sequential(*(PreNorm() for _ in range(2))).double().eval()
    chunks = [cut(model, schedules.zb_h1(3, 1), [0, 0.5, 1.5], rank=rank)[0] for rank in range(3)]
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    passed = x
    for chunk in chunks:
        passed = chunk(passed)
    assert torch.equal(passed, model(x))
    assert {name[:6] for name in chunks[0].state_dict()} == {"0.atte", "0.norm"}


def test_encoder_decoders_and_blocks_with_shared_weights_are_whole() -> None:
    t5 = make_kind("t5")
    assert layers_of(t5, halves=True) == layers_of(t5)
    model = nn.Sequential(PreNorm(), PreNorm())
    model[1].mlp.weight = model[0].mlp.weight
    assert len(layers_of(model, halves=True)) == 2
    with pytest.raises(ValueError, match="or shares weights"):
        cut(model, schedules.zb_h1(2, 2), [0, 0.5], rank=0)


def test_a_chunk_has_half_the_weights_and_runs_no_more() -> None:
    model = make("llama")
    first, second = (cut(model, schedules.zb_h1(2, 2), [0, 2.5], rank=rank)[0] for rank in range(2))
    block = "model.layers.1"
    halves = [
        [name.removeprefix(f"{block}.") for name in c.state_dict() if name.startswith(block)] for c in (first, second)
    ]
    assert {name.split(".")[0] for name in halves[0]} == {"self_attn", "input_layernorm"}
    assert {name.split(".")[0] for name in halves[1]} == {"mlp", "post_attention_layernorm"}
    assert isinstance(first.get_submodule(block).mlp, Zeros)
    assert not [*first.get_submodule(block).mlp.parameters()]
    assert first.layer_names[-1] == second.layer_names[0] == block


def test_layers_are_numbered_as_whole_ones_are() -> None:
    model = make("llama")
    names = [layer.name for layer in layers_of(model, halves=True)]
    assert names[:4] == [
        "model.embed_tokens",
        "model.layers.0:attention",
        "model.layers.0:mlp",
        "model.layers.1:attention",
    ]
    assert names[-2:] == ["model.norm", "lm_head"]
    for wrong in ([0, 2.25], [0, 6.5], [0, 0.5]):
        with pytest.raises((TypeError, ValueError), match="cut: partition must"):
            cut(model, schedules.zb_h1(2, 2), wrong, rank=0)
    assert cut(model, schedules.zb_h1(2, 2), [0, 3.0], rank=1)[0].layer_names[0] == "model.layers.2"


def test_measured_halves_plan_a_cut_within_a_block() -> None:
    """From layers that are measured to chunks that equal one process."""
    config, (tokens, mask, labels) = config_of(*DECODERS["llama"]), batch()
    layers = layer_chunks(config, halves=True)
    assert [*layers] == [layer.name for layer in layers_of(config, halves=True)]
    costs = profile_layers(
        layers,
        token_loss,
        tokens,
        token_targets(labels, 2),
        2,
        side={"attention_mask": mask},
        options=ProfileOptions(repeats=1),
    )
    by_name = {layer.name: layer for layer in costs.layers}
    half, other = by_name["model.layers.1:attention"], by_name["model.layers.1:mlp"]
    assert half.forward != other.forward
    counts = {layer.name: layer.parameters for layer in layers_of(config, halves=True)}
    for each in (half, other):
        assert each.static == pytest.approx(16 * counts[each.name], rel=0.05)
    found = plan(costs, 2, 4, chunks=1, effort=0)
    assert found.partition is not None
    given = tokens, token_targets(labels, 4), {"attention_mask": mask}
    model = make("llama")
    (loss, _), _ = step_and_evaluate(model, found.schedule, found.partition, token_loss, *given)
    (expected, _), _ = step_and_evaluate(model, schedules.zb_h1(2, 4), None, token_loss, *given)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("kind", ["NO_REENTRANT", "REENTRANT"])
def test_activation_checkpointing_calls_a_half_block_again(kind: str) -> None:
    model = nn.Sequential(*(PreNorm() for _ in range(3))).double().eval()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    chunks = [cut(copy.deepcopy(model), schedules.zb_h1(2, 1), [0, 1.5], rank=rank)[0] for rank in range(2)]
    for chunk in chunks:
        impl = wrappers.CheckpointImpl[kind]
        wrapped = [*map(chunk.get_submodule, chunk.layer_names)].__contains__
        wrappers.apply_activation_checkpointing(
            chunk, partial(wrappers.checkpoint_wrapper, checkpoint_impl=impl), wrapped
        )
    if kind == "REENTRANT":
        with pytest.raises(ValueError, match="set use_reentrant=False"):
            chunks[1](chunks[0](x)).square().sum().backward()
        return
    chunks[1](chunks[0](x)).square().sum().backward()
    for name, gradient in gradients_of(chunks).items():
        expected = model.get_parameter(name.replace("_checkpoint_wrapped_module.", "")).grad
        assert gradient is not None
        assert torch.equal(gradient, expected), name


def test_what_a_model_does_between_blocks_is_done_once() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.head = (
                nn.Linear(4, 4),
                nn.ModuleList(PreNorm() for _ in range(3)),
                nn.Linear(4, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = 3 * self.embed(x)
            for block in self.blocks:
                x = 2 * block(x)
            return self.head(x)

    model, x = Between().double().eval(), torch.randn(2, 3, 4, dtype=torch.float64)
    layers = ["embed", "blocks.*", "head"]
    for partition in ([0, 1.5, 3], [0, 1, 2.5], [0, 2.5, 3.5]):
        passed: Any = x
        for rank in range(3):
            passed = cut(model, schedules.zb_h1(3, 1), partition, layers=layers, rank=rank)[0](passed)
        assert torch.equal(passed, model(x)), partition
