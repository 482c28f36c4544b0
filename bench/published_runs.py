"""Training speeds that others have published against those that the model of costs predicts.

    python -m bench.published_runs FILE.json

FILE.json: {"runs": [...]}, each with a model as the transformers library writes it, a GPU, the layout and the measured
speed, in TFLOP/s per GPU with attention counted as a full square, or in tokens/s per GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from zbkern.pipeline import schedules
from zbkern.pipeline.planner.partition import balanced_partitions, even_partitions
from zbkern.pipeline.simulation.architecture import Architecture, architecture
from zbkern.pipeline.simulation.hardware import Hardware, load_hardware
from zbkern.pipeline.simulation.model_costs import Job, flops, model_costs, outside
from zbkern.pipeline.simulation.simulator import simulate
from zbkern.reporting import markdown_table

DIFFER = 0.1  # of the slower: layouts closer than that are not ranked


class Result(NamedTuple):
    """A run, and its speed in the unit of the file."""

    run: Mapping[str, Any]
    experts: bool
    predicted: float

    @property
    def error(self) -> float:
        """Relative; above 0 where the prediction is too fast."""
        return self.predicted / self.run["measured"] - 1


def predict(run: Mapping[str, Any], hardware: Hardware | None = None) -> Result:
    """The speed of interleaved 1F1B, or of 1F1B for one chunk, with what a step has outside of its passes."""
    model = architecture(run["model"])
    hardware = hardware or load_hardware(run["gpu"])
    sizes = {name: run[name] for name in ("tensor_parallel", "expert_parallel", "data_parallel")}
    job = Job(run["sequence"], run["microbatch_size"], **sizes)
    stages = run["pipeline_parallel"]
    seconds = _passes(run, model, hardware, job) + outside(model, hardware, job, stages)
    tokens = run["microbatches"] * job.tokens / (seconds * stages * job.tensor_parallel)
    found = tokens * flops(model, job.sequence, masked=False) / 1e12 if "FLOP" in run["unit"] else tokens
    return Result(run, model.experts is not None, found)


def _passes(run: Mapping[str, Any], model: Architecture, hardware: Hardware, job: Job) -> float:
    """Seconds: the makespan, since these optimizers synchronise."""
    costs = model_costs(model, hardware, job)
    if str(run.get("recomputation", "")).startswith("full"):
        costs = replace(
            costs, layers=tuple(replace(each, backward=each.backward + each.forward) for each in costs.layers)
        )
    stages, chunks, microbatches = run["pipeline_parallel"], run["chunks"], run["microbatches"]
    if stages == 1:  # no order of one rank's passes is faster than another
        return microbatches * sum(_fused(costs.chunk_costs([0])))
    if chunks == 1:
        schedule = schedules.one_f_one_b(stages, microbatches)
    else:
        schedule = schedules.interleaved(stages, microbatches, chunks)
    partitions = [
        *balanced_partitions(costs, schedule.placement, microbatches, None)[:1],
        *even_partitions(len(costs.layers), len(schedule.placement))[:1],
    ]
    timelines = [simulate(schedule, costs.chunk_costs(each, schedule.placement)) for each in partitions]
    return min(each.makespan for each in timelines) / 1e3


def _fused(costs: Any) -> tuple[float, float]:
    flat = costs.per_chunk(1)
    return flat.forward[0] / 1e3, flat.fused[0] / 1e3


def rms(results: Sequence[Result]) -> float:
    """Of the relative errors; 0 for no results."""
    return math.sqrt(sum(each.error**2 for each in results) / len(results)) if results else 0.0


def ranked(results: Sequence[Result]) -> tuple[int, int]:
    """How many pairs of layouts of one model on one GPU are ranked as measured, and how many differ by enough."""
    right = count = 0
    for one, other in combinations(results, 2):
        same = all(one.run[name] == other.run[name] for name in ("model", "gpu", "unit", "sequence"))
        slow, fast = sorted((one, other), key=lambda each: each.run["measured"])
        if same and fast.run["measured"] > (1 + DIFFER) * slow.run["measured"]:
            count += 1
            right += fast.predicted > slow.predicted
    return right, count


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help='{"runs": [...]}')
    options = parser.parse_args(arguments)
    results = [predict(run) for run in json.loads(options.file.read_text(encoding="utf-8"))["runs"]]
    rows = [
        [each.run["run"], f"{each.predicted:,.1f}", f"{each.run['measured']:,.1f}", f"{each.error:+.1%}"]
        for each in results
    ]
    print(markdown_table(["run", "predicted", "published", "error"], rows))
    dense, experts = ([each for each in results if each.experts == kind] for kind in (False, True))
    right, pairs = ranked(results)
    errors = f"dense rms {rms(dense):.1%}, experts rms {rms(experts):.1%}"
    print(f"\n{errors}, {right} of {pairs} pairs of layouts ranked as measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
