"""bench.models --context: what it compares fits its memory, and slices are never worse than whole sequences."""

from __future__ import annotations

import functools

import pytest

from bench import context, models


@pytest.mark.slow
def test_a_row(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "figures", functools.cache(context.figures))
    arguments = ["--context", "--only", "llama-3-70b", "--tokens", "131072", "--per-stage", "1", "--effort", "0"]
    assert models.main(arguments) == 0
    assert "| llama-3-70b |" in capsys.readouterr().out
    found = context.figures("llama-3-70b", "h100", 131072, 1, 0)
    assert found["microbatches"] == found["stages"] == 9
    assert found["plan"]["cost"] <= found["whole"]["cost"] <= found["one_f_one_b"]["cost"]
    assert found["plan"]["cost"] <= found["seq1f1b"]["cost"]
    assert found["plan"]["peak"] <= found["limit"] * (1 + 1e-9)
    assert found["plan"]["load"] <= found["plan"]["idle"] + 1e-9 <= 0.05
    assert found["quarter"]["idle"] <= 0.12
    assert found["quarter"]["peak"] < 0.4 * found["limit"]
