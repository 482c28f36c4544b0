"""The model of docs/layers.md: what it computes is what torch's operations do, in a pipeline, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zbkern
from tests.support.chunks import on_threads
from tests.support.programs import blocks
from zbkern import testing
from zbkern.pipeline import Pipeline, schedules
from zbkern.pipeline.transport.local import LocalTransport

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
MODULES, FUNCTIONS, WAITING, CLASSES, PIPELINE = blocks(PAGE)


def test_the_modules_of_the_page() -> None:
    names: dict[str, Any] = {}
    exec(MODULES, names)
    assert names["y"].shape == (2, 16, 64)


def test_the_functions_of_the_page() -> None:
    """What they give is what torch's operations make of the same weights."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch}
    exec(FUNCTIONS, names)
    rows = []
    for x, gate_up, down, last in zip(
        names["x"].split(names["counts"]), *(names[n] for n in ("gate_up", "down", "last")), strict=True
    ):
        gate, up = (x @ gate_up.T / 8).chunk(2, -1)
        rows.append(F.silu(gate.clamp(max=7)) * up.clamp(-7, 7) @ down.T / 11 @ last.T / 8)
    q = F.rms_norm(torch.cat(rows), (64,)).view(1, 16, 4, 16).transpose(1, 2)
    near = torch.ones(16, 16, dtype=torch.bool).tril().triu(-7)
    h = F.scaled_dot_product_attention(q, q, q, near).transpose(1, 2).flatten(2)[0]
    torch.testing.assert_close(names["h"], h, rtol=1e-4, atol=1e-5)
    logits, labels = h @ names["head"].T, names["labels"]
    torch.testing.assert_close(names["loss"], F.cross_entropy(30 * (logits / 30).tanh(), labels), rtol=1e-4, atol=1e-5)
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(names["log_probs"], log_p.gather(-1, labels[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(names["entropy"], -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-5)


def test_what_does_not_wait_holds_nothing() -> None:
    names: dict[str, Any] = {"zbkern": zbkern, "x": torch.randn(1, 4, 8)}
    names["attention"] = zbkern.nn.Attention(8, 2)
    names["model"] = nn.ModuleDict({"attention": zbkern.nn.Attention(8, 2), "mlp": zbkern.nn.MLP(8, 16)})
    exec(WAITING, names)
    queue = zbkern.WGradQueue()
    with queue.defer():
        (names["y"] + names["model"]["attention"](names["x"])).sum().backward()
        assert queue.bytes == 0
        names["model"]["mlp"](names["x"]).sum().backward()
    assert queue.run() == 3


def chunks() -> list[Any]:
    names: dict[str, Any] = {}
    exec(CLASSES, names)
    torch.manual_seed(0)
    return [names["Chunk"](number).double() for number in range(2)]


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """x [batch, heads, tokens, size], turned as in Llama."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], -1)


def with_torch(first: nn.Module, last: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The same weights, in torch's operations."""
    x = F.embedding(tokens, first.embedding.weight)
    turns = torch.outer(torch.arange(tokens.shape[1]), first.angles)
    for block in [*first.blocks.values(), *last.blocks.values()]:
        y = F.rms_norm(x, x.shape[-1:], block.attention_norm.weight)
        q, k, v = F.linear(y, block.attention.qkv.weight).unflatten(-1, (8, 16)).transpose(1, 2).split([4, 2, 2], 1)
        y = F.scaled_dot_product_attention(turned(q, turns), turned(k, turns), v, is_causal=True, enable_gqa=True)
        x = x + F.linear(y.transpose(1, 2).flatten(-2), block.attention.output.weight)
        y, mlp = F.rms_norm(x, x.shape[-1:], block.mlp_norm.weight), block.mlp
        x = x + F.linear(F.silu(F.linear(y, mlp.gate.weight)) * F.linear(y, mlp.up.weight), mlp.down.weight)
    logits = F.linear(F.rms_norm(x, x.shape[-1:], last.norm.weight), last.head.weight)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_the_model_of_the_page_in_a_pipeline() -> None:
    tokens, targets = torch.randint(256, (2, 8, 12), generator=torch.Generator().manual_seed(0))
    model, expected = chunks(), chunks()
    loss = with_torch(*expected, tokens, targets)
    loss.backward()

    def rank_step(transport: LocalTransport) -> Any:
        names: dict[str, Any] = {"rank": transport.rank, "torch": torch, "schedules": schedules}
        names["Chunk"] = model.__getitem__
        names["Pipeline"] = lambda chunk, schedule, loss_fn: Pipeline(chunk, schedule, loss_fn, transport)
        exec(PIPELINE, names)
        with names["pipe"] as pipe:
            return pipe.step(tokens, targets), pipe.evaluate(tokens, targets), pipe.queue.peak_bytes

    (none, _, _), (ours, evaluated, _) = on_threads(2, rank_step)
    assert none is None
    torch.testing.assert_close(ours, loss.detach())
    torch.testing.assert_close(evaluated, ours)
    for found, plain in zip(model, expected, strict=True):
        testing.assert_same_gradients(found, plain)
