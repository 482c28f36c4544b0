"""How far the model of costs was from published runs like the one that is planned: errors.json, or that none is known.

`python -m bench.published_runs --write` computes that file: from bench/published_runs.json, to which shares are
fitted, and from bench/published_runs_unseen.json, by generation of the software that ran.
"""

from __future__ import annotations

import json
from pathlib import Path

from zbkern.planning.cost_model.architecture import Architecture
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.model_costs import Job

TABLE = Path(__file__).parent / "errors.json"
_SHORT = 8192  # tokens: beyond, the kernel of attention decides


def group(architecture: Architecture, hardware: Hardware, job: Job) -> str:
    """The kind of run that errors are known of: GPU, experts or length."""
    kind = "dense"
    if architecture.experts is not None:
        kind = "experts within a node" if job.expert_parallel <= hardware.gpus_per_node else "experts across nodes"
    if job.sequence > _SHORT:
        kind += f", longer, {hardware.attention}"
    elif architecture.experts is None:
        kind += ", up to 8K tokens"
    kind += ", fp8" * job.fp8 + ", context parallel" * (job.context_parallel > 1)
    return f"{hardware.name or hardware.title}, {kind}"


def how_exact(architecture: Architecture, hardware: Hardware, job: Job, split: bool) -> str:
    """What is known of the error of such speeds, and of what splitting backwards gains; or what corrected them."""
    if hardware.calibration.source:
        return hardware.calibration.describe()
    kind, errors = group(architecture, hardware, job), json.loads(TABLE.read_text(encoding="utf-8"))
    unseen = errors["unseen"].get(kind, {})
    said = f"{'nothing is fitted to such runs' if unseen else 'its speed is not checked against any run'} ({kind})"
    if found := errors["speeds"].get(kind):
        which = "1 published run" if found["runs"] == 1 else f"{found['runs']} published runs"
        bias = f"{abs(found['mean']):.1%} too {'fast' if found['mean'] > 0 else 'slow'} on average"
        said = f"rms error {found['rms']:.1%} in {which} ({kind}), {bias}"
    for when, (runs, least, most) in unseen.items():
        spread = f"{least:+.0%}" if runs == 1 else f"{least:+.0%} to {most:+.0%}"
        said += f"; {runs} not fitted, software {when}: {spread}"
    if not split:
        return said
    said, gain = f"{said}; the gain of B and W apart", errors["gains"].get(hardware.name)
    if gain is None:
        return f"{said} is not checked on this GPU"
    return f"{said}: rms error {100 * gain['rms']:.1f} points in {gain['runs']} published ones"
