"""verl's TrainingWorker on CPUs, with an engine of its own or the pipeline's, and batches for it."""

from __future__ import annotations

import os
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks

WHY = "needs verl 0.9, with what its workers import (ray, uvicorn, fastapi): pip install verl uvicorn fastapi"
VOCABULARY = 13
COSTS = {"forward": 2.0, "backward": 3.5, "weight": 1.0, "overhead": 0.01, "tokens": 64}
COSTS |= {"attention_forward": 1.0, "attention_backward": 2.5}


def use_cpu() -> None:
    """verl has no platform of CPUs alone; without a GPU it would take CUDA."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Device(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_, **__: (1, 1) if name == "mem_get_info" else 0

    class OnCPU(PlatformCUDA):
        device_name, device_module = "cpu", Device("cpu")

        def current_device(self) -> Any:
            return "cpu"

        def communication_backend_name(self) -> str:
            return "gloo"

    set_platform(OnCPU())


def batch(rows: slice = slice(None), longest: int = 9) -> Any:
    """8 prompts with answers, as PPO has them: padded on both sides, and then verl's nested tensors."""
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, 6, (8,), generator=generator).tolist()
    answers = [longest, *torch.randint(2, min(longest, 60) + 1, (7,), generator=generator).tolist()]
    tokens = torch.randint(1, VOCABULARY, (8, 5 + longest), generator=generator)
    place = torch.arange(5 + longest) - 5
    mask = torch.stack([(place >= -size) & (place < answer) for size, answer in zip(sizes, answers, strict=True)])
    mask, tokens = mask.long(), tokens * mask
    response = mask[:, 5:]
    of_answers = {
        name: torch.randn(8, longest, generator=generator) * response for name in ("advantages", "old", "ref")
    }
    tensors = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
        "prompts": tokens[:, :5].clone(),
        "responses": tokens[:, 5:].clone(),
        "advantages": of_answers["advantages"],
        "old_log_probs": -of_answers["old"].abs(),
        "ref_log_prob": -of_answers["ref"].abs(),
    }
    about = {"temperature": 0.7, "global_batch_size": 8, "calculate_entropy": True}
    tensors = {name: tensor[rows] for name, tensor in tensors.items()}
    return left_right_2_no_padding(tensordict_utils.get_tensordict(tensors, about))


def worker(
    folder: str, strategy: str, model_type: str = "language_model", optimizer: str = "AdamW", **options: Any
) -> Any:
    """verl's TrainingWorker with an engine that has read its model."""
    use_cpu()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        ActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    config: Any = FSDPEngineConfig
    options = {"max_token_len_per_gpu": 30, "infer_max_token_len_per_gpu": 30, **options}
    environment = {"MASTER_ADDR": "", "MASTER_PORT": "", "LOCAL_RANK": "0"}
    if strategy == "fsdp2":
        import trl
        import verl.workers.engine.fsdp.transformer_impl as fsdp

        fsdp.get_device_id = lambda: "cpu"
        trl.AutoModelForCausalLMWithValueHead = getattr(trl, "AutoModelForCausalLMWithValueHead", Ranks)  # of old ones
        environment["VERL_ENGINE_DEVICE"] = "cuda"  # for which it is registered
        options |= {"use_torch_compile": False, "mixed_precision": {"param_dtype": "fp32"}}
    else:
        from zbkern.integrations.verl import EngineConfig as config

        options = {"dtype": "float32", **options}
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, "RANK": str(rank), "WORLD_SIZE": str(size)}.items():
            patch.setenv(name, value or os.environ.get(name, value))
        made = TrainingWorker(
            TrainingWorkerConfig(
                model_type=model_type,
                model_config=HFModelConfig(
                    path=folder,
                    override_config={"attn_implementation": "eager"},
                    enable_gradient_checkpointing=strategy == "zbkern" and "costs" not in options,
                    use_remove_padding=strategy == "zbkern",  # of others it needs flash-attn
                ),
                engine_config=config(strategy=strategy, **options),
                optimizer_config=FSDPOptimizerConfig(
                    optimizer=optimizer,
                    lr=1e-2 if optimizer == "AdamW" else 0.5,
                    total_training_steps=4,
                    clip_grad=0.5,
                    lr_scheduler_type="cosine",
                    min_lr_ratio=0.1,
                ),
                checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
            )
        )
    made.reset()
    actor = ActorConfig(
        strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_kl_loss=True, entropy_coeff=0.01
    )
    made.set_loss_fn(partial(ppo_loss, config=actor))
    return made


def weights(made: Any) -> dict[str, torch.Tensor]:
    found = made.engine.get_per_tensor_param()[0]
    return {name: getattr(value, "full_tensor", value.clone)().float().clone() for name, value in found}


def step(made: Any, data: Any) -> dict[str, Any]:
    """The step's loss, norm and rate, and all metrics of micro-batches; of ranks that have them."""
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(data, update_lr_scheduler=True)
    output = made.train_batch(data)
    return {} if output is None else tensordict_utils.get(output, "metrics")
