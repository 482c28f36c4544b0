"""docs/kernels.md: its example runs, and what it quotes is what the commands print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pages import block
from zbkern.kernels import dispatch, spec

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_kernels_of_the_page() -> None:
    names: dict[str, Any] = {}
    exec(block(PAGE, "dispatch.resolve"), names)
    torch.testing.assert_close(names["dx"], names["dy"] @ names["weight"])
    torch.testing.assert_close(names["dweight"], 2 * names["dy"].T @ names["x"])


def test_the_reasons_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `zbkern info` prints them on a machine without a GPU; these tests otherwise interpret Triton."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    quoted = dict(re.findall(r"^  not (\w+): (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert quoted.keys() == {"cuda", "triton"}
    dispatch.why_not.cache_clear()
    try:
        for backend, reason in quoted.items():
            assert dispatch.why_not("linear", backend, "cpu") == reason
    finally:
        dispatch.why_not.cache_clear()


def test_the_backends_of_the_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(spec.IMPLEMENTATIONS)


def test_the_arithmetic_of_epilogues() -> None:
    """Cycles of one SM of an H100: 132 of them make 989 TFLOP/s in bf16, 4096 flop a cycle each."""
    sms, flop, peak, bandwidth = 132, 4096, 989.4e12, 3.35e12
    clock = peak / sms / flop
    m, n = 128, 256
    token = 2 * m * n / flop  # cycles in which a tile of W multiplies one token, or of dgrad one input
    memory = 8 * m * n / (bandwidth / sms / clock)  # float32, read and written
    in_turn = (1024 * token + memory) / max(1024 * token, memory)
    pieces, warps_of_a_scheduler, registers = 8, 2, 112
    moves = pieces * warps_of_a_scheduler * registers
    # of a pair of blocks that share their columns by multicast: bytes from L2 for an element of the output
    loads = [(rows + n / 2) / (rows * n) for rows in (m, m // 2)]
    said = " ".join(PAGE.read_text(encoding="utf-8").split())
    for sentence in (
        f"over 4096 inputs multiplies for {round(4096 * token, -2):,.0f} cycles",
        f"{round(memory, -2):,.0f} cycles of memory per tile, and multiplies for {token:.0f} cycles per token",
        f"below some {round(memory / token, -2):,.0f} tokens",
        f"at 1,024 a kernel that does one after the other takes {in_turn:.1f} times as long",
        f"{registers} registers per piece (some {round(moves, -2):,.0f} cycles a tile)",
    ):
        assert sentence in said, sentence
    assert loads[1] / loads[0] == 1.5
    assert "load half as much again from L2" in said
