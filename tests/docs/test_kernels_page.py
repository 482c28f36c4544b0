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
