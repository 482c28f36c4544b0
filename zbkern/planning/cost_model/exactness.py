"""How far the model of costs was from published runs like the one that is planned: errors.json, or that none is known.

`python -m bench.published_runs --write` computes that file, by kind of run and by the software that ran. Runs of
bench/published_runs.json are fitted; of each the error is what a fit to all others leaves. To those of
bench/published_runs_unseen.json nothing is fitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from zbkern.planning.cost_model.architecture import Architecture
from zbkern.planning.cost_model.hardware import Hardware
from zbkern.planning.cost_model.job import Job

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
    kind, errors = group(architecture, hardware, job), json.loads(TABLE.read_text(encoding="utf-8"))
    if hardware.calibration.source:
        return f"group {kind}; software {hardware.software}; {hardware.calibration.describe()}"
    fitted, unseen = (errors[table].get(kind, {}) for table in ("speeds", "unseen"))
    known = fitted.keys() | unseen.keys()
    its = _runs(hardware.software, fitted, unseen) or "no published run checks its speed"
    mine = f"software {hardware.software}: {its}"
    others = [f"{ran}: {_runs(ran, fitted, unseen)}" for ran in sorted(known - {hardware.software})]
    told = "; ".join((f"group {kind}", mine, *others))
    if not split:
        return told
    gain = errors["gains"].get(hardware.name)
    if gain is None:
        return f"{told}; the gain of B and W apart is not checked on this GPU"
    return (
        f"{told}; the gain of B and W apart: rms error {100 * gain['rms']:.1f} points in {gain['runs']} published ones"
    )


def _runs(ran: str, *tables: Mapping[str, tuple[int, float, float, float]]) -> str:
    """Of runs by this software how many there are, and how much longer they took than computed."""
    said = []
    for table, how in zip(tables, ("left out of the fit by turns", "to which nothing is fitted"), strict=True):
        if ran in table:
            runs, rms, least, most = table[ran]
            count = "1 published run" if runs == 1 else f"{runs} published runs"
            how = how.removesuffix(" by turns") if runs == 1 else how
            spread = f"{least:+.0%}" if runs == 1 else f"{least:+.0%} to {most:+.0%} (rms {rms:.0%})"
            said.append(f"{count}, {how}, took {spread} longer than computed")
    return " and ".join(said)
