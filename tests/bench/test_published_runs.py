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
    results = [published_runs.predict(run, given["models"]) for run in given["runs"]]
    found, told = published_runs.errors_of(results), json.loads(exactness.TABLE.read_text())
    assert told["unseen"] == published_runs.unseen()
    assert {kind: {ran: each[0] for ran, each in some.items()} for kind, some in told["speeds"].items()} == {
        kind: {ran: each[0] for ran, each in some.items()} for kind, some in found.items()
    }
    for table in (found, told["speeds"]):
        for kind, some in table.items():
            for ran, (_, error, _, _) in some.items():
                assert error <= (0.2 if "experts" in kind or "longer" in kind else 0.12), (kind, ran)


def test_the_software_is_that_of_the_first_word_that_is_named() -> None:
    for run, source, name in (
        ("70B", "NeMo Megatron, NVIDIA/dgxc-benchmarking llama3.1/README_70b (24.09)", "nemo-24"),
        ("DeepSeek-V3", "NeMo Megatron, NVIDIA/dgxc-benchmarking deepseek_v3/pretraining (25.04)", "nemo-25.04"),
        ("gpt-oss (26.02)", "Megatron-Bridge, performance summary archive", "megatron-bridge"),
        ("GPT 7.1B", "Megatron-LM, README (H100)", "megatron"),
        ("8B", "torchtitan, benchmarks/llama3_h100_202412", "torch"),
        ("8B", "a page that nobody knows", "torch"),
    ):
        said = {**RUN, "run": run, "source": source}
        assert published_runs.software(said).name == published_runs.hardware_of(said).software == name
        plain = published_runs.load_hardware("h100", attention=published_runs.software(said).attention)
        if name != "torch":  # which has another GPU at torchtitan
            assert published_runs.predict(said, {}, plain) == published_runs.predict(said)


def test_errors_are_by_kind_and_software() -> None:
    ran = [{"measured": 10, "run": "", "source": source} for source in ("Megatron-LM", "Megatron-LM", "torchtitan")]
    results = [published_runs.Result(run, "dense", speed) for run, speed in zip(ran, (9, 12, 10), strict=True)]
    found = published_runs.errors_of(results)
    assert found == {"dense": {"megatron": [2, 0.158, -0.1, 0.2], "torch": [1, 0, 0, 0]}}
    assert published_runs.cell(found["dense"]["megatron"]) == "2: 16% (-10% to +20%)"
    step = published_runs.after_one(results[:2])
    assert step == pytest.approx(math.sqrt(((1.2 / 0.9 - 1) ** 2 + (0.9 / 1.2 - 1) ** 2) / 2))


def test_nothing_is_fitted_to_runs_that_are_called_unseen() -> None:
    fitted, unseen = (json.loads(path.read_text())["runs"] for path in (published_runs.RUNS, published_runs.UNSEEN))
    names = [each["run"] + each["source"] for each in (*fitted, *unseen)]
    assert len(set(names)) == len(names)
    assert all(published_runs.software(run).name != "nemo-24" or "24.09" in run["source"] for run in fitted)


def test_tensor_parallelism_on_boards_of_four_costs_what_was_measured() -> None:
    """KempnerForge's 7B on one board: FSDP of 4 GPUs, tensor parallelism of 2 beside FSDP, and of 4."""
    given = json.loads(published_runs.RUNS.read_text())["runs"]
    run = next(each for each in given if each["run"] == "7B 4 H200 tp2 fsdp2")
    alone, two, four = (
        published_runs.predict(
            {**run, "tensor_parallel": ranks, "data_parallel": 4 // ranks, "fully_shard": ranks < 4}
        ).predicted
        for ranks in (1, 2, 4)
    )
    assert (two / alone, four / alone) == pytest.approx((6495.0 / 9745.8, 6283.75 / 9745.8), rel=0.07)


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


def test_experts_of_a_fixed_capacity_do_not_wait_for_the_host() -> None:
    given = json.loads(published_runs.RUNS.read_text())["runs"]
    run = next(each for each in given if each["run"] == "DeepSeek-V3 512 H100 tp2 pp8 ep64")
    waits, fixed = (published_runs.predict({**run, "fixed_capacity": each}).predicted for each in (False, True))
    plain = published_runs.hardware_of(run)
    assert fixed == published_runs.predict(run, {}, replace(plain, expert_time=0.0)).predicted > 1.5 * waits


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
