"""What FSDP2 has gathered: layers compute with whole parameters, which it frees after B; optimizers have the shards."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def groups_of(state: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together for a sharded module, by the module's state."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 keeps one per state under another name
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def shards() -> dict[int, Tensor]:
    """By the id of every parameter that FSDP2 gathers in this process: its shard. Empty where FSDP2 is not in use."""
    if "torch.distributed.fsdp" not in sys.modules:
        return {}
    from torch.distributed._composable_state import _module_state_mapping

    states = [state for reference in [*_module_state_mapping.values()] if (state := reference()) is not None]
    parts = [part for state in states for group in groups_of(state) for part in group.fsdp_params]
    return {id(part._unsharded_param): part.sharded_param for part in parts if hasattr(part, "_unsharded_param")}
