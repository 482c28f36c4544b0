"""From a model to the chunks of a pipeline, and from the chunks to a file that others read."""

from zbkern.pipeline.models.cutting import cut, layer_chunks
from zbkern.pipeline.models.deferred_logits import DeferredLogits, token_log_probs
from zbkern.pipeline.models.export import export, export_adapter, full_weights
from zbkern.pipeline.models.layers import Layer, layers_of
from zbkern.pipeline.models.losses import loss_traits, per_sequence, sequence_targets, token_loss, token_targets

__all__ = [
    "DeferredLogits",
    "Layer",
    "cut",
    "export",
    "export_adapter",
    "full_weights",
    "layer_chunks",
    "layers_of",
    "loss_traits",
    "per_sequence",
    "sequence_targets",
    "token_log_probs",
    "token_loss",
    "token_targets",
]
