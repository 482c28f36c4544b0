"""Models whose late layers take what early ones gave: losses, gradients and weights are those of one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.optimizer_cases import clip_in_float64
from tests.support.schedules import saved_in_turn, schedule_of, with_actions
from tests.support.small_models import make
from zbkern.pipeline import Optimizer, Pipeline, Schedule, cut, layer_chunks, layers_of, schedules
from zbkern.pipeline.transport.local import LocalTransport


class Convolution(nn.Module):
    def __init__(self, channels: int, given: int | None = None, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(given or channels, channels, 3, stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.convolution(x))


class UNet(nn.Module):
    """Each level on the way up takes what the same level on the way down gave, beside what comes from below."""

    def __init__(self, levels: int = 3, size: int = 4) -> None:
        super().__init__()
        self.enter = Convolution(size, 2)
        self.down = nn.ModuleList(Convolution(size, stride=2) for _ in range(levels))
        self.middle = Convolution(size)
        self.up = nn.ModuleList(Convolution(size, 2 * size) for _ in range(levels))
        self.leave = nn.Conv1d(size, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        given = []
        for layer in self.down:
            given.append(x)
            x = layer(x)
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), given.pop()], 1))
        return self.leave(x)


class Memory(nn.Module):
    """An encoder, and a decoder each block of which takes what the encoder gives and a sum of two of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(5, 6)
        self.encoder = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Bilinear(6, 6, 6) for _ in range(4))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = early = self.front(x)
        for layer in self.encoder:
            h = torch.tanh(layer(h))
        both = h + early.tanh()
        for layer in self.decoder:
            h = torch.tanh(layer(h, both))
        return self.head(h)


class Pairs(nn.Module):
    """Layers that give a tuple; one has numbers without a gradient in it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(
            self, x: tuple[Tensor, Tensor], early: tuple[Tensor, Tensor] | None = None
        ) -> tuple[Tensor, Tensor]:
            more = 0.0 if early is None else early[0] * early[1]
            return torch.tanh(self.linear(x[0])) + more, (x[0] > 0).sum(-1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(7))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        pair = early = self.layers[0]((x, x))
        for number, layer in enumerate(self.layers[1:]):
            pair = layer(pair, early if number % 2 else None)
        return self.head(pair[0])


Made = tuple[nn.Module, list[str], dict[str, str], Tensor, Tensor]


def u_net() -> Made:
    layers = ["enter", "down.*", "middle", "up.*", "leave"]
    skips = {"enter": "up.2", "down.0": "up.1", "down.1": "up.0"}
    return UNet(), layers, skips, torch.randn(8, 2, 16), torch.randn(8, 2, 16)


def memory() -> Made:
    skips = {"front": "decoder.3", "encoder.2": "decoder.3"}
    return Memory(), ["front", "encoder.*", "decoder.*", "head"], skips, torch.randn(8, 5), torch.randn(8, 2)


def pairs() -> Made:
    return Pairs(), ["layers.*", "head"], {"layers.0": "layers.6"}, torch.randn(8, 5), torch.randn(8, 2)


MADE = {"U-Net": u_net, "memory": memory, "pairs": pairs}
SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "1F1B": lambda p: schedules.one_f_one_b(p, 4),
    "ZB-H1": lambda p: schedules.zb_h1(p, 4),
    "ZB-V": lambda p: schedules.zb_v(p, 4),
}


def partition_of(layers: int, chunks: int) -> list[int]:
    return [layers * chunk // chunks for chunk in range(chunks)]


def train(kind: str, schedule: Schedule, change: Callable[[list[nn.Module]], Any] = len) -> None:
    """Three steps, one of which is clipped where ranks have stepped already; and an evaluation. change: what is done
    to a rank's chunks."""
    torch.manual_seed(0)
    model, layers, skips, x, y = MADE[kind]()
    model, x, y = model.double(), x.double(), y.double()
    twin = copy.deepcopy(model)
    names = layers_of(model, layers)
    partition = partition_of(len(names), len(schedule.placement))

    def of_rank(transport: LocalTransport) -> Any:
        chunks = cut(copy.deepcopy(model), schedule, partition, layers=layers, skips=skips, rank=transport.rank)
        chunks = [zbkern.convert(chunk) for chunk in chunks]
        change(chunks)
        losses = []
        with Pipeline(chunks, schedule, nn.functional.mse_loss, transport, timeout=60) as pipe:
            sgd = torch.optim.SGD(nn.ModuleList(chunks).parameters(), lr=0.3, momentum=0.9)
            optimizer = Optimizer(sgd, pipe, max_norm=0.5, adaptive=False)
            for step in range(3):
                optimizer.zero_grad()
                losses.append(pipe.step(x * (1 + 4 * (step == 1)), y * (1 + 4 * (step == 1))))
                optimizer.step()
            losses.append(pipe.evaluate(x, y))
            optimizer.validate()
            assert optimizer.clipped > 0
        return [loss.item() for loss in losses if loss is not None], {
            k: v for c in chunks for k, v in c.state_dict().items()
        }

    found = results_on_threads(schedule.ranks, of_rank)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9)
    expected = []
    for step in range(3):
        sgd.zero_grad()
        loss = nn.functional.mse_loss(twin(x * (1 + 4 * (step == 1))), y * (1 + 4 * (step == 1)))
        loss.backward()
        clip_in_float64([*twin.parameters()], 0.5)
        sgd.step()
        expected.append(loss.item())
    expected.append(nn.functional.mse_loss(twin(x), y).item())
    (losses,) = [mine for mine, _ in found if mine]
    assert losses == pytest.approx(expected, rel=1e-11)
    state = {name: value for _, mine in found for name, value in mine.items()}
    assert state.keys() == twin.state_dict().keys()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", MADE)
def test_training_is_that_of_one_process(kind: str, ranks: int, schedule: str) -> None:
    train(kind, SCHEDULES[schedule](ranks))


@pytest.mark.parametrize("how", [("recomputed",), ("copied",), ("recomputed", None, "copied")])
@pytest.mark.parametrize("kind", MADE)
def test_activations_may_be_recomputed_or_offloaded(kind: str, how: Any) -> None:
    train(kind, with_actions(schedules.zb_v(2, 4), saved_in_turn(*how)))


def outputs(x: Any, chunks: Iterable[nn.Module]) -> list[Any]:
    """What each chunk gives, given what the one before gives."""
    found = [x]
    for chunk in chunks:
        found.append(chunk(**found[-1]) if isinstance(found[-1], dict) else chunk(found[-1]))
    return found[1:]


def one_by_one(model: nn.Module, partition: Sequence[float], **how: Any) -> Iterator[nn.Module]:
    """Chunks on as many ranks, made when they are asked for."""
    ranks = len(partition)
    return (cut(model, schedules.zb_h1(ranks, ranks), partition, rank=rank, **how)[0] for rank in range(ranks))


def checkpointed(chunks: list[nn.Module]) -> None:
    for chunk in chunks:
        wrappers.apply_activation_checkpointing(
            chunk, check_fn=[*map(chunk.get_submodule, chunk.layer_names)].__contains__
        )


@pytest.mark.parametrize("kind", MADE)
def test_layers_may_be_checkpointed(kind: str) -> None:
    train(kind, schedules.zb_v(2, 4), checkpointed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MADE)
def test_layers_may_be_compiled(kind: str) -> None:
    """Of one rank: torch compiles for one thread at a time."""
    three = schedule_of("0F0 1F0 2F0 2BW0 1B0 1W0 0BW0", microbatches=1, placement=[0, 0, 0])
    train(kind, three, lambda chunks: [chunk.compile(backend="aot_eager") for chunk in chunks])


def test_layers_take_fully_shard(two_ranks: Any) -> None:
    """Its hooks are on what layers send, on skips as well."""
    two_ranks.run(shard_every_layer)


def shard_every_layer() -> None:
    from torch.distributed.fsdp import fully_shard

    for kind, checkpoints in itertools.product(MADE, (False, True)):
        torch.manual_seed(0)
        model, layers, skips, x, _ = MADE[kind]()
        model(x).sum().backward()
        schedule = schedules.zb_v(2, 4)
        bounds = partition_of(len(layers_of(model, layers)), 4)
        cuts = [cut(copy.deepcopy(model), schedule, bounds, layers=layers, skips=skips, rank=rank) for rank in range(2)]
        chunks = [cuts[0][0], *cuts[1], cuts[0][1]]
        if checkpoints:
            checkpointed(chunks)
        for chunk in map(zbkern.convert, chunks):
            for name in chunk.layer_names:
                fully_shard(chunk.get_submodule(name))
            fully_shard(chunk)
        outputs(x, chunks)[-1].sum().backward()
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                expected = model.get_parameter(name.replace("_checkpoint_wrapped_module.", "")).grad
                torch.testing.assert_close(parameter.grad.full_tensor(), expected, msg=name)


def test_layers_are_measured_one_by_one() -> None:
    model, layers, skips, x, _ = u_net()
    chunks = layer_chunks(model, layers=layers, skips=skips, rank=0).values()
    assert torch.equal(outputs(x, chunks)[-1], model(x))


class Blocks(nn.Module):
    """A decoder's blocks; the last one takes what the first gave."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make("llama").model

    def forward(self, x: Tensor) -> Tensor:
        rotary = self.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(5)[None])
        first, *middle, last = self.model.layers
        early = h = first(x, position_embeddings=rotary)
        for block in middle:
            h = block(h, position_embeddings=rotary)
        return last(h + early, position_embeddings=rotary)


@pytest.mark.parametrize("partition", [[0, 1.5, 2.5, 3.5], [0, 0.5, 1, 3], [0, 1, 1.5, 3.5], [0, 2, 3, 3.5]], ids=str)
def test_half_a_block_may_have_given_or_take_what_was_given(partition: list[float]) -> None:
    model = Blocks()
    twin, x = copy.deepcopy(model), torch.randn(2, 5, 32, dtype=torch.float64)
    expected = twin(x)
    expected.sum().backward()
    how: Any = {"layers": ["model.layers.*"], "skips": {"model.layers.0": "model.layers.3"}}
    found = outputs(x, one_by_one(model, partition, **how))[-1]
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    for name, parameter in model.model.layers.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.model.layers.get_parameter(name).grad, msg=name)


def test_a_skip_is_sent_to_its_last_user_and_no_further() -> None:
    model, layers, skips, x, _ = u_net()
    given = outputs(x, one_by_one(model, range(9), layers=layers, skips=skips))
    sent = ["".join(name[-1] for name in each["skipped"]) if isinstance(each, dict) else "" for each in given]
    assert sent == ["", "r", "r0", "r01", "r01", "r0", "r", "", ""]


@pytest.mark.parametrize(
    ("skips", "said"),
    [
        (
            {"enter": "upwards.2"},
            "skips must be {layer: a later layer, the last one that uses its output}; got .*upwards",
        ),
        ({"up.1": "down.1"}, "skips must be"),
        ({}, r"name it, cut\(..., skips={'down.1': 'up.0'}\), with the last layer that uses it; or cut elsewhere"),
        ({"enter": "up.1", "down.0": "up.2", "down.1": "up.2"}, r"name it, cut\(..., skips={'enter': 'up.2'}\)"),
    ],
)
def test_skips_that_are_wrong_or_missing(skips: dict[str, str], said: str) -> None:
    model, layers, _, x, _ = u_net()
    with pytest.raises(ValueError, match=f"cut: .*{said}"):
        outputs(x, one_by_one(model, [0, 4, 7], layers=layers, skips=skips))


class Changed(nn.Module):
    """Its forward changes what its first layer gives, or calls it in some steps alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList(nn.Linear(3, 3) for _ in range(5)), how

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        h = early = torch.zeros_like(x) if self.how == "never" else first(x)
        if self.how == "in place":
            h += 1
        for number, layer in enumerate(others):
            h = layer(h if number < 3 else h + early)
        return h


@pytest.mark.parametrize("partition", [[0, 2], [0, 1]])
@pytest.mark.parametrize("grad", [True, False])
def test_what_is_changed_in_place_is_refused(partition: list[int], grad: bool) -> None:
    how: Any = {"layers": ["layers.*"], "skips": {"layers.0": "layers.4"}}
    chunks = one_by_one(Changed("in place"), [*partition, 3], **how)
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(ValueError, match=r"cut: what layer 'layers\.0' gives must stay as"),
    ):
        outputs(torch.randn(2, 3), chunks)


def test_a_layer_of_skips_that_is_not_called_is_named() -> None:
    how: Any = {"layers": ["layers.*"], "skips": {"layers.0": "layers.4"}, "rank": 0}
    (chunk,) = cut(Changed("never"), schedules.zb_h1(2, 2), [0, 2], **how)
    with pytest.raises(ValueError, match=r"cut: layer 'layers.0' of skips must be called in every forward"):
        chunk(torch.randn(2, 3))
