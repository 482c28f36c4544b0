"""Llama 3 8B rehearsed rank by rank on a GPU: a plan in a V, and one in less memory, whose rank 0 offloads.

    python -m bench.gpu_rehearse --seconds 60 --out FOLDER              (--tiny: a small model, on a CPU, too)

Each is planned and rehearsed by the command line, whose text is printed and kept in FOLDER/gpu_rehearse.json after
each. It needs the transformers library.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import report
from zbkern.__main__ import main as zbkern
from zbkern.pipeline import Schedule

CONFIGURATION = Path(__file__).with_name("configurations") / "llama-3-8b.json"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {**TINY, "vocab_size": 256, "num_hidden_layers": 16, "head_dim": 16}
PLANS = {
    "in a V": ["--chunks", "2", "--placement", "v"],
    "offloaded": ["--offload", "--memory"],
}
LEAST = {False: "24e9", True: "1.8e6"}  # bytes, of this model and of the small one


def said_by(*arguments: object) -> tuple[int, list[str]]:
    """The status of `zbkern` with these arguments, and its lines."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = zbkern([str(each) for each in arguments])
    return status, (out.getvalue() + errors.getvalue()).strip().splitlines()


def _kinds(plan: Path) -> list[str]:
    """Of rank 0's actions."""
    return sorted({action.kind for action in Schedule.from_csv(plan.read_text()).actions[0]})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="no plan is rehearsed later")
    parser.add_argument("--ranks", default="0,7")
    parser.add_argument("--tiny", action="store_true")
    report.add_out(parser)
    options = parser.parse_args(argv)
    if importlib.util.find_spec("transformers") is None or not (torch.cuda.is_available() or options.tiny):
        print("cannot run: this needs a CUDA GPU and the transformers library")
        return 2
    end = time.monotonic() + options.seconds
    rows: list[dict[str, Any]] = []
    sizes = ["--stages", 8, "--microbatches", 16, "--sequence", 32 if options.tiny else 4096, "--effort", 0]
    with tempfile.TemporaryDirectory() as folder:
        config, plan = Path(folder, "config.json"), Path(folder, "plan.csv")
        config.write_text(json.dumps(json.loads(CONFIGURATION.read_text()) | (SMALL if options.tiny else {})))
        for name, how in PLANS.items():
            how = [*how, LEAST[options.tiny]] if how[-1] == "--memory" else how
            if time.monotonic() > end:
                break
            status, lines = said_by("plan", "--config", config, *sizes, *how, "--out", plan)
            if not status:
                given = ["--config", config, "--plan", plan, "--ranks", options.ranks]
                status, lines = said_by("rehearse", *given, *([] if options.tiny else ["--compare"]))
            rows.append({"plan": name, "status": status, "said": lines, "kinds": _kinds(plan) if not status else []})
            print("\n".join([f"{name}: status {status}", *lines, ""]), flush=True)
            report.write_json("gpu_rehearse", rows, options.out)
    print(f"{len(rows)} of {len(PLANS)} plans rehearsed")
    return int(any(row["status"] for row in rows) or not rows)


if __name__ == "__main__":
    sys.exit(main())
