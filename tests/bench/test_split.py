"""The Llama block of bench.split: the bytes that it holds, which the docs and the model of costs quote."""

from __future__ import annotations

import pytest

from bench.split_models import LLAMA, not_of_attention
from tests.support.llama_block import TOKENS, held_and_saved


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
