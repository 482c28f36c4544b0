"""bench.models: every schedule fits the memory it was given, and no plan is slower than what it is compared with."""

from __future__ import annotations

import functools

import pytest

from bench import models


@pytest.mark.slow
def test_a_row(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "figures", functools.cache(models.figures))
    assert models.main(["--only", "gemma-2-9b", "--per-stage", "1", "--effort", "0"]) == 0
    assert "| gemma-2-9b |" in capsys.readouterr().out
    found = models.figures("gemma-2-9b", "h100", 1, 1.0, 0)
    assert found["plan"] <= found["best_cost"] * (1 + 1e-9) <= found["one_f_one_b"] * (1 + 1e-9)
    assert found["microbatches"] == found["stages"] == 8
    assert len(found["partition"]) == 8 * found["plan_chunks"]
    assert 0.9 < found["held"] < 1.2
    assert found["halves"] < found["plan"]
    assert found["halves_bubble"] < found["bubble"]
    more = models.figures("gemma-2-9b", "h100", 1, 1.5, 0)
    assert more["limit"] == 1.5 * found["limit"]
    assert more["plan"] <= found["plan"] * (1 + 1e-9)
