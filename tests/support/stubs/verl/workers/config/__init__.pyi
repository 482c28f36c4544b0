from dataclasses import dataclass
from typing import Any

from verl.workers.config.optimizer import FSDPOptimizerConfig as FSDPOptimizerConfig

@dataclass
class EngineConfig:
    param_offload: bool = False
    optimizer_offload: bool = False
    forward_only: bool = False
    strategy: str = ...
    dtype: str = "bfloat16"
    use_dynamic_bsz: bool = True
    seed: int = 42
    full_determinism: bool = False
    router_replay: Any = ...

    def __post_init__(self) -> None: ...

@dataclass
class FSDPEngineConfig(EngineConfig):
    ulysses_sequence_parallel_size: int = 1
    qat: Any = ...

class HFModelConfig:
    local_path: str | None
    hf_config: Any
    tokenizer: Any
    trust_remote_code: bool
    enable_gradient_checkpointing: bool
    enable_activation_offload: bool
    use_remove_padding: bool
    lora_rank: int
    mtp: Any
