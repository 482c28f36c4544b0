"""`zbkern plan --config`: what it prints, and what is wrong with its arguments."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.configurations import H100, of_layers, path_of, setting_of
from zbkern.pipeline import Schedule, layers_of, plan
from zbkern.planning.command import layouts
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.hardware import TABLE, load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting

LLAMA = ["--config", path_of("llama-3-8b"), "--stages", "4", "--microbatches", "8"]
QUICK = ["--effort", "0"]
Run = Callable[..., str]


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """The arguments of LLAMA with a quarter of its layers, whose plans take a fifth of the time."""
    return ["--config", str(of_layers(8, tmp_path)), *LLAMA[2:]]


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[\d,]*\d\.?\d*", text)]


def test_a_model_is_planned_and_compared(run_plan: Run, tmp_path: Path) -> None:
    out = tmp_path / "plan.csv"
    text = run_plan(*LLAMA, "--tensor-parallel", "2", "--out", out, *QUICK)
    assert "llama-3-8b.json (llama): 8.03 billion parameters, 32 layers" in text
    assert "4 stages, tensor parallel 2 on 8 x NVIDIA H100 SXM 80 GB; 8 microbatches of 1 x 4096 tokens" in text
    (step,) = re.findall(r"^step +(.*)$", text, re.MULTILINE)
    seconds, tokens, each, share = numbers(step)[:4]
    assert tokens == pytest.approx(8 * 4096 / seconds, rel=1e-3)
    assert each == pytest.approx(tokens / 8, abs=1)
    # 6 flops per parameter but those of the embedding, and some of attention
    assert share == pytest.approx(100 * each * 6 * 7.5e9 / 989.4e12, rel=0.1)
    layer = r"layer model.layers.16: F [\d.]+, B [\d.]+, W [\d.]+ ms; [^;]* from F to B, 1.15 times that from B"
    assert re.search(layer, " ".join(text.split()))
    (cut,) = re.findall(r"^cut +([\d ]+) layers", text, re.MULTILINE)
    assert sum(numbers(cut)) == 34
    (partition,) = re.findall(r"^ +partition=\[(.*)\]$", text, re.MULTILINE)
    assert numbers(partition) == [sum(numbers(cut)[:chunk]) for chunk in range(len(numbers(cut)))]
    assert f"# partition: {partition.replace(',', '')}\n" in out.read_text()
    assert Schedule.from_csv(out.read_text()).ranks == 4
    rows = re.findall(r"^([a-z_0-9-]+) +\d+ +([\d.]+) s +[\d,]+ +[\d.]+%", text, re.MULTILINE)
    names, steps = [name for name, _ in rows], [float(step) for _, step in rows]
    assert {"one_f_one_b", "zb_v", "interleaved", "gpipe"} < set(names)
    assert steps == sorted(steps)
    (planned,) = [each for name, each in rows if name.startswith("plan-")]
    assert float(planned) == seconds  # with what is beside the passes
    shares = "72% of the GPU's peak in W's large products, 53% in those of F and B, 67% and 55% in F and B of attention"
    rest = "(flash_attention_3), 41% of its memory's bandwidth and 91% of the links'. Software: torch, with which"
    assert f"and not measured: programs get {shares} {rest}" in " ".join(text.split())
    assert "Peaks: NVIDIA H100 datasheet, SXM" in text


@pytest.mark.slow
def test_the_software_decides_about_tensor_parallelism(run_plan: Run, small: list[str]) -> None:
    layout = [*small, "--tensor-parallel", "8", *QUICK]
    texts = [" ".join(run_plan(*layout, *more).split()) for more in ([], ["--software", "megatron"])]
    ours, theirs = (float(re.search(r"step (\d[\d.]*) s", text)[1]) for text in texts)
    assert ours > 1.1 * theirs
    for text, name, shares in zip(texts, ("torch", "megatron"), ((50, "none"), (91, "62% at most")), strict=True):
        assert f"Software: {name}, with which tensor parallelism gets {shares[0]}%" in text
        assert f"and computing hides {shares[1]} of this time" in text
        assert f"group h100, dense, up to 8K tokens; software {name}: " in text


def test_halves_and_slices_are_tried_without_being_asked_for(run_plan: Run, small: list[str]) -> None:
    tries = re.findall(r"(?m)^(?:try)? +--(halves|slices auto): ", run_plan(*small, *QUICK))
    assert tries == ["halves", "slices auto"]
    told = run_plan(*small, *QUICK, "--halves", "--slices", "2")
    assert "--halves:" not in told
    assert "--slices auto:" not in told


@pytest.mark.slow
def test_layers_are_counted_by_the_names_that_cut_has(run_plan: Run, tmp_path: Path) -> None:
    """A partition that counts layers which the transformers library does not build is no partition of its model."""
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="names are those of version 5")
    config = json.loads(Path(path_of("deepseek-v3")).read_text()) | {"num_hidden_layers": 7}
    for predictors in (1, 0):
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": predictors}))
        model = load_architecture(tmp_path)
        names = [layer.name for layer in Setting(model, H100, Job(64)).costs.layers]
        sizes = ["--stages", "4", "--microbatches", "4", "--expert-parallel", "64", "--sequence", "64"]
        text = " ".join(run_plan("--config", tmp_path, *sizes, *QUICK).split())
        assert "layers by chunk: model.embed_tokens, model.layers.0 to 6, model.norm with the head" in text
        assert ("then model.layers.7, each with a head, which models of the transf" in text) == bool(predictors)
        assert plan(Setting(model, H100, Job(64)).costs, 4, 4, effort=0).layers == tuple(names)
    small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "moe_intermediate_size": 16}
    small |= {"n_routed_experts": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "vocab_size": 16}
    library = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**small, num_hidden_layers=7))
    assert [layer.name for layer in layers_of(library)] == [*names, "lm_head"]


def test_no_line_is_wider_than_the_terminal(run_plan: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    wide = ["--stages", "8", "--microbatches", "8", "--chunks", "4", "--placement", "loop"]
    text = run_plan(*LLAMA[:2], *wide, *QUICK)
    assert max(map(len, text.splitlines())) <= 100
    (partition,) = re.findall(r"partition=(\[[\d,\s]*\])", text)
    assert len(json.loads(partition)) == 32  # pasted into a program as it is


def test_a_folder_without_the_file_is_named(run_plan: Run, tmp_path: Path) -> None:
    error = run_plan("--config", tmp_path, "--stages", "2", "--microbatches", "4", status=2)
    assert f"cannot read {tmp_path / 'config.json'}: No such file" in error


@pytest.mark.parametrize("number", [10**9, "9" * 400, "9" * 5000])
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size"])
def test_absurd_numbers_are_refused_at_once(name: str, number: object, run_plan: Run, tmp_path: Path) -> None:
    config = json.loads(Path(LLAMA[1]).read_text())
    text = json.dumps({**config, name: 12345}).replace("12345", str(number))
    (tmp_path / "config.json").write_text(text)
    begin = time.process_time()
    error = run_plan("--config", tmp_path, "--stages", "4", "--microbatches", "8", *QUICK, status=2)
    assert time.process_time() - begin < 30
    assert len(error) < 500
    assert re.search(f"argument --config: .*({name} must be .* at most|integer string)", error)


@pytest.mark.slow
def test_experts_and_a_table_of_ones_own(run_plan: Run, tmp_path: Path) -> None:
    table = json.loads(TABLE.read_text())
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"mine": {**table["h100"], "title": "My GPU", "memory": 1e12}}))
    model = ["--config", path_of("gpt-oss-120b"), "--stages", "2", "--microbatches", "4"]
    more = ["--expert-parallel", "8", "--hardware", own, "--gpu", "mine", "--sequence", "1024", *QUICK]
    text = run_plan(*model, *more)
    assert "117 billion parameters, 5.7" in text or "116.8 billion parameters, 5.7" in text
    assert "expert parallel 8, data parallel 8 on 16 x My GPU" in text
    assert "(limit 957 GB)" in text  # model states are in it, which no number of microbatches measures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h1000"], "argument --gpu: .* has no 'h1000'; it has a100, h100"),
        (["--gpu", "a100", "--fp8"], "argument --fp8: NVIDIA A100 .* has no FP8"),
        (["--attention", "cudnn", "--gpu", "a100"], "--gpu, --attention: .* must be one of flash_attention_2, "),
        (["--gpu", ""], "argument --gpu: .* has no ''"),
        (["--config", "nothing.json"], "argument --config: cannot read nothing.json: No such file"),
        (["--tensor-parallel", "3"], "argument --tensor-parallel: .* must divide the 32 heads"),
        (["--expert-parallel", "2"], "argument --expert-parallel: .* must be 1 for a model without experts"),
        (["--chunks", "20"], "argument --chunks, --stages: .*20 chunks"),
        (["--placement", "v", "--chunks", "3"], "argument --placement, --chunks, --stages: .* needs chunks=2"),
        (["--memory", "60"], "nothing fits in 60 bytes: .* a limit is in bytes: --memory 60e9 for as many GB"),
        (["--memory", "60GB"], "expected a limit such as 1.5x, or 60e9 in the unit of activation, bytes; got '60GB'"),
        (["--costs", "costs.json"], "argument --costs: --config has the costs of its own model"),
        (["--schedule", "zb_v"], "argument --schedule: --config has the costs"),
        (["--sequence", "0"], "argument --sequence: expected a whole number"),
        (["--stages", "40"], "argument --stages: .*40 stages"),
        (["--memory", "30e9"], "into 4 stages of one chunk the fullest rank holds [0-9.]+ GB of weights"),
        (["--fully-shard"], "argument --fully-shard: stages hold weights and gradients from pass to pass"),
        (["--hardware", "nothing.json"], "argument --hardware: cannot read nothing.json"),
        (["--hardware", "/dev/zero"], "argument --hardware: /dev/zero is larger than 16 MiB, or has no end"),
        (["--calibrate", "/dev/zero"], "argument --calibrate: /dev/zero is larger than 16 MiB"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, run_plan: Run) -> None:
    assert re.search(message, run_plan(*LLAMA, *arguments, *QUICK, status=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": "80 GB"}, "memory must be a number; got str '80 GB'"),
        ({"memory": 80}, "memory must be in bytes, such as 80e9 for 80 GB; got 80"),
        ({"network_bandwidth": 400}, "network_bandwidth must be in bytes per second, such as 50e9 .*; got 400"),
        ({"memroy": 80e9}, "'h100' of .*: unknown fields \\['memroy'\\]; expected an object with some of .*'memory',"),
        ({"gpus_per_node": 2.5}, "gpus_per_node must be a whole number; got 2.5"),
    ],
)
def test_a_table_of_hardware_with_a_wrong_field(
    change: dict[str, object], message: str, run_plan: Run, tmp_path: Path
) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"h100": {**json.loads(TABLE.read_text())["h100"], **change}}))
    assert re.search(f"argument --hardware: .*{message}", run_plan(*LLAMA, "--hardware", own, status=2))


def test_a_placement_says_how_many_chunks_there_are(run_plan: Run, small: list[str]) -> None:
    assert "4 ranks, 2 chunks each" in run_plan(*small, *QUICK, "--placement", "0,1,2,3,3,2,1,0")


@pytest.mark.slow
def test_the_table_of_hardware_says_how_fast_copies_to_the_host_are(run_plan: Run, tmp_path: Path) -> None:
    sizes = ["--config", of_layers(8, tmp_path), "--stages", "2", "--microbatches", "4", "--memory", "28e9"]
    text = run_plan(*sizes, "--recompute", "--offload", *QUICK)
    assert re.search("^[a-z_-]+-saving: 2 ranks", text, re.MULTILINE)
    assert all(load_hardware(name).host_bandwidth for name in json.loads(TABLE.read_text()))


@pytest.mark.parametrize("with_options", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_measured_step_is_what_it_took(
    with_options: bool, run_plan: Run, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1F1B then takes as long as it was measured to take, with the same options or with those in the file."""
    monkeypatch.setattr(layouts, "_PLANNED", 1)
    log = tmp_path / "log.json"
    options = [*small, "--tensor-parallel", "2", *QUICK, "--calibrate", log]
    measured: dict[str, object] = {"seconds": 1.0}
    if with_options:
        options = [*small[:2], "--gpus", "2", "--batch", "4", *QUICK, "--calibrate", log]
        measured = {"seconds": 1.5, "schedule": "one_f_one_b", "stages": 2, "microbatches": 4}
    log.write_text(json.dumps(measured))
    text = " ".join(run_plan(*options).split())
    (factor,) = re.findall(r"corrected by log.json: F ([\d.]+), B \1 and W \1 times as long as computed", text)
    assert 3 < float(factor) < 6
    if not with_options:
        seconds = float(re.search(r" one_f_one_b 1 ([\d.]+) s", text)[1])
        assert seconds == pytest.approx(1.0, rel=0.03)  # the table has spans of ranks, the log has all of a step
        assert "fitted to published runs, then corrected by log.json, and not measured" in text


def test_a_measured_block_is_what_it_took(run_plan: Run, small: list[str], tmp_path: Path) -> None:
    costs = setting_of("llama-3-8b").costs
    path = dataclasses.replace(costs, layers=costs.layers[5:6]).save(tmp_path / "block.json")
    text = run_plan(*small, *QUICK, "--calibrate", path)
    (factor,) = re.findall(r"corrected\s+by\s+block.json:\s+F\s+([\d.]+)", text)
    share = costs.layers[5].forward / (costs.layers[5].forward + costs.pass_overhead)  # of a chunk of one layer
    assert float(factor) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("[]", 'expected an object such as {"seconds": 12.3'),
        ('{"seconds": 0}', "it must have the seconds of a step, above 0"),
        ('{"seconds": Infinity}', "it must have the seconds of a step, above 0"),
        ('{"seconds": true}', "it must have the seconds of a step, above 0"),
        ('{"seconds": 0.3}', "would use 133% of the peak flops: give all sizes of the run"),
        ('{"seconds": 1, "schedule": "zb"}', "it must have stages, microbatches and a schedule of gpipe"),
        ('{"seconds": 1, "tokens": 3}', "unknown fields ['tokens']"),
        ('{"seconds": 1, "tensor_parallel": 3}', "heads"),
        ('{"seconds": 1, "chunks": 2}', "chunks: one_f_one_b has 1 per rank; leave chunks out"),
        ('{"seconds": 9, "fully_shard": true}', "leave fully_shard out, or have one stage"),
        ('{"layers": []}', "layers must be a list of LayerCosts"),
    ],
)
def test_what_cannot_calibrate_is_refused(text: str | None, message: str, run_plan: Run, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    if text is not None:
        path.write_text(text)
    error = run_plan(*LLAMA, *QUICK, "--calibrate", path, status=2)
    assert "argument --calibrate: " in error
    assert message in error


@pytest.mark.slow
def test_half_blocks_fill_what_whole_ones_leave_idle(run_plan: Run, tmp_path: Path) -> None:
    """The answer without them says what they would give; the partition is one that cut takes."""
    four = ["--config", of_layers(16, tmp_path), "--stages", "4", "--microbatches", "4", *QUICK]
    whole = run_plan(*four)
    (gain,) = re.findall(r"--halves: cost ([\d.]+) ms, [\d.]+% less", whole)
    out = tmp_path / "plan.csv"
    text = run_plan(*four, "--halves", "--out", out)
    assert "--halves" not in text
    cost, before = (float(re.search(r"^cost +([\d.]+) ms", each, re.MULTILINE)[1]) for each in (text, whole))
    assert cost == float(gain) < before
    partition = json.loads(re.search(r"partition=(\[[^\]]*\])", text)[1])
    assert any(first % 1 for first in partition)
    sizes = numbers(re.search(r"^cut +([\d. ]+) layers by chunk", text, re.MULTILINE)[1])
    assert sum(sizes) == 18  # embedding, blocks, and norm with head
    assert out.read_text().startswith(f"# partition: {' '.join(map(str, partition))}\n")
    assert "argument --halves: " in run_plan("--stages", "2", "--microbatches", "4", "--halves", status=2)


@pytest.mark.parametrize("more", [[], ["--halves", "--recompute"], ["--calibrate", "step.json", "--slices", "2"]])
def test_the_costs_that_are_computed_can_be_written_and_planned_from(
    more: list[str], run_plan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last digit, of whole and of half blocks, also where they are corrected."""
    monkeypatch.chdir(tmp_path)
    small = json.loads(Path(path_of("llama-3-8b")).read_text()) | {"num_hidden_layers": 2}
    Path("config.json").write_text(json.dumps(small))
    Path("step.json").write_text('{"seconds": 30.0, "stages": 2, "microbatches": 32}')
    sizes = ["--stages", 2, "--microbatches", 4, "--memory", "60e9", "--effort", 0]
    computed = run_plan(*sizes, "--config", "config.json", *more, "--costs-out", "costs.json", "--out", "a.csv")
    again = [each for each in more if each in ("--recompute", "--slices", "2")]
    written = run_plan(*sizes, "--costs", "costs.json", *again, "--out", "b.csv")
    assert Path("a.csv").read_text() == Path("b.csv").read_text()
    named = ("bubble", "cost", "memory", "makespan", "slices")
    figures = [[line for line in text.split("\n") if line.startswith(named)] for text in (computed, written)]
    assert len(figures[0]) >= 4
    assert figures[0] == figures[1]
