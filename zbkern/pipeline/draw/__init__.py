"""Pictures of timelines: SVG, PNG, one HTML page that zooms, and traces for Perfetto."""

from __future__ import annotations

from zbkern.pipeline.draw.svg import save as save
from zbkern.pipeline.draw.svg import svg as svg
