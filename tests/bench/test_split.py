"""The Llama block of bench.split: the bytes that it holds, which the docs and the model of costs quote."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zbkern
from bench.split import saved_bytes
from bench.split_models import LLAMA, LlamaBlock, not_of_attention, rotary_angles

TOKENS = 64


def held_and_saved(defer: Any = None) -> tuple[float, float]:
    """Numbers per token in bf16: between B and W, and between F and B."""
    block = zbkern.convert(LlamaBlock(**LLAMA, mlp=zbkern.nn.MLP).to(torch.bfloat16), defer=defer)
    size = LLAMA["width"] // LLAMA["heads"]
    x = torch.randn(1, TOKENS, LLAMA["width"], dtype=torch.bfloat16, requires_grad=True)
    queue = zbkern.WGradQueue()
    with queue.defer():
        y, saved = saved_bytes(lambda: block(x), [*block.parameters(), *rotary_angles(TOKENS, size, x.dtype)])
        y.backward(torch.randn_like(y))
    held = queue.bytes
    queue.run()
    assert all(parameter.grad is not None for parameter in block.parameters())
    return held / 2 / TOKENS, saved / 2 / TOKENS


def test_a_llama_block_holds_more_than_its_activation_unless_attention_does_not_wait() -> None:
    width, hidden, keys = LLAMA["width"], LLAMA["hidden"], LLAMA["key_heads"] * 64
    partial_sums = 2 * 2 * width / TOKENS  # of two norms, in fp32
    held, saved = held_and_saved()
    assert held == 6 * width + 2 * keys + 3 * hidden + partial_sums
    assert saved == pytest.approx(7 * width + 3 * keys + 2 * hidden, rel=0.01)  # and some statistics per token
    assert held / saved == pytest.approx(1.15, abs=0.005)
    less, same = held_and_saved(not_of_attention)
    assert same == saved
    assert held - less == 4 * width + 2 * keys  # inputs and output gradients of two products
    assert less / saved == pytest.approx(0.85, abs=0.005)
