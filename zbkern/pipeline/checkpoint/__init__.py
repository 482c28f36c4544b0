"""Checkpoints by the names of the whole model, for any number of stages."""

from __future__ import annotations

from zbkern.pipeline.checkpoint.save_load import Loaded as Loaded
from zbkern.pipeline.checkpoint.save_load import latest as latest
from zbkern.pipeline.checkpoint.save_load import load as load
from zbkern.pipeline.checkpoint.save_load import save as save

__all__ = ["Loaded", "latest", "load", "save"]
