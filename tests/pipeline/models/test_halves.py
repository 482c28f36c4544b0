"""Chunks that begin or end between attention and MLP of a block: losses, gradients and files are those of the model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.nn import functional as F

from tests.support.chunks import gradients_of, step_and_evaluate
from tests.support.small_models import DECODERS, batch, config_of, make, make_kind
from zbkern.pipeline import (
    ProfileOptions,
    add_loss,
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


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 0.5 * gradient


class CompiledGradient(ScaledGradient):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x.view(x.shape)


def counted(block: Any, x: Tensor) -> Tensor:
    block.count += 1
    return x


def listed(block: Any, x: Tensor) -> Tensor:
    block.seen.append(x.shape)
    return x


def written(block: Any, x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


def hooked(block: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


BESIDE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "dropout": (lambda block, x: F.dropout(x, 0.3, block.training), "calls dropout outside"),
    "noise in training": (lambda block, x: x + 0.1 * torch.randn_like(x) if block.training else x, "calls"),
    "scale in training": (lambda block, x: 2 * x if block.training else x, "calls __rmul__|calls mul"),
    "scale in evaluation": (lambda block, x: x if block.training else 2 * x, "calls __rmul__|calls mul"),
    "clamp": (lambda block, x: x.clamp(-1e4, 1e4), "calls clamp outside"),
    "clamp in place": (lambda block, x: x.clamp_(-1e4, 1e4), "calls clamp_ outside"),
    "item": (written, "calls __setitem__|writes"),
    "loss": (lambda block, x: add_loss(x, (x**2).mean(), "z"), "calls pow outside"),
    "loss of nothing": (
        lambda block, x: add_loss(x, torch.ones((), dtype=x.dtype)),
        "has an autograd function",
    ),
    "gradients scaled": (lambda block, x: ScaledGradient.apply(x), "has an autograd function"),
    "gradients scaled unseen": (
        lambda block, x: CompiledGradient.apply(x),
        "has an autograd function|returns something|calls add",
    ),
    "gradients hooked": (hooked, "calls register_hook"),
    "gradients cut": (lambda block, x: x.detach(), "calls detach"),
    "layer drop": (lambda block, x: x if random.random() < 1.1 else 0 * x, "a random number of Python's"),
    "layer drop of NumPy": (lambda block, x: x if numpy.random.rand() < 1.1 else 0 * x, "a random number of NumPy's"),
    "layer drop of torch": (lambda block, x: x if torch.rand(()) < 1.1 else 0 * x, "calls __bool__"),
    "overflow": (lambda block, x: x if x.isfinite().all() else 0 * x, "calls isfinite"),
    "cast": (lambda block, x: x.float().to(x.dtype), "calls float"),
    "count": (counted, "sets its attribute 'count'"),
    "list": (listed, "sets its attribute 'seen'"),
}


class Beside(PreNorm):
    """Does more outside of its parts: before them, between or after them, or to what one gives."""

    def __init__(self, what: Callable[[Any, Tensor], Tensor], place: int) -> None:
        super().__init__()
        self.place, self.seen, self.count = place, [], 0
        self.__dict__["what"] = what

    def at(self, place: int, x: Tensor) -> Tensor:
        return self.__dict__["what"](self, x) if place == self.place else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.at(0, x)
        x = self.at(1, x + self.at(3, self.attention(self.norm(x))))
        return self.at(2, x + self.mlp(self.second(x)))


@pytest.mark.parametrize("what", BESIDE)
@pytest.mark.parametrize("place", range(3))
def test_a_block_that_does_more_than_add_to_its_residual_is_whole(what: str, place: int) -> None:
    function, reason = BESIDE[what]
    model = nn.Sequential(PreNorm(), Beside(function, place))
    for training in (True, False):
        with pytest.raises(ValueError, match=rf"'1' in one chunk, .* begin one at 1.5: .*({reason})"):
            cut(model.train(training), schedules.zb_h1(2, 2), [0, 1.5], rank=1)


@pytest.mark.parametrize(
    "what", ["loss", "loss of nothing", "gradients scaled", "layer drop", "layer drop of torch", "count"]
)
def test_what_is_done_to_what_a_part_gives_must_be_nothing_to_zeros(what: str) -> None:
    with pytest.raises(ValueError, match="'0' in one chunk"):
        cut(nn.Sequential(Beside(BESIDE[what][0], 3)), schedules.zb_h1(2, 2), [0, 0.5], rank=1)


LINEAR: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda block, x: F.dropout(x, 0.3, block.training),
    "drop path": lambda block, x: x * x.new_empty(len(x), 1, 1).bernoulli_(0.7).div_(0.7) if block.training else x,
    "scale": lambda block, x: 0.22 * x / 2,
    "cast": lambda block, x: x.float().to(x.dtype),
    "views": lambda block, x: x.reshape(-1, x.shape[-1]).view_as(x),
}


@pytest.mark.parametrize("what", LINEAR)
def test_what_is_nothing_to_zeros_may_be_done_to_what_a_part_gives(what: str) -> None:
    model = nn.Sequential(*(Beside(LINEAR[what], 3) for _ in range(2))).double()
    halves = [cut(model.train(), schedules.zb_h1(2, 2), [0, 1.5], rank=rank)[0] for rank in range(2)]
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for chunk in halves:
        chunk.eval()
    assert torch.equal(halves[1](halves[0](x)), model.eval()(x))


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_block_with_a_hook_of_its_own_is_whole(kind: str) -> None:
    model, x = nn.Sequential(PreNorm(), PreNorm()), torch.randn(2, 3, 4)

    def of_the_user(*_: Any) -> None: ...

    chunks = [cut(model, schedules.zb_h1(2, 2), [0, 0.5], rank=rank)[0] for rank in range(2)]
    for chunk in chunks:
        x = chunk(x)
    getattr(model[0], f"register_{kind}")(of_the_user)
    with pytest.raises(ValueError, match=r"it has a hook \(.*of_the_user\), which both halves would call"):
        cut(model, schedules.zb_h1(2, 2), [0, 0.5], rank=0)
    for chunk in chunks:  # registered later
        getattr(chunk.get_submodule("0"), f"register_{kind}")(of_the_user)
        with pytest.raises(ValueError, match=r"'0', of which this chunk has one half, .* \(.*of_the_user\)"):
            chunk(torch.randn(2, 3, 4))


def test_what_a_block_does_with_an_argument_is_looked_at_when_one_comes() -> None:
    class Masked(PreNorm):
        def forward(self, x: Tensor, mask: Tensor | None = None, keep: bool = True) -> Tensor:
            x = super().forward(x if mask is None else x * mask[..., None])
            return x if keep else x.relu()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Masked(), Masked()])

        def forward(self, x: Tensor, **others: Any) -> Tensor:
            for block in self.blocks:
                x = block(x, **others)
            return x

    model, x = Model().double().eval(), torch.randn(2, 3, 4, dtype=torch.float64)
    chunks = [cut(model, schedules.zb_h1(2, 2), [0, 1.5], layers=["blocks.*"], rank=rank)[0] for rank in range(2)]
    assert torch.equal(chunks[1](chunks[0](x, keep=True), keep=True), model(x))
    for side, function in (({"mask": torch.ones(2, 3)}, "mul"), ({"keep": False}, "relu")):
        for chunk in chunks:
            with pytest.raises(ValueError, match=f"'blocks.1', of which .* its forward calls {function} outside"):
                chunk(x, **side)
    assert torch.equal(chunks[1](chunks[0](x)), model(x))


def test_the_log_says_why_a_block_is_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "zbkern"):
        layers_of(nn.Sequential(PreNorm(), Parallel()), halves=True)
    assert [record.getMessage() for record in caplog.records] == [
        "layers_of: '1' cannot be cut in halves: it has not attention and an MLP one after the other, each with a norm "
        "of its input alone"
    ]


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
    with pytest.raises(ValueError, match=r"it shares weights with other layers, such as '0.mlp.weight'"):
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
