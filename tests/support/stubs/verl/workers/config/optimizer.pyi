from typing import Any

class FSDPOptimizerConfig:
    clip_grad: float
    total_training_steps: int
    lr_warmup_steps: int | None
    lr_warmup_steps_ratio: float
    lr_scheduler_type: str
    min_lr_ratio: float | None
    num_cycles: float
    zero_indexed_step: bool

def build_optimizer(parameters: Any, config: FSDPOptimizerConfig) -> Any: ...
