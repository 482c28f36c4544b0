"""`zbkern plan --config ... --out launch.py`: the program that trains the model as planned, to put one's data in."""

from __future__ import annotations

from pathlib import Path
from string import Template

from zbkern.pipeline.from_config import Setting
from zbkern.pipeline.planner import Plan

_PROGRAM = Template('''\
"""Trains $model as `zbkern plan` has planned it: $layout.

    torchrun --nnodes $nodes --nproc-per-node $per_node$rendezvous $name

The schedule is in $schedule beside it. Put your data into `batch`, and weights to start from into WEIGHTS. The plan
counts what zbkern's own layers keep; those of the transformers library keep more: measure them with `profile_layers`.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig

import zbkern
from zbkern.pipeline import Optimizer, Pipeline, Schedule, cut, token_loss, token_targets

CONFIG = $config
WEIGHTS = None  # a folder with safetensors files, as from_pretrained reads it; None for random weights
REPLICAS, STAGES, TENSOR_PARALLEL = $sizes
ROWS, SEQUENCE = $rows, $sequence  # sequences of a microbatch, and their tokens
PARTITION = $partition
STEPS, LEARNING_RATE = int(os.environ.get("STEPS", 100)), 3e-4
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def batch(step: int, replica: int, sequences: int, vocabulary: int) -> torch.Tensor:
    """Token ids [sequences, SEQUENCE] of a step of one pipeline, the same on all its ranks; here random."""
    generator = torch.Generator().manual_seed(step * REPLICAS + replica)
    return torch.randint(vocabulary, (sequences, SEQUENCE), generator=generator)


def divide(layer: torch.nn.Module, config: object, mesh: DeviceMesh) -> None:
    """Tensor parallelism of a block, as its configuration says."""
    styles = {name: style for name, style in (config.base_model_tp_plan or {}).items() if name.startswith("layers.*.")}
    if not styles or {*styles.values()} - {*STYLES}:
        raise SystemExit(f"tensor parallelism here is {', '.join(STYLES)}; the model has {styles}: divide it by hand")
    parallelize_module(layer, mesh, {name.removeprefix("layers.*."): STYLES[style]() for name, style in styles.items()})


def chunks_of(config: object, schedule: Schedule, mesh: DeviceMesh, device: torch.device) -> list[torch.nn.Module]:
    """This rank's chunks, converted, then divided, then sharded among the replicas."""
    stage = mesh["stage"].get_local_rank()
    chunks = cut(config, schedule, PARTITION, weights=WEIGHTS, rank=stage, device=device)
    for chunk in chunks:
        zbkern.convert(chunk if REPLICAS > 1 else chunk.bfloat16())  # fully_shard has the masters, or Optimizer
$fp8        for name in chunk.layer_names:
            if TENSOR_PARALLEL > 1 and ".layers." in name:
                divide(chunk.get_submodule(name), config, mesh["tensor"])
        if REPLICAS == 1:
            for parameter in chunk.parameters():
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(chunk, mesh=mesh["replica"], reshard_after_forward=False, mp_policy=policy)
    return chunks


def main() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (REPLICAS, STAGES, TENSOR_PARALLEL), mesh_dim_names=("replica", "stage", "tensor"))
    schedule = Schedule.from_csv(Path(__file__).with_name("$schedule").read_text())
    config = AutoConfig.from_pretrained(CONFIG)
    chunks = chunks_of(config, schedule, mesh, device)
    parameters: dict[object, list[torch.nn.Parameter]] = {}  # torch's kernels do not mix DTensors and plain tensors
    for parameter in torch.nn.ModuleList(chunks).parameters():
        parameters.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    pipe = Pipeline(chunks, schedule, token_loss, mesh.get_group("stage"), device)
    adam = torch.optim.AdamW([{"params": some} for some in parameters.values()] or [{"params": []}], lr=LEARNING_RATE)
    optimizer = Optimizer(adam, pipe, max_norm=1.0, master_weights=REPLICAS == 1)
    sequences, replica = ROWS * schedule.sequences, mesh["replica"].get_local_rank()
    for step in range(STEPS):
        tokens = batch(step, replica, sequences, config.get_text_config().vocab_size).to(device)
        optimizer.zero_grad()
        loss = pipe.step(tokens, token_targets(tokens, schedule.sequences))
        optimizer.step()
        if loss is not None and replica == 0 and mesh["tensor"].get_local_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
''')

_FP8 = """\
        zbkern.convert(chunk, recipe="fp8_blockwise", filter=lambda name, module: "head" not in name)
"""


def write(path: Path, found: Plan, setting: Setting, config: Path) -> None:
    """The program, and the schedule beside it. Raises OSError, or ValueError where `cut` has no program for it."""
    architecture, hardware, job = setting
    experts = architecture.experts is not None
    if job.expert_parallel > 1 or (experts and job.tensor_parallel > 1):
        raise ValueError(
            "chunks of the transformers library keep the experts of a layer on one GPU: plan without expert and tensor "
            "parallelism, or write the program by hand (docs/integrations.md)"
        )
    if not architecture.causal:
        raise ValueError(f"the program trains models that predict the next token, and {architecture.kind} does not")
    if job.context_parallel > 1:
        raise ValueError("zbkern has no context parallelism of its own: plan without it, or write the program by hand")
    stages, schedule = found.schedule.stages, path.with_suffix(".schedule.csv")
    gpus = job.gpus(stages)
    per_node = int(min(gpus, hardware.gpus_per_node))
    nodes = -(-gpus // per_node)
    sizes = {"replicas": job.data_parallel, "stages": stages, "GPUs of tensor parallelism": job.tensor_parallel}
    schedule.write_text(found.schedule.to_csv(), encoding="utf-8")
    program = _PROGRAM.substitute(
        model=config.name,
        layout=", ".join(f"{size} {name}" for name, size in sizes.items() if size > 1) or "one GPU",
        nodes=nodes,
        per_node=per_node,
        rendezvous=" --rdzv-backend c10d --rdzv-endpoint HOST:29400" if nodes > 1 else "",
        name=path.name,
        schedule=schedule.name,
        config=repr(str(config.resolve())),
        sizes=", ".join(map(str, sizes.values())),
        fp8=_FP8 if job.fp8 else "",
        rows=job.microbatch_size,
        sequence=job.sequence,
        partition=list(found.partition or ()),
    )
    path.write_text(program, encoding="utf-8")
