"""Chunks of any module: what stands beside its layers, side inputs, and torch's own wrappers around them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbkern
from tests.support.chunks import results_on_threads
from zbkern.pipeline import Optimizer, Pipeline, cut, schedules
from zbkern.pipeline.transport.local import LocalTransport


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * mask[..., None]


class Predictor(nn.Module):
    """As multi-token prediction: the next token's embedding beside what the blocks give, a tuple of two."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(16, 8)

    def forward(self, x: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.join(torch.cat((x, embedded.roll(-1, 1)), -1))


class Own(nn.Module):
    """A model of nobody's library: a mask from its tokens, positions of its own, several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.positions = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.again = nn.Embedding(11, 8)
        self.again.weight = self.embed.weight
        self.predict = Predictor()
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).double()
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = torch.sin(block(x, mask))
        x, more = self.predict(x, self.again(tokens))
        return self.head(torch.stack((x, more)))


LAYERS = {"embed": "embedding", "blocks.*": "block", "predict": "mtp", "head": "head"}


@pytest.mark.parametrize("partition", [[0, 1], [0, 2], [0, 3], [0, 5], "Ettt|mL"], ids=str)
def test_a_model_of_ones_own_with_tokens_as_side_inputs(partition: Any) -> None:
    torch.manual_seed(0)
    model = Own().double()
    tokens = torch.randint(0, 11, (4, 6))
    targets = torch.randn(4, 2, 6, 11, dtype=torch.double)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target.transpose(0, 1))

    twin = copy.deepcopy(model)
    expected = loss_fn(twin(tokens), targets)
    expected.backward()
    schedule = schedules.zb_h1(2, 2)
    # the mask and the second use of the embedding need the tokens everywhere, and its weight with them
    model.again = nn.Embedding(11, 8, _weight=model.embed.weight.detach().clone()).double()

    def of_rank(transport: LocalTransport) -> Any:
        chunk = cut(copy.deepcopy(model), schedule, partition, layers=LAYERS, rank=transport.rank)[0]
        with Pipeline(zbkern.convert(chunk), schedule, loss_fn, transport, timeout=60) as pipe:
            loss = pipe.step(None, targets, side={"tokens": tokens})
        return loss, {name: p.grad for name, p in chunk.named_parameters()}

    (_, first), (loss, second) = results_on_threads(2, of_rank)
    torch.testing.assert_close(loss, expected.detach())
    gradients = {**first, **second}
    gradients["embed.weight"] = gradients["embed.weight"] + gradients.pop("again.weight")
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


class Masked(nn.Module):
    """Its blocks take a mask, which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, torch.ones(()) if mask is None else mask)
        return x


def test_a_second_argument_comes_by_its_name() -> None:
    """By its place the first chunk alone would have it, and the others its default."""
    x, mask = torch.randn(4, 6, 8), torch.ones(4, 6)
    first, second = (cut(Masked(), schedules.zb_h1(2, 2), layers=["blocks.*"], rank=rank)[0] for rank in range(2))
    with pytest.raises(ValueError, match=r"'mask' must come by its name.*: pass \{'x': ..., 'mask': ...\} as inputs"):
        first(x, mask)
    assert second(first(x), mask=mask).shape == second(first(x, None)).shape == x.shape
    (whole,) = cut(Masked(), schedules.gpipe(1, 1), layers=["blocks.*"])
    assert whole(x, mask).shape == x.shape


class WithOwn(nn.Module):
    """Has a parameter and a buffer beside its layers, and numbers them with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.position = nn.Parameter(torch.randn(6, 8))
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.blocks = nn.ModuleDict({str(number): Block() for number in (0, 3, 12)})
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for block in self.blocks.values():
            x = block(x, self.scale.expand(x.shape[:-1]))
        return self.head(x)


def test_a_parameter_beside_the_layers_is_in_one_chunk() -> None:
    """Also where forwards run again, because an optimizer step was taken back."""
    torch.manual_seed(0)
    model, schedule = WithOwn().double(), schedules.zb_h1(2, 4)
    x, targets = torch.randn(8, 6, 8, dtype=torch.double), torch.randn(8, 6, 5, dtype=torch.double)
    twin = copy.deepcopy(model)
    single = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        single.zero_grad()
        nn.functional.mse_loss(twin(x), targets).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        single.step()

    def of_rank(transport: LocalTransport) -> Any:
        chunks = cut(copy.deepcopy(model), schedule, layers=["embed", "blocks.*", "head"], rank=transport.rank)
        with Pipeline([zbkern.convert(chunk) for chunk in chunks], schedule, nn.functional.mse_loss, transport) as pipe:
            torch_optimizer = torch.optim.SGD(chunks[0].parameters(), lr=0.1)
            optimizer = Optimizer(torch_optimizer, pipe, max_norm=0.1, adaptive=False)
            for _ in range(3):
                optimizer.zero_grad()
                pipe.step(x, targets)
                optimizer.step()
            optimizer.validate()
        return dict(chunks[0].state_dict())

    first, second = results_on_threads(2, of_rank)
    assert first.keys() & second.keys() == set()
    state = {**first, **second}
    assert state.keys() == twin.state_dict().keys()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)


def test_numbers_that_are_none_for_another_reason_are_let_through() -> None:
    """And a forward is not seen to have run twice."""
    chunk = cut(WithOwn(), schedules.zb_h1(2, 2), layers=["embed", "blocks.*", "head"], rank=1)[0]
    x = torch.randn(2, 6, 8)
    x[0, 0] = torch.inf
    chunk.whole.head.register_forward_pre_hook(lambda _, inputs: (nn.functional.dropout(inputs[0], 0.5),))
    torch.manual_seed(1)
    found = chunk(x)
    after = torch.rand(1)
    torch.manual_seed(1)
    again = chunk(x)
    assert found.isnan().any()
    assert torch.equal(found.nan_to_num(), again.nan_to_num())
    assert torch.equal(torch.rand(1), after)


def test_chunks_take_distributed_data_parallel(two_ranks: Any) -> None:
    two_ranks.run(wrap_both_chunks)


def wrap_both_chunks() -> None:
    for rank in range(2):
        torch.manual_seed(dist.get_rank())
        chunk = cut(WithOwn(), schedules.zb_h1(2, 2), layers=["embed", "blocks.*", "head"], rank=rank)[0]
        replica = nn.parallel.DistributedDataParallel(zbkern.convert(chunk))
        x = torch.randn(2, 6, 8)
        replica(x).sum().backward()  # its buffers are broadcast again
        found: list[Any] = [None, None]
        dist.all_gather_object(found, [value.tolist() for value in chunk.state_dict().values()])
        assert found[0] == found[1]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_of_chunks_take_fully_shard(two_ranks: Any, checkpointed: bool) -> None:
    """With hooks of its own on what the last layer sends, which bring the layer's weights back for its backward."""
    two_ranks.run(shard_every_layer, checkpointed)


def shard_every_layer(checkpointed: bool) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = WithOwn()
    x = torch.randn(2, 6, 8)
    model(x).sum().backward()
    names = ["embed", "blocks.*", "head"]
    chunks = [cut(copy.deepcopy(model), schedules.zb_h1(2, 2), layers=names, rank=rank)[0] for rank in range(2)]
    for chunk in map(zbkern.convert, chunks):
        if checkpointed:
            wrappers.apply_activation_checkpointing(
                chunk, check_fn=[*map(chunk.get_submodule, chunk.layer_names)].__contains__
            )
        for name in chunk.layer_names:
            fully_shard(chunk.get_submodule(name))
        fully_shard(chunk)
        x = chunk(x)
    x.sum().backward()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            expected = model.get_parameter(name.replace("_checkpoint_wrapped_module.", "")).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), expected, msg=name)
