"""What is said of the error of a speed belongs to its kind of run, and to nothing where none was checked."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support.configurations import CONFIGURATIONS
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.calibration import of_step
from zbkern.planning.cost_model.exactness import TABLE, how_exact
from zbkern.planning.cost_model.hardware import load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.software import under


@pytest.mark.parametrize(
    ("model", "gpu", "job", "kind"),
    [
        ("llama-3-8b", "h100", Job(8192), "h100, dense, up to 8K tokens"),
        ("llama-3-8b", "h100", Job(8193), ""),
        ("llama-3-8b", "mi300x", Job(8192), ""),
        ("llama-3-8b", "h100", Job(8192, fp8=True), ""),
        ("llama-3-8b", "h100", Job(8193, context_parallel=3), ""),
        ("gpt-oss-120b", "h100", Job(4096, expert_parallel=8), "h100, experts within a node"),
        ("gpt-oss-120b", "h100", Job(4096, expert_parallel=64), "h100, experts across nodes"),
        ("gpt-oss-120b", "gb200", Job(4096, expert_parallel=64), ""),
    ],
)
def test_it_is_that_of_runs_of_the_same_kind(model: str, gpu: str, job: Job, kind: str) -> None:
    said = how_exact(load_architecture(CONFIGURATIONS / f"{model}.json"), load_hardware(gpu), job, split=False)
    if not kind:
        assert said.startswith(f"group {gpu}, ")
        assert "; software torch: no published run checks its speed" in said
        return
    runs, rms, least, most = json.loads(TABLE.read_text())["speeds"][kind]["torch"]
    count = f"{runs} published runs" if runs > 1 else "1 published run"
    spread = f"{least:+.0%} to {most:+.0%} (rms {rms:.0%})" if runs > 1 else f"{least:+.0%}"
    how = "left out of the fit by turns" if runs > 1 else "left out of the fit"
    assert said.startswith(f"group {kind}; software torch: {count}, {how}, took {spread} longer than computed")


def test_runs_are_told_by_their_software_and_by_whether_they_are_fitted() -> None:
    model, kind = (
        load_architecture(CONFIGURATIONS / "llama-3-8b.json"),
        "h100, dense, up to 8K tokens, context parallel",
    )
    errors = json.loads(TABLE.read_text())
    (fitted, *_), (unseen, _, least, _) = (errors[table][kind]["nemo-24"] for table in ("speeds", "unseen"))
    assert unseen == 1
    told = f"{fitted} published runs, left out of the fit by turns, took "
    last = f" and 1 published run, to which nothing is fitted, took {least:+.0%} longer than computed"
    job, h100 = Job(8192, context_parallel=2), load_hardware("h100")
    for gpu, start in (
        (h100, "software torch: no published run checks its speed; "),
        (under(h100, "nemo-24"), "software "),
    ):
        said = how_exact(model, gpu, job, split=False)
        assert said.startswith(f"group {kind}; {start}nemo-24: {told}")
        assert said.endswith(last)


def test_gains_of_the_split_are_checked_where_somebody_measured_them() -> None:
    model, job = load_architecture(CONFIGURATIONS / "llama-3-8b.json"), Job(4096)
    told = {gpu: how_exact(model, load_hardware(gpu), job, split=True) for gpu in ("a100", "h100")}
    assert "the gain of B and W apart: rms error 1.6 points in 24 published ones" in told["a100"]
    assert "the gain of B and W apart is not checked on this GPU" in told["h100"]
    measured = replace(load_hardware("h100"), calibration=of_step(2.0, 3.0, "log.json"))
    said = how_exact(model, measured, job, split=True)
    assert said.startswith("group h100, dense, up to 8K tokens; software torch; corrected by log.json: F 1.50, ")
