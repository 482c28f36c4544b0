"""How far the model of costs was from published runs like the one that is planned: errors.json, or that none is known.

`python -m bench.published_runs --write` computes that file from bench/published_runs.json.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from zbkern.planning.cost_model.architecture import Architecture
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.model_costs import Job

TABLE = Path(__file__).parent / "errors.json"
_SHORT = 8192  # tokens: beyond, the kernel of attention decides


def group(architecture: Architecture, hardware: Hardware, job: Job) -> str:
    """The kind of run that errors are known of: GPU, experts or length."""
    if architecture.experts is not None:
        inside = job.expert_parallel <= hardware.gpus_per_node
        kind = "experts within a node" if inside else "experts across nodes"
    else:
        kind = "dense, up to 8K tokens"
    if job.sequence > _SHORT:
        kind = f"{kind.removesuffix(', up to 8K tokens')}, longer, {hardware.attention}"
    more = [name for name in ("fp8",) if getattr(job, name)] + ["context parallel"] * (job.context_parallel > 1)
    return ", ".join([hardware.name or hardware.title, kind, *more])


def how_exact(architecture: Architecture, hardware: Hardware, job: Job, split: bool) -> str:
    """What is known of the error of such speeds, and of what splitting backwards gains; or what corrected them."""
    if hardware.calibration.source:
        return hardware.calibration.describe()
    kind, errors = group(architecture, hardware, job), _errors()
    found = errors["speeds"].get(kind)
    said = f"its speed is not checked against any run ({kind})"
    if found:
        runs, bias = found["runs"], "fast" if found["mean"] > 0 else "slow"
        which = "1 published run" if runs == 1 else f"{runs} published runs"
        said = f"rms error {found['rms']:.1%} in {which} ({kind}), {abs(found['mean']):.1%} too {bias} on average"
    gain = errors["gains"].get(hardware.name)
    if split and gain:
        said += (
            f"; the gain of B and W apart: rms error {100 * gain['rms']:.1f} points in {gain['runs']} published ones"
        )
    elif split:
        said += "; the gain of B and W apart is not checked on this GPU"
    return said


@cache
def _errors() -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found
