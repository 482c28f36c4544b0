"""Models that people bring: what a chunk could not do as the whole model is refused; what is near to that trains."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbkern
from tests.support.chunks import needed, results_on_threads, run_pipelines
from zbkern.pipeline import Pipeline, PipelineError, cut, schedules
from zbkern.pipeline.transport.local import LocalTransport


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Brought(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for number in range(4):
            x = self.block(number, x)
        return self.head(x)

    def block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x)


class Reentrant(Brought):
    def block(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=True)


class Frozen(Brought):
    """The same, but nothing before the layer without gradients has any."""

    def block(self, number: int, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(number > 1):
            return self.blocks[number](x.detach() if number < 2 else x)


class BackwardHook(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] / 2,))


class OldHook(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_backward_hook(lambda module, inner, outer: None)


class HookBefore(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_pre_hook(lambda module, outer: (outer[0] * 3,))


class CheckpointedHook(BackwardHook):
    def block(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=False)


class HookInside(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].linear.register_full_backward_hook(lambda module, inner, outer: (inner[0] / 2,))


class Scales(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(())) for _ in range(4)])

    def block(self, number: int, x: Tensor) -> Tensor:
        scales = [*self.scales]
        assert len(self.scales) == 4
        return scales[number] * self.blocks[number](x)


class TokensBehind(Brought):
    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) + nn.functional.one_hot(tokens, 11)


class Leaving(Residual):
    def forward(self, x: Tensor) -> Tensor:
        self.loss = x.square().mean()
        return super().forward(x)


class Left(Brought):
    """Each block leaves a loss, which the model adds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Leaving() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) + sum(block.loss for block in self.blocks)


class Twice(Brought):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


class OtherNames(Brought):
    """The blocks and the embedding have other names, too, some of them before."""

    def __init__(self) -> None:
        super().__init__()
        blocks, self.tokens = self.blocks, self.embed
        del self.blocks
        self.stack, self.first, self.blocks = nn.Sequential(*blocks), blocks[0], blocks
        self.last = self.stack[3:]


class TiedBeside(Brought):
    """Its scores are made by what stands beside the layers, with the weight of the embedding and that of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.mixed = nn.Linear(8, 11), nn.Linear(8, 8)
        self.scores.weight, self.mixed.weight = self.embed.weight, self.blocks[1].linear.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for number in range(4):
            x = self.block(number, x)
        return self.scores(self.mixed(x))


class SharedBeside(TiedBeside):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = self.blocks[1].linear


class Padded(Brought):
    """torch's encoder makes nested tensors in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=self.nested)

    nested = True

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks(self.embed(tokens), src_key_padding_mask=tokens == 0))


class PaddedPlainly(Padded):
    nested = False


@dataclasses.dataclass
class Found:
    logits: Tensor


class OwnOutput(Brought):
    """An output of nobody's library, which the loss takes as it is."""

    def forward(self, tokens: Tensor) -> Any:
        return Found(super().forward(tokens))


REFUSED = {
    Reentrant: r"layer 'blocks.1' is called where gradients are off.* set use_reentrant=False",
    OldHook: r"layer 'blocks.1', whose output goes to another chunk, .* none but those of register_full_backward_hook",
    Scales: r"use 'scales', which stands beside the layers and is in the chunk of 'head' alone",
    TokensBehind: r"uses its argument 'tokens' outside of its first layer.*side=\{'tokens': tensor\}",
    Left: r"uses 'loss' of 'blocks.0', which another chunk holds: .*zbkern.pipeline.add_loss",
    Twice: r"'blocks.0' and 'blocks.2' are one module",
    SharedBeside: r"'blocks.1.linear' and 'mixed' are one module, and the second .* in the chunk of 'blocks.3': cut so "
    r"that .* has both, or make them two.* such as model.mixed.weight = model.blocks.1.linear.weight",
    Padded: r"layer 'blocks.layers.0' must get plain tensors.* enable_nested_tensor=False",
}


def trained(make: type[Brought]) -> None:
    """Asserts that a step and an evaluation are those of one process, over the first cut between two blocks."""
    torch.manual_seed(0)
    model, given = make().double(), torch.randint(1, 11, (4, 6))
    given[1, 4:] = 0

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        logits = output.logits if isinstance(output, Found) else output
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    twin = copy.deepcopy(model)
    expected = loss_fn(twin(given), given)
    expected.backward()
    padded = isinstance(model, Padded)
    layers = {"embed": "embedding", "blocks.layers.*" if padded else "blocks.*": "block", "head": "head"}
    if isinstance(model, TiedBeside):
        del model.head, twin.head, layers["head"]
    batch = (None, given, {"tokens": given}) if padded else (given, given)

    def of_rank(transport: LocalTransport) -> Any:
        chunk = cut(copy.deepcopy(model), schedules.zb_h1(2, 2), layers=layers, rank=transport.rank)[0]
        with Pipeline(zbkern.convert(chunk), schedules.zb_h1(2, 2), loss_fn, transport, timeout=60) as pipe:
            losses = pipe.step(*batch), pipe.evaluate(*batch)
        return losses, {name: p.grad for name, p in chunk.named_parameters(remove_duplicate=False)}

    (_, first), (losses, second) = results_on_threads(2, of_rank)
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach())
    assert first.keys() | second.keys() == {name for name, _ in twin.named_parameters(remove_duplicate=False)}
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        for found in (first, second):
            torch.testing.assert_close(found.get(name, parameter.grad), parameter.grad, msg=name)


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_a_chunk_cannot_do_is_refused(make: type[Brought]) -> None:
    with pytest.raises((ValueError, PipelineError), match=REFUSED[make]):
        trained(make)


HOOKED = [BackwardHook, HookBefore, CheckpointedHook, HookInside]
NEAR = [Frozen, *HOOKED, OwnOutput, PaddedPlainly, OtherNames, TiedBeside]


@pytest.mark.parametrize("first", range(1, 6))
def test_backward_hooks_of_every_layer_see_what_they_see_in_one_process(first: int) -> None:
    """Also of the last layer of a chunk, and of the embedding, whose input has no gradient."""
    torch.manual_seed(0)
    model, tokens = Brought().double(), torch.randint(1, 11, (4, 6))
    layers = ["embed", "blocks.*", "head"]

    def seen(modules: Sequence[nn.Module]) -> list[dict[str, list[Any]]]:
        calls: list[dict[str, list[Any]]] = []
        for module in modules:
            calls.append({})
            for name, part in module.named_modules():
                if name in (*layers, *(f"blocks.{number}" for number in range(4))):
                    own = calls[-1].setdefault(name, [])
                    part.register_full_backward_hook(lambda _, inner, outer, own=own: own.append((inner, outer)))
                    part.register_full_backward_pre_hook(lambda _, outer, own=own: own.append(outer))
        return calls

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    schedule, twin = schedules.zb_h1(2, 2), copy.deepcopy(model)
    (expected,) = seen([twin])
    for part in tokens.chunk(2):
        (loss_fn(twin(part), part) / 2).backward()
    modules = [cut(copy.deepcopy(model), schedule, [0, first], layers=layers, rank=rank)[0] for rank in range(2)]
    found = seen([chunk.whole for chunk in modules])
    run_pipelines(schedule, modules, lambda pipe: pipe.step(*needed(pipe, tokens, tokens)), loss_fn)
    assert [bool(each) for each in expected.values()] == [True] * 6
    for name, calls in expected.items():
        torch.testing.assert_close(found[[*expected].index(name) >= first][name], calls, msg=name)


def test_a_backward_hook_of_a_compiled_layer_whose_output_is_sent_is_refused() -> None:
    (chunk,) = cut(BackwardHook(), schedules.zb_h1(2, 2), [0, 4], layers=["embed", "blocks.*", "head"], rank=0)
    chunk.get_submodule("blocks.1").compile(backend="eager")
    chunk(torch.ones(1, 3, dtype=torch.long))  # no more the last one
    (chunk,) = cut(BackwardHook(), schedules.zb_h1(2, 2), layers=["embed", "blocks.*", "head"], rank=0)
    chunk.get_submodule("blocks.1").compile(backend="eager")
    with pytest.raises(ValueError, match=r"'blocks.1', whose output goes .* no backward hook if it is compiled or one"):
        chunk(torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize("make", NEAR, ids=lambda make: make.__name__)
def test_what_is_near_to_that_trains_as_in_one_process(make: type[Brought]) -> None:
    trained(make)
