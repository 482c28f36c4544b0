"""`zbkern plan --config ... --out launch.py`: the program trains the model, however it is laid out."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.configurations import H100, path_of, question_of, setting_of
from zbkern import __main__
from zbkern.pipeline import Schedule
from zbkern.planning.command import launch
from zbkern.planning.command.answer import Answer, answer
from zbkern.planning.command.question import Question
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
QUICK = ["--chunks", "1", "--effort", "0"]
TINY = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, **SIZES}


def planned(path: Path, stages: int = 2, chunks: int | None = None, **sizes: Any) -> Path:
    """The program for a tiny model, beside its configuration."""
    (path / "config.json").write_text(json.dumps(TINY))
    setting = Setting(load_architecture(path), H100, Job(16, 2, **sizes))
    found = answer(Question(stages, 4, setting=setting, effort=0, chunks=chunks))
    launch.write(path / "launch.py", found.plan, setting, path)
    return path / "launch.py"


def written(name: str, folder: Path, found: Answer) -> str:
    """The program for a published configuration."""
    launch.write(folder / "launch.py", found.plan, found.question.setting, Path(path_of(name)))
    return (folder / "launch.py").read_text()


def sharded(path: Path, **sizes: Any) -> Path:
    """One stage, of which two layers are recomputed."""
    program = planned(path, 1, data_parallel=2, fully_shard=True, **sizes)
    text = program.read_text()
    assert "RECOMPUTED = []" in text
    program.write_text(text.replace("RECOMPUTED = []", "RECOMPUTED = [1, 3]"))
    return program


def losses(program: Path) -> list[float]:
    """What the program prints in two steps, run in this process of a group."""
    environment = {"STEPS": "2", "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    found: list[str] = []
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch("builtins.print", lambda line, **_: found.append(line)),
    ):
        runpy.run_path(str(program))["main"]()
    return [float(re.fullmatch(r"step \d: loss ([\d.]+)", line)[1]) for line in found]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
def test_the_program_trains_as_planned(two_ranks: Any, four_ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    finer = {"halves": True, "chunks": 3}  # with one chunk whole blocks are as even
    layouts = {"plain": (two_ranks, {}), "replicas": (four_ranks, {"data_parallel": 2})}
    layouts["tensor, halves"] = four_ranks, {"tensor_parallel": 2, **finer}
    found = {}
    for name, (ranks, sizes) in layouts.items():
        (tmp_path / name).mkdir()
        program = planned(tmp_path / name, **sizes)
        if "halves" in sizes:
            assert ".5" in re.search(r"PARTITION = (.*)", program.read_text())[1]
        shown = ranks.run(losses, program)
        (found[name],) = [each for each in shown if each]  # one rank tells: of the last stage of the first pipeline
    assert found["plain"][0] == pytest.approx(4.6, abs=0.1)  # ln 96
    assert found["plain"][1] < found["plain"][0]
    assert found["tensor, halves"] == pytest.approx(found["plain"], abs=2e-3)  # bf16
    assert found["replicas"][0] == pytest.approx(found["plain"][0], abs=2e-3)  # then from other gradients


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
def test_the_program_shards_all_that_replicas_have(two_ranks: Any, four_ranks: Any, tmp_path: Path) -> None:
    """Tied weights, too; and no rank ever has more than a layer of the model."""
    pytest.importorskip("transformers")
    folders = [tmp_path / name for name in ("whole", "shared", "tied", "divided")]
    for folder in folders:
        folder.mkdir()
    with mock.patch.dict(TINY, tie_word_embeddings=True):
        programs = planned(folders[0], 1, data_parallel=2), sharded(folders[1])
        for program in programs:  # they add the head's gradients in another order, which bf16 would round
            program.write_text(program.read_text().replace("param_dtype=torch.bfloat16", "param_dtype=torch.float32"))
        (whole, _), (tied, _) = (two_ranks.run(losses, program) for program in programs)
    shared, _ = two_ranks.run(losses, sharded(folders[2]))
    (divided,) = [each for each in four_ranks.run(losses, sharded(folders[3], tensor_parallel=2)) if each]
    assert tied == whole
    assert divided == pytest.approx(shared, abs=2e-3)  # bf16
    assert shared[0] != whole[0]


def dtypes(program: Path) -> set[torch.dtype]:
    """Of the parameters of this rank."""
    from transformers import AutoConfig

    names = runpy.run_path(str(program))
    sizes = mesh_of(program.read_text())
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    chunks = names["chunks_of"](AutoConfig.from_pretrained(names["CONFIG"]), mesh, torch.device("cpu"))
    return {parameter.dtype for chunk in chunks for parameter in chunk.parameters()}


@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_of_a_model_in_bfloat16_share_masters_in_float32(
    two_ranks: Any, tmp_path: Path, replicas: int
) -> None:
    """As published configurations are: one replica has its masters in the Optimizer."""
    pytest.importorskip("transformers")
    with mock.patch.dict(TINY, dtype="bfloat16"):
        program = planned(tmp_path, 2 // replicas, data_parallel=replicas)
    assert two_ranks.run(dtypes, program) == [{torch.bfloat16 if replicas == 1 else torch.float32}] * 2


def test_the_program_says_how_it_is_started(run_plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    options = ["--stages", "2", "--data-parallel", "8", "--microbatches", "8", "--sequence", "2048", "--effort", "0"]
    assert f"wrote {path}" in run_plan("--config", path_of("llama-3-8b"), *options, "--out", path)
    text = path.read_text()
    compile(text, str(path), "exec")
    assert "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 train.py" in text
    stages, replicas, tensor = mesh_of(text).values()
    rows, sequence = map(int, re.search(r"ROWS, SEQUENCE = (\d+), (\d+)", text).groups())
    assert (replicas * stages * tensor, sequence) == (16, 2048)
    schedule = Schedule.from_csv(path.with_suffix(".schedule.csv").read_text())
    assert (schedule.ranks, replicas * rows * schedule.microbatches) == (2, 64)
    assert len(json.loads(re.search(r"PARTITION = (.*)", text)[1])) == len(schedule.placement)


def mesh_of(program: str) -> dict[str, int]:
    sizes = re.search(r"^[A-Z_, ]*TENSOR_PARALLEL = (.*)  #", program, re.MULTILINE)[1]
    names = re.search(r"mesh_dim_names=\((.*?)\)", program)[1]
    return dict(zip(names.replace('"', "").split(", "), map(int, sizes.split(", ")), strict=True))


@pytest.mark.parametrize(("counted", "undo"), [(12, "inverse"), (24, "snapshot")])
def test_a_step_is_undone_exactly_where_the_plan_has_counted_the_copies(
    counted: int, undo: str, tmp_path: Path
) -> None:
    text = planned(tmp_path, optimizer_bytes=counted).read_text()
    assert re.search(r'undo="(\w+)"\)', text)[1] == undo
    compile(text, "launch.py", "exec")
    assert ("--optimizer-bytes 24" in text) == (counted < 24)


@pytest.mark.parametrize(
    ("stages", "tensor", "replicas"), [(2, 2, 8), (2, 8, 2), pytest.param(2, 1, 16, marks=pytest.mark.slow)]
)
def test_replicas_are_where_the_costs_have_them(stages: int, tensor: int, replicas: int, tmp_path: Path) -> None:
    """Gradients go over the network where the program has replicas of a stage on several nodes, and else not."""
    sizes = {"tensor_parallel": tensor, "data_parallel": replicas, "sequence": 256}
    mesh = mesh_of(
        written("llama-3-8b", tmp_path, answer(question_of("llama-3-8b", stages, 8, {"chunks": 1}, **sizes)))
    )
    inside = math.prod([*mesh.values()][[*mesh].index("replica") + 1 :])
    nodes = {place * inside // H100.gpus_per_node for place in range(replicas)}
    setting = setting_of("llama-3-8b", tensor_parallel=tensor, data_parallel=replicas)
    slow = setting._replace(hardware=replace(H100, network_bandwidth=1e9))
    assert (slow.beside(stages) > setting.beside(stages)) == (len(nodes) > 1)


@pytest.mark.parametrize(
    ("stages", "tensor", "nodes", "per_node", "last"),
    [(3, 4, 2, 8, 4), (3, 2, 1, 6, 0), (11, 1, 2, 8, 3), (2, 16, 4, 8, 0)],
)
def test_it_is_started_on_as_many_gpus_as_were_planned(
    stages: int, tensor: int, nodes: int, per_node: int, last: int, tmp_path: Path
) -> None:
    """Nodes of 8 GPUs are full, but for the last one, and a group of tensor parallelism is within one."""
    text = written(
        "llama-3-8b", tmp_path, answer(question_of("llama-3-8b", stages, 4, {"chunks": 1}, tensor_parallel=tensor))
    )
    assert f"torchrun --nnodes {nodes} --nproc-per-node {per_node} " in text
    assert re.findall(r"The last node starts it with --nproc-per-node (\d+)", text) == ([str(last)] if last else [])


def test_layers_that_one_microbatch_recomputes_are_recomputed(tmp_path: Path) -> None:
    sizes = {"microbatch_size": 2, "sequence": 8192, "data_parallel": 16, "fully_shard": True}
    found = answer(question_of("llama-3-8b", 1, 2, {"recompute": True, "chunks": 8}, **sizes))
    bounds = [*found.plan.partition, 34]
    chunks = {action.chunk for row in found.plan.schedule.actions for action in row if action.kind == "R"}
    expected = [layer for chunk in sorted(chunks) for layer in range(bounds[chunk], bounds[chunk + 1])]
    assert 0 < len(expected) < 34
    assert f"RECOMPUTED = {expected}" in written("llama-3-8b", tmp_path, found)


def test_the_plan_of_a_program_has_no_layer_that_it_does_not_train(run_plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "launch.py"
    sizes = ["--stages", "4", "--microbatches", "4", "--sequence", "64", "--memory", "1e14", *QUICK]
    text = " ".join(run_plan("--config", path_of("deepseek-v3"), *sizes, "--out", path).split())
    assert "left out: what num_nextn_predict_layers describes" in text
    assert "model.layers.61" not in text
    assert max(runpy.run_path(str(path))["PARTITION"]) <= 62  # embedding and 61 blocks, then the norm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--config", path_of("gpt-oss-120b"), "--expert-parallel", "16"],
            "keep the experts of a layer on one GPU",
        ),
        ([], "a program trains a model; give it with --config"),
    ],
)
def test_what_it_cannot_write(options: list[str], message: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    sizes = ["--stages", "4", "--microbatches", "4", *QUICK, "--out", str(tmp_path / "launch.py")]
    assert __main__.main(["plan", *sizes, *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="no such names")
def test_no_name_of_a_file_ends_the_docstring(run_plan: Any, tmp_path: Path) -> None:
    folder = tmp_path / '"""\nraise SystemExit("ran")\n"""'
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    path = tmp_path / 'a"""b\\.py'
    sizes = ["--stages", "2", "--microbatches", "4", "--sequence", "16", "--effort", "0"]
    run_plan("--config", folder, *sizes, "--out", path)
    names = runpy.run_path(str(path))
    assert "Trains '''\nraise" in names["__doc__"]
    assert names["CONFIG"] == str(folder.resolve() if Path(names["CONFIG"]).is_dir() else folder / "config.json")
    assert names["SCHEDULE"].ranks == 2
