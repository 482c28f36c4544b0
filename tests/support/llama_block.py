"""The bytes that the Llama block of bench.split holds, per token."""

from __future__ import annotations

from typing import Any

import torch

import zbkern
from bench.split import saved_bytes
from bench.split_models import LLAMA, LlamaBlock, rotary_angles

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
