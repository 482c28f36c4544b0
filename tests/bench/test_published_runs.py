"""bench.published_runs: speeds of runs that others have published, predicted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import published_runs, shares
from zbkern.planning.cost_model import exactness
from zbkern.planning.cost_model.hardware import Hardware

LLAMA = {"model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
LLAMA |= {"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
RUN: dict[str, Any] = {"run": "Llama 3 405B", "model": LLAMA, "gpu": "h100"}  # arXiv 2407.21783, table 4
RUN |= {"sequence": 8192, "microbatch_size": 1, "tensor_parallel": 8, "expert_parallel": 1, "pipeline_parallel": 16}
RUN |= {"chunks": 8, "data_parallel": 64, "microbatches": 32, "measured": 430}
RUN["unit"] = "TFLOP/s per GPU, attention counted as a full square"


def test_a_file_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    slower = {**RUN, "run": "one chunk", "chunks": 1, "measured": 300}
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"models": {"405B": LLAMA}, "runs": [{**RUN, "model": "405B"}, slower, RUN]}))
    assert published_runs.main([str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(", experts rms 0.0%, 1 of 1 pairs of layouts ranked as measured")
    assert any("| one chunk" in line and "300.0" in line for line in lines)


@pytest.mark.slow
def test_the_errors_that_a_plan_prints_are_those_of_the_runs() -> None:
    given = json.loads(published_runs.RUNS.read_text())
    found = published_runs.by_kind([published_runs.predict(run, given["models"]) for run in given["runs"]])
    assert json.loads(exactness.TABLE.read_text())["speeds"] == found
    assert json.loads(exactness.TABLE.read_text())["unseen"] == published_runs.unseen()
    for kind, errors in found.items():
        most = 0.2 if "experts" in kind or "longer" in kind else 0.12
        assert errors["rms"] <= most, kind


def test_the_generation_of_software_is_the_release_that_is_named() -> None:
    for run, source, when in (
        ("70B", "NeMo Megatron, README_70b (24.09)", "24.09"),
        ("GB200 (26.02)", "Megatron-Bridge", "26.02"),
        ("8B", "torchtitan, benchmarks/llama3_h100_202412", "of no named release"),
    ):
        assert published_runs.generation({"run": run, "source": source}) == when
    results = [published_runs.Result({"measured": 10, "run": "24.09"}, "dense", speed) for speed in (9, 12)]
    assert published_runs.by_generation(results) == {"dense": {"24.09": [2, -0.1, 0.2]}}


def test_experts_across_nodes_are_as_much_slower_as_published() -> None:
    given = json.loads(published_runs.RUNS.read_text())
    inside = next(run for run in given["runs"] if run["gpu"] == "b200")
    one, other = (published_runs.predict({**inside, "expert_parallel": ep}, given["models"]) for ep in (8, 64))
    assert other.predicted / one.predicted == pytest.approx(0.59, abs=0.04)


def test_what_ran_says_which_kernels_and_gpus_there_were() -> None:
    older = {**RUN, "sequence": 65536, "source": "llm-foundry", "pipeline_parallel": 1, "chunks": 1, "data_parallel": 8}
    assert published_runs.hardware_of(older).attention == "flash_attention_1"
    assert published_runs.hardware_of({**RUN, "source": "torchtitan"}).name == "h100-500w"
    new, old = (published_runs.predict({**older, "source": source}) for source in ("Megatron-LM", "llm-foundry"))
    assert new.predicted > 1.4 * old.predicted
    again = [
        published_runs.predict({**RUN, "source": source, "recomputation": said}).predicted
        for source, said in (("Megatron-LM", "none"), ("Megatron-LM", "selective"), ("Megatron-LM", "full"))
    ]
    assert again[0] > again[1] > again[2]  # of which the second recomputes the core of attention alone


def test_the_gpus_of_a_sequence_share_its_tokens() -> None:
    run = {**RUN, "sequence": 131072, "data_parallel": 4}
    alone, shared = (published_runs.predict({**run, "context_parallel": ranks}) for ranks in (1, 16))
    assert shared.predicted == pytest.approx(alone.predicted, rel=0.2)  # per GPU
    assert shared.kind == f"{alone.kind}, context parallel"


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


def test_a_fit_finds_the_shares_that_runs_were_made_with() -> None:
    """Of an H100 that reaches a tenth more in products, and with pass times twice as long; the others stay."""
    names = [share.name for share in shares.SHARES]
    gpus = [published_runs.load_hardware("h100")] * 3
    made = {names.index("h100 matmul_share"): 1.1, names.index("pass_time"): 2.0}

    def log_error(run: int, gpu: Hardware) -> float:
        """Of runs whose speed is half of one, all of one, half of both."""
        faster, slower = math.log(gpu.matmul_share / 0.72 / 1.1), -math.log(gpu.pass_time / 0.315e-3 / 2)
        return ((faster, slower, faster / 2 + slower / 2)[run]) * 100  # far more than anchors can hold

    found = shares.fit(gpus, log_error)
    for number, (factor, share) in enumerate(zip(found.factors, shares.SHARES, strict=True)):
        if number in made:
            assert factor == pytest.approx(made[number], rel=1e-3), share
            assert found.errors == pytest.approx([0, 0, 0], abs=0.2)
        elif share.of(gpus[0]):
            assert factor * getattr(gpus[0], share.fields[0]) == pytest.approx(share.anchor), share
    without = shares.without(found, gpus, [1, 2])  # nothing tells the time of a pass
    assert without[names.index("pass_time")] == pytest.approx(0.5e-3 / 0.315e-3)


def test_frameworks_compute_logits_once() -> None:
    model = published_runs.architecture(LLAMA)
    gpu = replace(published_runs.load_hardware("h100"), split_share=0)
    costs = published_runs.Setting(model, gpu, published_runs.Job(8192)).costs
    once = published_runs.logits_once(costs)
    assert once.layers[:-1] == costs.layers[:-1]
    head = once.layers[-1]
    assert head.forward == pytest.approx(head.backward, rel=0.02)
    assert head.weight < head.forward < 1.5 * head.weight
