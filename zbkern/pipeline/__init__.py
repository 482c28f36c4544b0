"""Running a schedule: `Pipeline`, `Optimizer`, a model's chunks, checkpoints. Also the public names of what plans one.

Importing this package loads no torch: the names that need it, and the larger tools, are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zbkern.schedules.actions import Action, ScheduleError
from zbkern.schedules.schedule import Schedule

_HOME = {
    "BatchPlan": "zbkern.planning.planner",
    "Carry": "zbkern.pipeline.runtime.slices.carry",
    "Costs": "zbkern.planning.costs.chunks",
    "DeferredLogits": "zbkern.pipeline.models",
    "Event": "zbkern.planning.simulation.timeline",
    "LayerCosts": "zbkern.planning.costs.layers",
    "ModelCosts": "zbkern.planning.costs.layers",
    "Optimizer": "zbkern.pipeline.optimizer",
    "Pipeline": "zbkern.pipeline.runtime.engine",
    "PipelineError": "zbkern.pipeline.transport.base",
    "PlanOptions": "zbkern.planning.planner",
    "PlannedBatch": "zbkern.pipeline.batches",
    "PlannedBatches": "zbkern.pipeline.batches",
    "ProfileOptions": "zbkern.pipeline.runtime.options",
    "StepOptions": "zbkern.pipeline.runtime.options",
    "Timeline": "zbkern.planning.simulation.timeline",
    "add_loss": "zbkern.pipeline.auxiliary_losses",
    "as_packs": "zbkern.pipeline.batches",
    "check_slices": "zbkern.pipeline.runtime.slices.check_slices",
    "checkpoint": "zbkern.pipeline.checkpoint",
    "cut": "zbkern.pipeline.models",
    "draw": "zbkern.planning.draw",
    "export": "zbkern.pipeline.models",
    "export_adapter": "zbkern.pipeline.models",
    "full_weights": "zbkern.pipeline.models",
    "layer_chunks": "zbkern.pipeline.models",
    "layers_of": "zbkern.pipeline.models",
    "layout_to_partition": "zbkern.schedules.layout",
    "loss_traits": "zbkern.pipeline.models",
    "overlap_collectives": "zbkern.pipeline.runtime.overlap.collectives",
    "partition_to_layout": "zbkern.schedules.layout",
    "per_sequence": "zbkern.pipeline.models",
    "plan": "zbkern.planning.planner",
    "plan_batch": "zbkern.planning.planner",
    "profile": "zbkern.pipeline.runtime.measure.profiling",
    "profile_layers": "zbkern.pipeline.runtime.measure.profiling",
    "rehearse": "zbkern.pipeline.rehearsal.rehearse",
    "schedules": "zbkern.schedules",
    "sequence_targets": "zbkern.pipeline.models",
    "simulate": "zbkern.planning.simulation.simulator",
    "token_log_probs": "zbkern.pipeline.models",
    "token_loss": "zbkern.pipeline.models",
    "token_targets": "zbkern.pipeline.models",
}

__all__ = ["Action", "Schedule", "ScheduleError", *_HOME]

if TYPE_CHECKING:
    from zbkern import schedules as schedules
    from zbkern.pipeline import checkpoint as checkpoint
    from zbkern.pipeline.auxiliary_losses import add_loss as add_loss
    from zbkern.pipeline.batches import PlannedBatch as PlannedBatch
    from zbkern.pipeline.batches import PlannedBatches as PlannedBatches
    from zbkern.pipeline.batches import as_packs as as_packs
    from zbkern.pipeline.models.cutting import cut as cut
    from zbkern.pipeline.models.cutting import layer_chunks as layer_chunks
    from zbkern.pipeline.models.deferred_logits import DeferredLogits as DeferredLogits
    from zbkern.pipeline.models.deferred_logits import token_log_probs as token_log_probs
    from zbkern.pipeline.models.export import export as export
    from zbkern.pipeline.models.export import export_adapter as export_adapter
    from zbkern.pipeline.models.export import full_weights as full_weights
    from zbkern.pipeline.models.layers import layers_of as layers_of
    from zbkern.pipeline.models.losses import loss_traits as loss_traits
    from zbkern.pipeline.models.losses import per_sequence as per_sequence
    from zbkern.pipeline.models.losses import sequence_targets as sequence_targets
    from zbkern.pipeline.models.losses import token_loss as token_loss
    from zbkern.pipeline.models.losses import token_targets as token_targets
    from zbkern.pipeline.optimizer import Optimizer as Optimizer
    from zbkern.pipeline.rehearsal.rehearse import rehearse as rehearse
    from zbkern.pipeline.runtime.engine import Pipeline as Pipeline
    from zbkern.pipeline.runtime.measure.profiling import profile as profile
    from zbkern.pipeline.runtime.measure.profiling import profile_layers as profile_layers
    from zbkern.pipeline.runtime.options import ProfileOptions as ProfileOptions
    from zbkern.pipeline.runtime.options import StepOptions as StepOptions
    from zbkern.pipeline.runtime.overlap.collectives import overlap_collectives as overlap_collectives
    from zbkern.pipeline.runtime.slices.carry import Carry as Carry
    from zbkern.pipeline.runtime.slices.check_slices import check_slices as check_slices
    from zbkern.pipeline.transport.base import PipelineError as PipelineError
    from zbkern.planning import draw as draw
    from zbkern.planning.costs.chunks import Costs as Costs
    from zbkern.planning.costs.layers import LayerCosts as LayerCosts
    from zbkern.planning.costs.layers import ModelCosts as ModelCosts
    from zbkern.planning.planner.batch import BatchPlan as BatchPlan
    from zbkern.planning.planner.batch import plan_batch as plan_batch
    from zbkern.planning.planner.plan import plan as plan
    from zbkern.planning.planner.request import PlanOptions as PlanOptions
    from zbkern.planning.simulation.simulator import simulate as simulate
    from zbkern.planning.simulation.timeline import Event as Event
    from zbkern.planning.simulation.timeline import Timeline as Timeline
    from zbkern.schedules.layout import layout_to_partition as layout_to_partition
    from zbkern.schedules.layout import partition_to_layout as partition_to_layout


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zbkern.pipeline' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    globals()[name] = value = getattr(module, name, module)  # draw, for one, is a module
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
