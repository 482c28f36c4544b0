"""Pipeline schedules: build, check, simulate, plan and draw them (no torch), and run them (`Pipeline`).

Importing this package loads no torch: the names that need it, and the larger tools, are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zbkern.pipeline.schedules.actions import Action, ScheduleError
from zbkern.pipeline.schedules.schedule import Schedule
from zbkern.pipeline.simulation.costs import Costs
from zbkern.pipeline.simulation.layers import LayerCosts, ModelCosts
from zbkern.pipeline.simulation.simulator import simulate
from zbkern.pipeline.simulation.timeline import Event, Timeline

_HOME = {
    "Carry": "runtime.carry",
    "Optimizer": "optimizer",
    "Pipeline": "runtime.engine",
    "PipelineError": "transport.base",
    "PlanOptions": "planner",
    "ProfileOptions": "runtime.options",
    "StepOptions": "runtime.options",
    "check_slices": "runtime.check_slices",
    "checkpoint": "checkpoint",
    "cut": "models",
    "draw": "draw",
    "export": "models",
    "export_adapter": "models",
    "layer_chunks": "models",
    "layers_of": "models",
    "layout_to_partition": "schedules.layout",
    "partition_to_layout": "schedules.layout",
    "plan": "planner",
    "profile": "runtime.profiling",
    "profile_layers": "runtime.profiling",
    "schedules": "schedules",
    "token_loss": "models",
    "token_targets": "models",
}

__all__ = [
    "Action",
    "Costs",
    "Event",
    "LayerCosts",
    "ModelCosts",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "simulate",
    *_HOME,
]

if TYPE_CHECKING:
    from zbkern.pipeline import checkpoint as checkpoint
    from zbkern.pipeline import draw as draw
    from zbkern.pipeline import schedules as schedules
    from zbkern.pipeline.models.cutting import cut as cut
    from zbkern.pipeline.models.cutting import layer_chunks as layer_chunks
    from zbkern.pipeline.models.export import export as export
    from zbkern.pipeline.models.export import export_adapter as export_adapter
    from zbkern.pipeline.models.layers import layers_of as layers_of
    from zbkern.pipeline.models.token_loss import token_loss as token_loss
    from zbkern.pipeline.models.token_loss import token_targets as token_targets
    from zbkern.pipeline.optimizer import Optimizer as Optimizer
    from zbkern.pipeline.planner.arguments import PlanOptions as PlanOptions
    from zbkern.pipeline.planner.plan import plan as plan
    from zbkern.pipeline.runtime.carry import Carry as Carry
    from zbkern.pipeline.runtime.check_slices import check_slices as check_slices
    from zbkern.pipeline.runtime.engine import Pipeline as Pipeline
    from zbkern.pipeline.runtime.options import ProfileOptions as ProfileOptions
    from zbkern.pipeline.runtime.options import StepOptions as StepOptions
    from zbkern.pipeline.runtime.profiling import profile as profile
    from zbkern.pipeline.runtime.profiling import profile_layers as profile_layers
    from zbkern.pipeline.schedules.layout import layout_to_partition as layout_to_partition
    from zbkern.pipeline.schedules.layout import partition_to_layout as partition_to_layout
    from zbkern.pipeline.transport.base import PipelineError as PipelineError


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zbkern.pipeline' has no attribute {name!r}")
    module = importlib.import_module(f"zbkern.pipeline.{_HOME[name]}")
    globals()[name] = value = module if _HOME[name] == name else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
