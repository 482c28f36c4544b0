"""verl's options of the pipeline's engine; options and batches are refused that would be left out in silence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from verl.utils import tensordict_utils
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import EngineConfig as VerlEngineConfig
from verl.workers.config import FSDPEngineConfig, HFModelConfig

from zbkern import pipeline

DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


@dataclass
class EngineConfig(FSDPEngineConfig):
    """verl's engine options, and those of a pipeline; options that are FSDP's alone are not read.

    Args:
        pipeline_parallel_size: stages of one pipeline; the other ranks are its data-parallel replicas.
        schedule: the name of a published schedule, such as "zb_v", "zb_h1", "one_f_one_b".
        costs: arguments of `zbkern.pipeline.Costs`, by which each batch is planned: long sequences in slices, short
            ones in packs (`plan_batch`). None for verl's own micro-batches in the named schedule.
        memory_limit: of `plan_batch`, in the unit of the costs.
        dtype: "float32"; or "bfloat16", with fp32 masters in the optimizer.
    """

    pipeline_parallel_size: int = 1
    schedule: str = "zb_v"
    costs: dict[str, Any] | None = None
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        VerlEngineConfig.__post_init__(self)  # not FSDP's, which knows its own strategies alone


def check_options(model: HFModelConfig, engine: EngineConfig, world: int) -> None:
    """Raises ValueError for options of verl's that mean something else here, or nothing."""
    stages = engine.pipeline_parallel_size
    right = {
        "pipeline_parallel_size": (stages, world % stages == 0, f"a divisor of the {world} ranks"),
        "schedule": (engine.schedule, hasattr(pipeline.schedules, engine.schedule), "one of zbkern.pipeline.schedules"),
        "dtype": (engine.dtype, engine.dtype in DTYPES, '"float32" or "bfloat16", which need no loss scale'),
        "ulysses_sequence_parallel_size": (
            engine.ulysses_sequence_parallel_size,
            engine.ulysses_sequence_parallel_size == 1,
            "1: long sequences go in slices with costs=",
        ),
        "enable_gradient_checkpointing": (
            model.enable_gradient_checkpointing,
            not (engine.costs and model.enable_gradient_checkpointing),
            "False with costs: slices read a cache, and memory_limit is the plan's",
        ),
        "costs": (engine.costs, not (engine.costs and engine.full_determinism), "None with full_determinism"),
        "qat.enable": (engine.qat.enable, not engine.qat.enable, "False"),
        "router_replay.mode": (engine.router_replay.mode, engine.router_replay.mode == "disabled", '"disabled"'),
        "use_remove_padding": (model.use_remove_padding, model.use_remove_padding, "True: rows have no padding"),
        "lora_rank": (model.lora_rank, not model.lora_rank, "0"),
        "mtp.enable": (model.mtp.enable, not model.mtp.enable, "False"),
        "enable_activation_offload": (
            model.enable_activation_offload,
            not model.enable_activation_offload,
            "False: give a plan that offloads to a Pipeline of your own",
        ),
    }
    for name, (got, fits, expected) in right.items():
        if not fits:
            raise ValueError(f"PipelineEngine: {name} must be {expected}; got {got!r}")


def check_batch(data: Any) -> None:
    """Raises ValueError for what a batch asks of an engine, and this one does not do."""
    get = partial(tensordict_utils.get_non_tensor_data, data)
    if get("pad_mode", DatasetPadMode.NO_PADDING) != DatasetPadMode.NO_PADDING or not data["input_ids"].is_nested:
        raise ValueError("PipelineEngine: input_ids must be nested, pad_mode NO_PADDING; see left_right_2_no_padding")
    asked = [
        name
        for name in ("distillation_use_topk", "calculate_sum_pi_squared", "enable_routing_replay")
        if get(name, False)
    ]
    images = data.get("multi_modal_inputs", None)
    if images is not None and any(map(len, images)):
        asked.append("multi_modal_inputs")
    if data["position_ids"].values().dim() != 1:
        asked.append("position_ids of several dimensions")
    if asked:
        raise ValueError(f"PipelineEngine: a batch must be of text, with log-probabilities and entropy; got {asked[0]}")


def check_local(hdfs_path: str | None) -> None:
    if hdfs_path is not None:
        raise ValueError(f"PipelineEngine: hdfs_path must be None, save into a shared folder; got {hdfs_path!r}")
