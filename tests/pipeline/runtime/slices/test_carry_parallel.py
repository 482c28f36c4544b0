"""Sequences in slices with replicas, sharded stages, tensor parallelism, compiled blocks and 16-bit weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.two_by_two import mesh, whole, wrap
from zbkern.pipeline import Pipeline, schedules
from zbkern.pipeline.runtime.slices.carry import Carry
from zbkern.pipeline.transport.local import LocalTransport

WIDTH, HEADS, TOKENS, ROWS = 16, 4, 12, 4


class Block(nn.Module):
    """The heads are those of this rank's part of q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if carry is not None:
            k, v = (carry.append((id(self), name), each, 2) for name, each in (("k", k), ("v", v)))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = nn.functional.scaled_dot_product_attention(q, k, v, seen)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Blocks(nn.Sequential):
    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        for block in self:
            x = block(x, carry=carry)
        return x


def make(dtype: torch.dtype = torch.float64) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [Blocks(Block(), Block()).to(dtype) for _ in range(2)]


def batch(replica: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    return torch.randn(2, ROWS, TOKENS, WIDTH, generator=generator).to(dtype).unbind()


def plain(replicas: int) -> list[dict[str, Tensor]]:
    """Gradients of both chunks, in one process on whole sequences, means over the batches of replicas."""
    model = make()
    for replica in range(replicas):
        x, y = batch(replica)
        (nn.functional.mse_loss(model[1](model[0](x)), y) / replicas).backward()
    return [{name: p.grad for name, p in chunk.named_parameters() if p.grad is not None} for chunk in model]


def wrapped(kind: str, module: nn.Sequential) -> nn.Module:
    if kind != "tensor":
        return wrap(kind, module, **({"reshard_after_forward": True} if kind == "fsdp" else {}))
    part = {name: ColwiseParallel() for name in "qkv"} | {"out": RowwiseParallel()}
    for block in zbkern.convert(module):
        parallelize_module(block, mesh()["replica"], part)
    return module


def on_rank(kind: str) -> tuple[int, dict[str, Tensor]]:
    """The stage of this rank, and the whole gradients that its group has."""
    stage, replica = mesh().get_local_rank("stage"), mesh().get_local_rank("replica")
    module = wrapped(kind, make()[stage])
    x, y = batch(0 if kind == "tensor" else replica)
    schedule = schedules.zb_h1(2, 2, slices=(5, 3, 4))
    with Pipeline([module], schedule, nn.functional.mse_loss, mesh().get_group("stage")) as pipe:
        for _ in range(2):
            module.zero_grad()
            pipe.step(x, y)
    return stage, {name.removeprefix("module."): whole(p.grad) for name, p in module.named_parameters()}


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor"])
def test_replicas_shards_and_tensor_parallelism(kind: str, four_ranks: Any) -> None:
    expected = plain(1 if kind == "tensor" else 2)
    for stage, gradients in four_ranks.run(on_rank, kind):
        assert gradients.keys() == expected[stage].keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[stage][name], rtol=1e-9, atol=1e-12)


def gradients_of(chunks: list[nn.Sequential], x: Tensor, y: Tensor, slices: Any) -> list[Tensor]:
    def run(transport: LocalTransport) -> None:
        schedule = schedules.zb_h1(2, 2, slices=slices)
        with Pipeline([chunks[transport.rank]], schedule, nn.functional.mse_loss, transport) as pipe:
            pipe.step(x, y)

    results_on_threads(2, run)
    return [p.grad for chunk in chunks for p in chunk.parameters() if p.grad is not None]


@pytest.mark.slow
def test_compiled_blocks() -> None:
    chunks = [zbkern.convert(chunk) for chunk in make()]
    for chunk in chunks:
        for block in chunk:
            block.compile(backend="aot_eager")
    found = gradients_of(chunks, *batch(0), (5, 3, 4))
    for gradient, expected in zip(found, [g for each in plain(1) for g in each.values()], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_gradients_in_bfloat16_are_as_close_as_those_of_whole_sequences() -> None:
    """What slices leave to each other is summed in float32."""
    expected = [gradient for each in plain(1) for gradient in each.values()]

    def error(slices: int) -> float:
        chunks = [zbkern.convert(copy.deepcopy(chunk)) for chunk in make(torch.bfloat16)]
        found = gradients_of(chunks, *batch(0, torch.bfloat16), slices)
        pairs = zip(found, expected, strict=True)
        return max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)

    assert error(6) < 1.5 * error(1)
