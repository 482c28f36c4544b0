"""`zbkern plan --config ... --out launch.py`: the program that trains the model as planned, to put one's data in."""

from __future__ import annotations

import math
from pathlib import Path
from string import Template

from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.cost_model.places import mesh
from zbkern.planning.planner import Plan
from zbkern.schedules.layout import layer_of

_PROGRAM = Template('''\
"""Trains $model as `zbkern plan` has planned it: $layout.

    torchrun --nnodes $nodes --nproc-per-node $per_node$rendezvous $name$last

$beside
Put your data into `batch`, and weights to start from into WEIGHTS. The plan counts what zbkern's own layers keep; those
of the transformers library keep more: measure them with `profile_layers`.
"""

from __future__ import annotations

import os
from $library

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
$imports

import zbkern
from zbkern.pipeline import Optimizer, $names, token_loss, token_targets

CONFIG = $config
WEIGHTS = None  # a folder with safetensors files, as from_pretrained reads it; None for random weights
$mesh = $sizes  # of the mesh of all ranks: those of the last are neighbours in a node
ROWS, SEQUENCE = $rows, $sequence  # sequences of a microbatch, and their tokens
$numbers
STEPS, LEARNING_RATE = int(os.environ.get("STEPS", 100)), 3e-4
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def batch(step: int, replica: int, sequences: int, vocabulary: int) -> torch.Tensor:
    """Token ids [sequences, SEQUENCE] of a step of one replica, the same on all its ranks; here random."""
    generator = torch.Generator().manual_seed(step * REPLICAS + replica)
    return torch.randint(vocabulary, (sequences, SEQUENCE), generator=generator)


def convert(chunk: torch.nn.Module, config: object, mesh: DeviceMesh) -> None:
    """Converts it, then divides its blocks for tensor parallelism as the configuration says."""
    zbkern.convert(chunk)
$fp8    if TENSOR_PARALLEL == 1:
        return
    styles = {name: style for name, style in (config.base_model_tp_plan or {}).items() if name.startswith("layers.*.")}
    if not styles or {*styles.values()} - {*STYLES}:
        raise SystemExit(f"tensor parallelism here is {', '.join(STYLES)}; the model has {styles}: divide it by hand")
    for layer in (chunk.get_submodule(name) for name in chunk.layer_names if ".layers." in name):
        made = {name.removeprefix("layers.*."): STYLES[style]() for name, style in styles.items()}
        parallelize_module(layer, mesh["tensor"], made)


$build


def main() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, ($mesh), mesh_dim_names=($dimensions))
    config = AutoConfig.from_pretrained(CONFIG)
    chunks = chunks_of(config, mesh, device)
    parameters: dict[object, list[torch.nn.Parameter]] = {}  # torch's kernels do not mix DTensors and plain tensors
    for parameter in torch.nn.ModuleList(chunks).parameters():
        parameters.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    adam = torch.optim.AdamW([{"params": some} for some in parameters.values()] or [{"params": []}], lr=LEARNING_RATE)
$optimizer
    replica = mesh["replica"].get_local_rank()
    for step in range(STEPS):
        tokens = batch(step, replica, ROWS * MICROBATCHES, config.get_text_config().vocab_size).to(device)
        targets = token_targets(tokens, MICROBATCHES)
        optimizer.zero_grad()
$step
        optimizer.step()
        if loss is not None and replica == 0 and mesh["tensor"].get_local_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    $end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
''')

_PIPELINE = {
    "beside": "The schedule is in $schedule beside it.",
    "library": "pathlib import Path",
    "imports": "from transformers import AutoConfig",
    "names": "Pipeline, Schedule, cut",
    "numbers": """\
PARTITION = $partition
SCHEDULE = Schedule.from_csv(Path(__file__).with_name($csv).read_text())
MICROBATCHES = SCHEDULE.microbatches""",
    "build": """\
def chunks_of(config: object, mesh: DeviceMesh, device: torch.device) -> list[torch.nn.Module]:
    \"""This rank's chunks, converted and divided, then sharded among the replicas.\"""
    stage = mesh["stage"].get_local_rank()
    chunks = cut(config, SCHEDULE, PARTITION, weights=WEIGHTS, rank=stage, device=device)
    for chunk in chunks:
        chunk = chunk.float() if REPLICAS > 1 else chunk.bfloat16()  # fully_shard has the masters, or Optimizer
        convert(chunk, config, mesh)
        if REPLICAS == 1:
            for parameter in chunk.parameters():
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        else:
            fully_shard(chunk, mesh=mesh["replica"], reshard_after_forward=False, mp_policy=POLICY)
    return chunks""",
    "optimizer": """\
    pipe = Pipeline(chunks, SCHEDULE, token_loss, mesh.get_group("stage"), device)
    # $undone
    optimizer = Optimizer(adam, pipe, max_norm=1.0, master_weights=REPLICAS == 1, undo="$undo")""",
    "step": "        loss = pipe.step(tokens, targets)",
    "end": "pipe.close()",
}
_FULLY_SHARDED = {
    "beside": "One stage needs no schedule.",
    "library": "functools import partial",
    "imports": """\
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM""",
    "names": "cut, layer_chunks, schedules",
    "numbers": """\
MICROBATCHES = $microbatches
RECOMPUTED = $recomputed  # layers, as cut numbers them, whose activations are computed again""",
    "build": """\
def chunks_of(config: object, mesh: DeviceMesh, device: torch.device) -> list[torch.nn.Module]:
    \"""The model, converted and divided, sharded layer by layer, and then filled so: no GPU ever has all of it.\"""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    (chunk,) = chunks = cut(model, schedules.one_f_one_b(1, 1), [0], rank=0, device="meta")
    convert(chunk, config, mesh)
    for number, name in enumerate(chunk.layer_names):
        layer = chunk.get_submodule(name)
        if number in RECOMPUTED:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if name[-1].isdigit() or not config.get_text_config().tie_word_embeddings:  # a block, or none that is tied
            fully_shard(layer, mesh=mesh["replica"], mp_policy=POLICY)
    fully_shard(chunk, mesh=mesh["replica"], mp_policy=POLICY).to_empty(device=device)
    options, count = StateDictOptions(full_state_dict=True, strict=False), len(chunk.layer_names)
    for number in range(count):
        (layer,) = layer_chunks(model, weights=WEIGHTS, rank=number, ranks=count, device=device).values()
        set_model_state_dict(chunk, layer.state_dict(), options=options)
        for name, buffer in layer.named_buffers():
            if type(buffer) is torch.Tensor:  # and no placeholder
                chunk.get_buffer(name).copy_(buffer)
    return chunks""",
    "optimizer": '    optimizer = Optimizer(adam, mesh.get_group("stage"), max_norm=1.0)',
    "step": """\
        loss = torch.zeros((), device=device)
        for some, target in zip(tokens.split(ROWS), targets, strict=True):
            with chunks[0].deferred_logits():
                part = token_loss(chunks[0](some), target) / MICROBATCHES
            part.backward()  # which reduces the gradients of every layer
            loss += part.detach()""",
    "end": "optimizer.validate()",
}
_FP8 = """\
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from zbkern.integrations.torchao import convert as defer

    precision = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")  # F and B in 8 bits, W not
    defer(convert_to_float8_training(chunk, config=precision, module_filter_fn=lambda _, name: "head" not in name))
"""


_SNAPSHOT = 12  # bytes of a parameter: a copy of its master and moments
_EXACT = Job.optimizer_bytes + _SNAPSHOT
_UNDONE = (
    f'"snapshot" would be exact: plan with --optimizer-bytes {_EXACT:g}, which counts its copies',
    "exact: the plan has counted the copies",
)

_CONSTANTS = {"stage": "STAGES", "replica": "REPLICAS", "tensor": "TENSOR_PARALLEL"}


def write(path: Path, found: Plan, setting: Setting, config: Path) -> None:
    """The program, and the schedule beside it. Raises OSError, or ValueError where `cut` has no program for it."""
    architecture, hardware, job = setting
    if job.expert_parallel > 1 or (architecture.experts is not None and job.tensor_parallel > 1):
        raise ValueError(
            "chunks of the transformers library keep the experts of a layer on one GPU: plan without expert and tensor "
            "parallelism, or write the program by hand (docs/integrations.md)"
        )
    if job.context_parallel > 1:
        raise ValueError("zbkern has no context parallelism of its own: plan without it, or write the program by hand")
    stages, schedule = found.schedule.ranks, path.with_suffix(".schedule.csv")
    gpus = job.gpus(stages)
    tensor, most = job.tensor_parallel, hardware.gpus_per_node
    per_node = min(gpus, most // tensor * tensor or most)  # whole groups of tensor parallelism, where they fit a node
    nodes, rest = math.ceil(gpus / per_node), gpus % per_node
    is_exact = job.optimizer_bytes >= _EXACT
    sizes = mesh({"replica": job.pipelines, "stage": stages, "tensor": job.tensor_parallel})
    if not job.fully_shard:
        schedule.write_text(found.schedule.to_csv(), encoding="utf-8")
    parts = _PROGRAM.safe_substitute(_FULLY_SHARDED if job.fully_shard else _PIPELINE)
    program = Template(parts).substitute(
        model=_in_docstring(config.name),
        layout=_layout(sizes, job.fully_shard),
        nodes=nodes,
        per_node=per_node,
        rendezvous=" --rdzv-backend c10d --rdzv-endpoint HOST:29400" if nodes > 1 else "",
        name=_in_docstring(path.name),
        last=f"\n\nThe last node starts it with --nproc-per-node {rest}." if rest else "",
        schedule=_in_docstring(schedule.name),
        csv=repr(schedule.name),
        config=repr(str(config.resolve())),
        mesh=", ".join(_CONSTANTS[name] for name in sizes),
        sizes=", ".join(map(str, sizes.values())),
        dimensions=", ".join(f'"{name}"' for name in sizes),
        fp8=_FP8 if job.fp8 else "",
        rows=job.microbatch_size,
        sequence=job.sequence,
        partition=list(found.partition or ()),
        microbatches=found.schedule.microbatches,
        recomputed=_recomputed(found),
        undo="snapshot" if is_exact else "inverse",
        undone=_UNDONE[is_exact],
    )
    path.write_text(program, encoding="utf-8")


def _layout(sizes: dict[str, int], fully_shard: bool) -> str:
    names = {"replica": "replicas" + ", fully sharded" * fully_shard, "stage": "stages"}
    each = [f"{size} {names.get(name, 'GPUs of tensor parallelism')}" for name, size in sizes.items() if size > 1]
    return ", ".join(each) or "one GPU"


def _in_docstring(name: str) -> str:
    """A name, as far as it does not end a string."""
    return ascii(name)[1:-1].replace('"', "'")


def _recomputed(found: Plan) -> list[int]:
    """The layers of all chunks that have an R."""
    chunks = {action.chunk for row in found.schedule.actions for action in row if action.kind == "R"}
    bounds = [*(found.partition or ()), len({*map(layer_of, found.layers or ())})]
    return [layer for chunk in sorted(chunks) for layer in range(*map(int, bounds[chunk : chunk + 2]))]
