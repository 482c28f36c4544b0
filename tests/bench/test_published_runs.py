"""bench.published_runs: speeds of runs that others have published, predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import published_runs

LLAMA = {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
LLAMA |= {"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
RUN: dict[str, Any] = {"run": "Llama 3 405B", "model": LLAMA, "gpu": "h100"}  # arXiv 2407.21783, table 4
RUN |= {"sequence": 8192, "microbatch_size": 1, "tensor_parallel": 8, "expert_parallel": 1, "pipeline_parallel": 16}
RUN |= {"chunks": 8, "data_parallel": 64, "microbatches": 32, "measured": 430}
RUN["unit"] = "TFLOP/s per GPU, attention counted as a full square"


def test_a_file_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    slower = {**RUN, "run": "one chunk", "chunks": 1, "measured": 300}
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"runs": [RUN, slower, {**RUN, "measured": 420}]}))
    assert published_runs.main([str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(", experts rms 0.0%, 2 of 2 pairs of layouts ranked as measured")
    assert any("| one chunk" in line and "300.0" in line for line in lines)


def test_a_published_run_is_predicted() -> None:
    assert abs(published_runs.predict(RUN).error) < 0.15


def test_full_recomputation_costs_a_forward() -> None:
    run = {**RUN, "pipeline_parallel": 1, "data_parallel": 1, "chunks": 1}
    plain, again = (published_runs.predict({**run, "recomputation": said}).predicted for said in ("none", "full"))
    assert again / plain == pytest.approx(3 / 4, rel=0.05)


def test_pairs_are_those_that_differ() -> None:
    runs = [published_runs.Result({**RUN, "measured": each}, False, 10 - each) for each in (1.0, 1.05, 2.0)]
    assert published_runs.ranked(runs) == (0, 2)
    assert published_runs.ranked([each._replace(predicted=each.run["measured"]) for each in runs]) == (2, 2)
    other = published_runs.Result({**RUN, "model": {}, "measured": 9.0}, True, 1.0)
    assert published_runs.ranked([runs[0], other]) == (0, 0)


def test_gains_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    name = "14.6B"
    monkeypatch.setattr(published_runs, "ZERO_BUBBLE", {name: published_runs.ZERO_BUBBLE[name]})
    assert published_runs.main(["--gains"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "6 of 6 gains within 2 points" in lines[-1]
    cells = [each.split() for each in lines if "14.6B, p 16, m 48" in each]
    assert [each[index] for each in cells for index in (9, 15)] == ["15.0%", "29.3%"]  # 1.61 and 1.81 over 1.40
    with pytest.raises(SystemExit):
        published_runs.main([])


def test_frameworks_compute_logits_once() -> None:
    model = published_runs.architecture(LLAMA)
    costs = published_runs.model_costs(model, published_runs.load_hardware("h100"), published_runs.Job(8192))
    once = published_runs.logits_once(costs)
    assert once.layers[:-1] == costs.layers[:-1]
    head = once.layers[-1]
    assert head.forward == pytest.approx(head.backward, rel=0.02)
    assert head.weight < head.forward < 1.5 * head.weight
