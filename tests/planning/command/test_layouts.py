"""`zbkern plan --gpus`: every layout that can work is there, and none that found is faster than the first."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.configurations import H100, model_of, of_layers, path_of
from zbkern.planning.command import layouts
from zbkern.planning.command.question import LAYOUT_EFFORT, LayoutQuestion
from zbkern.planning.cost_model.architecture import architecture, load_architecture
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting

EIGHT = ["--config", path_of("llama-3-405b"), "--gpus", "8", "--batch"]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches plan the first two of their estimates."""
    monkeypatch.setattr(layouts, "_PLANNED", 2)


def sizes_of(layout: layouts.Layout) -> tuple[int, int, int, int, int, int, bool]:
    job = layout.setting.job
    ways = job.tensor_parallel, layout.stages, job.data_parallel, job.expert_parallel
    return *ways, layout.microbatches, job.microbatch_size, job.fully_shard


def test_all_layouts_that_divide_are_there_once() -> None:
    found = [sizes_of(each) for each in layouts.layouts(LayoutQuestion(model_of("gpt-oss-120b"), H100, 24, 48))]
    assert len(found) == len({*found})
    for tensor, stages, data, expert, microbatches, size, shard in found:
        assert tensor * stages * data == 24
        assert data * microbatches * size == 48
        assert tensor <= H100.gpus_per_node
        assert tensor * data % expert == 0 == 128 % expert
        assert not shard or (stages == 1 < data)
    assert (2, 4, 3, 2, 4, 4, False) in found
    assert (1, 24, 1, 1, 48, 1, False) in found
    assert (1, 1, 24, 8, 1, 2, False) in found
    assert (1, 1, 24, 8, 1, 2, True) in found


@pytest.mark.slow
def test_stages_may_begin_inside_blocks() -> None:
    """34 layers are not even in 8 stages, and their halves nearly are."""
    whole, finer = (LayoutQuestion(model_of("llama-3-8b"), H100, 8, 32, halves=halves) for halves in (False, True))
    assert [sizes_of(each) for each in layouts.layouts(whole)] == [sizes_of(each) for each in layouts.layouts(finer)]
    assert all(each.setting.job.halves == (each.stages > 1) for each in layouts.layouts(finer))

    def in_eight(question: LayoutQuestion) -> layouts.Planned:
        (layout,) = [each for each in layouts.layouts(question) if each.stages == 8 and each.microbatches == 32]
        return layouts.planned(replace(layout, effort=0))

    one, other = in_eight(whole), in_eight(finer)
    assert other.seconds < 0.97 * one.seconds
    assert any(first % 1 for first in other.plan.partition)


def test_passes_may_run_beside_each_other() -> None:
    """Experts across nodes: 64 GPUs as two stages of 32 ranks that share them."""

    def planned(overlap: bool) -> layouts.Planned:
        question = LayoutQuestion(model_of("gpt-oss-120b"), H100, 64, 256, overlap=overlap)
        (layout,) = [each for each in layouts.layouts(question) if sizes_of(each) == (1, 2, 32, 32, 8, 1, False)]
        seconds, layout = layouts.estimate(layout) or (math.inf, layout)
        found = layouts.planned(replace(layout, effort=0))
        assert seconds <= found.seconds
        return found

    alone, beside = planned(False), planned(True)
    assert beside.plan.schedule.beside
    assert beside.seconds < 0.98 * alone.seconds
    hidden = "messages that passes beside each other hide"
    assert beside.parts[hidden] < 0 == alone.parts[hidden]
    assert beside.parts["computing"] == pytest.approx(alone.parts["computing"])
    assert "% less of messages that passes beside each other hide" in layouts.why(alone, beside)


def test_a_table_may_have_the_gpus_of_a_node_as_a_float() -> None:
    question = [LayoutQuestion(model_of("llama-3-8b"), replace(H100, gpus_per_node=each), 8, 8) for each in (4, 4.0)]
    both = [[sizes_of(each) for each in layouts.layouts(one)] for one in question]
    assert both[0] == both[1] != []


def test_layouts_that_cannot_work_have_no_estimate() -> None:
    """Heads that tensor parallelism does not divide; memory that is not enough for weights however they are split."""
    odd = replace(H100, gpus_per_node=7)
    assert all(
        layouts.estimate(each) is None
        for each in layouts.layouts(LayoutQuestion(model_of("llama-3-8b"), odd, 7, 7))
        if each.setting.job.tensor_parallel == 7
    )
    assert layouts.search(LayoutQuestion(model_of("llama-3-405b"), H100, 16, 16)) == []


@pytest.mark.slow
def test_no_layout_is_faster_than_the_first(tmp_path: Path) -> None:
    """Of all, each planned for the whole batch, quickly: estimates and plans of few microbatches lose nothing.

    The parts of each answer are its step."""
    model = load_architecture(of_layers(12, tmp_path, "gemma-2-9b"))
    question = LayoutQuestion(model, H100, 4, 8, effort=0)
    best = layouts.search(question)
    assert [each.seconds for each in best] == sorted(each.seconds for each in best)
    assert all(max(each.plan.timeline.peak_memory) <= each.layout.setting.limit for each in best)
    for layout in layouts.layouts(question):
        seconds, tried = layouts.estimate(layout) or (math.inf, layout)
        if seconds > 1.1 * best[0].seconds:  # an estimate is hardly ever above its plan
            continue
        planned = layouts.planned(replace(tried, effort=0))
        assert planned is None or planned.seconds >= best[0].seconds * 0.995, sizes_of(layout)
    for answer in best:
        setting, stages = answer.layout.setting, answer.layout.stages
        step = answer.plan.timeline.cost / 1e3 + setting.beside(stages)
        assert answer.seconds == pytest.approx(step, rel=1e-12)
        assert min(answer.parts.values()) >= -1e-9 * step
    assert "no part differs" in layouts.why(answer, answer)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_the_printed_options_plan_the_same_step(run_plan, tmp_path: Path) -> None:
    path = of_layers(8, tmp_path)
    printed = run_plan("--config", path, "--gpus", "2", "--batch", "8")
    first = re.search(r"(?m)^.* microbatches of .*?(\d[\d.]*) s  ", printed)
    options = re.search(r"--stages.*?--microbatch-size \d+(?: --\S+| \d+)*", printed, re.DOTALL)
    assert first
    assert options
    again = run_plan("--config", path, "--effort", str(LAYOUT_EFFORT), *options[0].split())
    step = re.search(r"(?m)^step +(\d[\d.]*) s,", again)
    assert step
    assert step[1] == first[1]


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_weights_are_sharded_where_they_would_not_fit(run_plan, tmp_path: Path) -> None:
    """Llama 3 8B on 16 GPUs, as published with FSDP alone: 54 GB of weights, gradients and states each without."""
    path, sizes = path_of("llama-3-8b"), ["--batch", "128", "--sequence", "8192", "--effort", "0"]
    program = tmp_path / "train.py"
    printed = run_plan("--config", path, "--gpus", "16", *sizes, "--out", program)
    text = program.read_text()
    assert "torchrun --nnodes 2 --nproc-per-node 8 " in text
    assert not program.with_suffix(".schedule.csv").exists()  # one stage
    rows, microbatches = (int(re.search(rf"{name}.* = (\d+)", text)[1]) for name in ("ROWS, SEQUENCE", "MICROBATCHES"))
    assert 16 * rows * microbatches == 128
    (row,) = re.findall(r"(?m)^fsdp 16, 8 microbatches of 1 .*", printed)
    assert float(re.search(r"([\d.]+) GB", row)[1]) < 60
    options = re.search(r"--stages 1 --microbatches 8 .* --fully-shard\s+--chunks 1", printed, re.DOTALL)
    assert options
    again = run_plan("--config", path, "--effort", "0", *options[0].split())
    assert re.search(r"(?m)^step +(\d[\d.]*) s,", again)[1] in row


def test_one_stage_recomputes_where_it_must() -> None:
    """gpt-oss on 64 GPUs: a microbatch of 4 sequences keeps more than a GPU has."""
    job = Job(4096, 4, expert_parallel=4, data_parallel=64, fully_shard=True)
    layout = layouts.Layout(stages=1, microbatches=1, setting=Setting(model_of("gpt-oss-120b"), H100, job))
    _, tried = layouts.estimate(layout)
    assert tried.recompute
    answer = layouts.planned(replace(tried, effort=0))
    assert max(answer.plan.timeline.peak_memory) <= layout.setting.limit
    assert answer.parts["uneven stages, passes of more chunks, and recomputation"] > 0.1 * answer.seconds
    whole = layout.setting._replace(job=replace(job, fully_shard=False))
    assert layouts.estimate(replace(layout, setting=whole)) is None


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_a_layout_to_compare_with_says_why_it_loses(run_plan, tmp_path: Path) -> None:
    path = of_layers(8, tmp_path)
    sizes = ["--config", path, "--gpus", "8", "--batch", "16", "--sequence", "4096", "--effort", "0"]
    lines = [line.strip() for line in run_plan(*sizes, "--stages", "1", "--tensor-parallel", "8").splitlines()]
    rows = [line for line in lines if line.startswith("tp 8, ") and "plan-linear" in line]
    reasons = [line for line in lines if line.startswith("tp 8, ") and " behind: " in line]
    assert (len(rows), len(reasons)) == (1, 1)
    assert "more of messages" in reasons[0]
    few = ["--config", path, "--gpus", "4", "--batch", "4", "--effort", "0", "--microbatch-size", "8"]
    assert re.search(r"yours +--microbatch-size 8: .* cannot be divided so", run_plan(*few))
    own = {"stages": 1, "tensor_parallel": 1, "expert_parallel": 1}
    found = layouts.why_not(LayoutQuestion(model_of("gpt-oss-120b"), H100, 32, 64, own=own))
    assert re.match(r"fsdp 32, 2 microbatches of 1: does not fit: .* holds [\d.]+ GB of weights", found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "argument --stages: it is needed; or give --config, --gpus and --batch"),
        (["--stages", "4"], "argument --microbatches: it is needed"),
        (["--gpus", "8"], "argument --config: --gpus needs it"),
        (["--stages", "4", "--microbatches", "4", "--batch", "8"], "argument --batch: it goes with --gpus"),
        ([*EIGHT, "8", "--context-parallel", "2"], "argument --context-parallel: --gpus"),
        ([*EIGHT, "8", "--memory", "2x"], "argument --memory: --gpus decides"),
        ([*EIGHT, "8", "--slices", "2"], "argument --slices: --gpus decides"),
        ([*EIGHT, "8", "--offload"], "argument --offload: --gpus decides"),
        ([*EIGHT, "7"], "argument --gpus: no layout of 8 GPUs fits 7 sequences of"),
        (["--stages", "4", "--microbatches", "4", "--gpu", "h100"], "argument --gpu: it describes a model's training"),
    ],
)
def test_errors_name_the_argument_and_the_remedy(run_plan, arguments: list[str], message: str) -> None:
    assert message in run_plan(*arguments, status=2)


def test_it_says_what_was_not_tried() -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 512, "tie_word_embeddings": False}
    question = LayoutQuestion(architecture(config), H100, 2, 4, 256, effort=0)
    found = layouts.search(question)
    last = layouts.describe(question, found, 300).split("\n")[-1]
    assert last.startswith("not tried context parallelism: ")
    assert "slices of sequences below 16,384 tokens" in last
