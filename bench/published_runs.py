"""Training speeds that others have published against those that the model of costs predicts.

    python -m bench.published_runs [FILE.json] [--write]
    python -m bench.published_runs [FILE.json] --fit
    python -m bench.published_runs --gains

FILE.json (by default bench/published_runs.json): {"models": {...}, "runs": [...]}, each run with a model by its name or
as the transformers library writes it, a GPU, the layout (1 where it is left out) and the measured speed, in TFLOP/s per
GPU with attention counted as a full square, or in tokens/s per GPU. With "fixed_capacity" every expert gets as many
tokens in each step, so that nothing waits for the host to know their number. SOFTWARE says what ran them. Of the
software of these files the older half of the runs is fitted: those of a release, or those that its source has first.
Other runs are in bench/published_runs_unseen.json, and nothing is fitted to them.

--write: errors by kind of run and of gains, as zbkern/planning/cost_model/errors.json, which `zbkern plan` prints; of
runs that are fitted what a fit to all others says (minutes).
--fit: the shares of bench/shares.py, fitted to the runs, beside those of the table; and how far runs of every kind are
from what a fit to all others says.
--gains: what ZB-1p and ZB-2p gain over 1F1B in Table 4 of arXiv 2401.10241, predicted from the shapes of its Table 3
alone: every rank but the first and the last has as many layers, embedding and head count as one, and the orders are
those for equal ranks (ZB-1p is ZB-H1 in all of its Table 5), with the step after a barrier for 1F1B alone.
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

from bench import shares
from zbkern.pipeline import Costs, ModelCosts, plan, schedules
from zbkern.planning.cost_model import exactness
from zbkern.planning.cost_model.architecture import Architecture, architecture
from zbkern.planning.cost_model.hardware import Hardware, load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting
from zbkern.planning.cost_model.software import under
from zbkern.planning.planner.partition import balanced_partitions, even_partitions
from zbkern.planning.simulation.simulator import simulate
from zbkern.reporting import markdown_table

DIFFER = 0.1  # of the slower: layouts closer than that are not ranked
WITHIN = 0.02  # of 1F1B's speed: what a predicted gain should err by at most


class Shape(NamedTuple):
    """A GPT on A100s, by the names of Table 3; speeds of 1F1B, ZB-1p and ZB-2p for each number of microbatches."""

    layers: int
    heads: int
    features: int
    stages: int
    microbatch_size: int
    speeds: Mapping[int, tuple[float, float, float]]  # samples per second and GPU, Table 4


ZERO_BUBBLE = {
    "1.5B": Shape(22, 24, 2304, 8, 6, {24: (11.8, 12.9, 14.5), 32: (12.5, 13.4, 14.8), 64: (13.6, 14.2, 14.9)}),
    "6.2B": Shape(30, 32, 4096, 8, 3, {24: (3.50, 3.88, 4.32), 32: (3.70, 4.00, 4.35), 64: (4.03, 4.20, 4.39)}),
    "14.6B": Shape(46, 40, 5120, 16, 1, {48: (1.40, 1.61, 1.81), 64: (1.49, 1.67, 1.83), 128: (1.64, 1.76, 1.85)}),
    "28.3B": Shape(62, 48, 6144, 32, 1, {96: (0.76, 0.87, 0.99), 128: (0.80, 0.90, 1.00), 256: (0.88, 0.96, 1.00)}),
}


RUNS = Path(__file__).with_suffix(".json")
UNSEEN = RUNS.with_stem("published_runs_unseen")
"""Runs to which nothing is fitted."""


class Software(NamedTuple):
    """What ran: its name in the cost model, its kernel of attention, the table's name for its GPU, how much of messages
    it does not hide, and what it computes again of the products of F where a run says "selective"; None and {} for what
    is as on today's H100s."""

    name: str = "torch"
    attention: str | None = None
    gpus: Mapping[str, str] = {}
    exposed_share: float | None = None
    selective: float = 0.0


SOFTWARE = {  # by a word of a run and its source, of which the first counts
    "llm-foundry": Software(attention="flash_attention_1"),  # torch 1.13 and the Triton kernel, by submit_benchmarks.py
    "2205.05198": Software("megatron", "unfused"),  # "selective" recomputes the core of attention alone
    "torchtitan": Software("torch", "flash_attention_2", {"h100": "h100-500w"}, 0.9, 0.5),  # every second product
    "KempnerForge": Software("kempnerforge", "cudnn"),
    "Megatron-Bridge": Software("megatron-bridge", "cudnn"),
    "25.0": Software("nemo-25.04", "cudnn"),
    "dgxc-benchmarking": Software("nemo-24", "cudnn"),
    "Automodel": Software(attention="cudnn"),
    "Megatron": Software("megatron", "cudnn"),
}
_ONE = ("microbatch_size", "tensor_parallel", "expert_parallel", "data_parallel", "context_parallel")


class Result(NamedTuple):
    """A run, its kind, and its speed in the unit of the file."""

    run: Mapping[str, Any]
    kind: str
    predicted: float

    @property
    def error(self) -> float:
        """Relative; above 0 where the prediction is too fast."""
        return self.predicted / self.run["measured"] - 1


def software(run: Mapping[str, Any]) -> Software:
    said = f"{run.get('source', '')} {run.get('run', '')}"
    return next((found for word, found in SOFTWARE.items() if word in said), Software())


def hardware_of(run: Mapping[str, Any]) -> Hardware:
    ran = software(run)
    gpu = load_hardware(ran.gpus.get(run["gpu"], run["gpu"]), attention=ran.attention)
    gpu = replace(gpu, gpus_per_node=run.get("gpus_per_node", gpu.gpus_per_node))
    return under(gpu if ran.exposed_share is None else replace(gpu, exposed_share=ran.exposed_share), ran.name)


def predict(run: Mapping[str, Any], models: Mapping[str, Any] = {}, hardware: Hardware | None = None) -> Result:
    """The speed of interleaved 1F1B, or of 1F1B for one chunk, with what a step has outside of its passes."""
    model = architecture(models[run["model"]] if isinstance(run["model"], str) else run["model"])
    hardware = under(hardware or hardware_of(run), software(run).name)
    if run.get("fixed_capacity"):
        hardware = replace(hardware, expert_time=0.0)
    sizes = {name: run.get(name, 1) for name in _ONE}
    job = Job(run["sequence"], **sizes, fully_shard=run.get("fully_shard", False))
    stages = run.get("pipeline_parallel", 1)
    seconds = _passes(run, model, hardware, job) + Setting(model, hardware, job).beside(stages)
    tokens = run["microbatches"] * job.tokens / (seconds * stages * job.tensor_parallel * job.context_parallel)
    found = tokens * flops_of_a_square(model, job.sequence) / 1e12 if "FLOP" in run["unit"] else tokens
    return Result(run, exactness.group(model, hardware, job), found)


def flops_of_a_square(model: Architecture, sequence: int) -> float:
    """Per token, of a training step whose attention has no mask, as Megatron-LM counts."""
    cores = [part.core for part in model.parts if part.core]
    masked = sum(core.flops(sequence) for core in cores)
    return model.flops(sequence) + 3 * (sum(2 * (core.width * sequence + core.state) for core in cores) - masked)


def _passes(run: Mapping[str, Any], model: Architecture, hardware: Hardware, job: Job) -> float:
    """Seconds: the makespan, since these optimizers synchronise."""
    said, ran = run.get("recomputation", ""), software(run)
    costs = logits_once(Setting(model, hardware, job).costs)
    layers = []
    for each in costs.layers:
        core = each.attention_forward
        again = ran.selective * (each.forward - core) or core
        again = each.forward if said.startswith("full") else again if said.startswith("selective") else 0.0
        layers.append(replace(each, backward=each.backward + again))
    costs = replace(costs, layers=tuple(layers))
    stages, chunks, microbatches = run.get("pipeline_parallel", 1), run.get("chunks", 1), run["microbatches"]
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
    timelines = [simulate(schedule, costs.chunk_costs(each, schedule.placement)) for each in dict.fromkeys(partitions)]
    return min(each.makespan for each in timelines) / 1e3


def logits_once(costs: ModelCosts) -> ModelCosts:
    """With heads that keep their logits, as in these frameworks: a product in each of F, B and W, zbkern's has four."""
    layers = list(costs.layers)
    for index, each in enumerate(layers):
        if index and each.tied is not None:
            once = each.forward / 2
            layers[index] = replace(each, forward=once, backward=each.backward + once, weight=each.weight - once)
    return replace(costs, layers=tuple(layers))


def gains(shape: Shape, microbatches: int) -> tuple[float, float]:
    """Of ZB-1p and ZB-2p over 1F1B, in speed."""
    sizes = {"n_layer": shape.layers, "n_head": shape.heads, "n_embd": shape.features, "n_inner": 4 * shape.features}
    model = architecture({"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50304, **sizes})
    hardware, job, stages = load_hardware("a100"), Job(1024, shape.microbatch_size), shape.stages
    if stages <= hardware.gpus_per_node:
        hardware = replace(hardware, network_bandwidth=hardware.link_bandwidth)
    costs = logits_once(Setting(model, hardware, job).costs)
    ranks = costs.chunk_costs(even_partitions(len(costs.layers), stages)[0])
    inner = [getattr(ranks, name)[1] for name in ("forward", "backward", "weight", "communication")]
    searched = plan(Costs(*inner, activation=1, held=0.4), stages, microbatches, memory_limit=2 * stages, effort=1)
    rest = 1e3 * Setting(model, hardware, job).beside(stages)
    baseline = simulate(schedules.one_f_one_b(stages, microbatches), ranks).makespan + rest
    found = (schedules.zb_h1(stages, microbatches), searched.schedule)
    one, two = (baseline / (simulate(each, ranks).cost + rest) - 1 for each in found)
    return one, two


def gains_table() -> tuple[str, dict[str, float]]:
    """A row for every column of Table 4, how many gains are predicted closely, and their error."""
    rows, errors = [], []
    for name, shape in ZERO_BUBBLE.items():
        for microbatches, (baseline, *speeds) in shape.speeds.items():
            row = [f"{name}, p {shape.stages}, m {microbatches}"]
            for predicted, speed in zip(gains(shape, microbatches), speeds, strict=True):
                measured = speed / baseline - 1
                errors.append(predicted - measured)
                row += [f"{predicted:.1%}", f"{measured:.1%}", f"{100 * errors[-1]:+.1f}"]
            rows.append(row)
    head = ["run", *(f"{name}{what}" for name in ("ZB-1p", "ZB-2p") for what in ("", ", published", ", points"))]
    close = sum(abs(each) <= WITHIN for each in errors)
    summary = f"{close} of {len(errors)} gains within 2 points, the worst off by {100 * max(map(abs, errors)):.1f}"
    mean = math.sqrt(sum(each**2 for each in errors) / len(errors))
    return f"{markdown_table(head, rows)}\n\n{summary}", {"runs": len(errors), "rms": round(mean, 4)}


def _fused(costs: Any) -> tuple[float, float]:
    flat = costs.per_chunk(1)
    return flat.forward[0] / 1e3, flat.fused[0] / 1e3


def rms(results: Sequence[Result]) -> float:
    """Of the relative errors; 0 for no results."""
    return math.sqrt(sum(each.error**2 for each in results) / len(results)) if results else 0.0


def ranked(results: Sequence[Result]) -> tuple[int, int]:
    """How many pairs of layouts of one model, GPU and software are ranked as measured; how many differ by enough."""
    right = count = 0
    for one, other in combinations(results, 2):
        same = all(one.run[name] == other.run[name] for name in ("model", "gpu", "unit", "sequence"))
        same = same and software(one.run) == software(other.run)
        slow, fast = sorted((one, other), key=lambda each: each.run["measured"])
        if same and fast.run["measured"] > (1 + DIFFER) * slow.run["measured"]:
            count += 1
            right += fast.predicted > slow.predicted
    return right, count


def grouped(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """By kind of run and software."""
    found: dict[tuple[str, str], list[Result]] = {}
    for each in results:
        found.setdefault((each.kind, software(each.run).name), []).append(each)
    return dict(sorted(found.items()))


def after_one(results: Sequence[Result]) -> float:
    """The rms error of the others where one step of each in turn corrects all, as `--calibrate` does; 0 for one run."""
    pairs = [(1 + other.error) / (1 + one.error) - 1 for one in results for other in results if other is not one]
    return math.sqrt(sum(each**2 for each in pairs) / len(pairs)) if pairs else 0.0


Errors = dict[str, dict[str, list[float]]]  # by kind of run and software: how many runs, rms, least and largest error


def errors_of(results: Sequence[Result]) -> Errors:
    table: Errors = {}
    for (kind, ran), some in grouped(results).items():
        errors = [each.error for each in some]
        table.setdefault(kind, {})[ran] = [
            len(some),
            *(round(each, 3) for each in (rms(some), min(errors), max(errors))),
        ]
    return table


def unseen() -> Errors:
    given = json.loads(UNSEEN.read_text(encoding="utf-8"))
    return errors_of([predict(run, given["models"]) for run in given["runs"]])


def cell(errors: Sequence[float] | None) -> str:
    """Of one kind and software, as docs/cost_model.md has it."""
    if errors is None:
        return ""
    runs, mean, least, most = errors
    spread = f"{least:+.0%}" if runs == 1 else f"{mean:.0%} ({least:+.0%} to {most:+.0%})"
    return f"{runs:.0f}: {spread}"


def left_out(runs: Sequence[Mapping[str, Any]], models: Mapping[str, Any]) -> list[Result]:
    """Of every run what a fit to all others predicts."""
    gpus = [hardware_of(run) for run in runs]
    found = shares.fit(gpus, lambda run, gpu: math.log1p(predict(runs[run], models, gpu).error))
    alone = [shares.scaled(gpu, shares.without(found, gpus, [number])) for number, gpu in enumerate(gpus)]
    return [predict(run, models, gpu) for run, gpu in zip(runs, alone, strict=True)]


def fitted(runs: Sequence[Mapping[str, Any]], models: Mapping[str, Any]) -> str:
    """Tables of the shares, and of the errors by kind of run: with the table's, of the fit, and where a fit had none of
    this kind."""
    gpus = [hardware_of(run) for run in runs]

    def log_error(run: int, gpu: Hardware) -> float:
        return math.log1p(predict(runs[run], models, gpu).error)

    found = shares.fit(gpus, log_error)
    rows = []
    for share, factor, deviation in zip(shares.SHARES, found.factors, found.deviations, strict=True):
        table = next((getattr(gpu, share.fields[0]) for gpu in gpus if share.of(gpu)), math.nan)
        anchor = f"{share.anchor:.3g} +- {share.width:.0%}: {share.why}"
        rows.append([share.name, f"{table:.3g}", f"{table * factor:.3g} +- {deviation:.0%}", anchor])
    kinds: dict[str, list[int]] = {}
    results = [predict(run, models, gpu) for run, gpu in zip(runs, gpus, strict=True)]
    for run, result in enumerate(results):
        kinds.setdefault(f"{result.kind}, {software(runs[run]).name}", []).append(run)
    errors = []
    for kind, some in sorted(kinds.items()):
        others = shares.without(found, gpus, some)
        held_out = [predict(runs[run], models, shares.scaled(gpus[run], others)) for run in some]
        refitted = [
            results[run]._replace(predicted=math.exp(found.errors[run]) * runs[run]["measured"]) for run in some
        ]
        each = [f"{rms(those):.1%}" for those in ([results[run] for run in some], refitted, held_out)]
        errors.append([kind, len(some), *each])
    tables = [
        markdown_table(["share", "table", "fit", "anchor"], rows),
        markdown_table(["kind", "runs", "rms with the table", "with the fit", "with a fit to the others"], errors),
    ]
    return "\n\n".join(tables)


def _a_row_a_line(rows: Mapping[str, Mapping[str, Any]]) -> str:
    return "{\n  " + ",\n  ".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()) + "\n }"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=RUNS, help='{"models": {...}, "runs": [...]}')
    parser.add_argument("--gains", action="store_true", help="of ZB-1p and ZB-2p over 1F1B instead of a file's runs")
    parser.add_argument("--fit", action="store_true", help="shares of the peaks fitted to the runs")
    parser.add_argument("--write", action="store_true", help="the errors that zbkern plan prints")
    options = parser.parse_args(arguments)
    if options.gains:
        print(gains_table()[0])
        return 0
    given = json.loads(options.file.read_text(encoding="utf-8"))
    if options.fit:
        print(fitted(given["runs"], given.get("models", {})))
        return 0
    results = [predict(run, given.get("models", {})) for run in given["runs"]]
    rows = [
        [each.run["run"], each.kind, f"{each.predicted:,.1f}", f"{each.run['measured']:,.1f}", f"{each.error:+.1%}"]
        for each in results
    ]
    print(markdown_table(["run", "kind", "predicted", "published", "error"], rows))
    lines = []
    for (kind, ran), some in grouped(results).items():
        errors = [each.error for each in some]
        figures = [f"{rms(some):.1%}", f"{min(errors):+.1%}", f"{max(errors):+.1%}"]
        lines.append([kind, ran, len(some), *figures, f"{after_one(some):.1%}" if some[1:] else ""])
    print("\n" + markdown_table(["kind", "software", "runs", "rms", "least", "most", "after a step of one"], lines))
    dense, experts = ([each for each in results if ("experts" in each.kind) == kind] for kind in (False, True))
    right, pairs = ranked(results)
    errors = f"dense rms {rms(dense):.1%}, experts rms {rms(experts):.1%}"
    print(f"\n{errors}, {right} of {pairs} pairs of layouts ranked as measured")
    if options.write:
        gains = {"a100": gains_table()[1]}
        alone = errors_of(left_out(given["runs"], given["models"]))
        text = f'{{\n "speeds": {_a_row_a_line(alone)},\n "unseen": {_a_row_a_line(unseen())},\n "gains": '
        text += f"{_a_row_a_line(gains)}\n}}\n"
        exactness.TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
