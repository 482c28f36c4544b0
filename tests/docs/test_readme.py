"""The programs of the README run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import block
from zbkern.pipeline import schedules, simulate

PAGE = Path(__file__).parents[2] / "README.md"


def test_without_a_pipeline(capsys: pytest.CaptureFixture) -> None:
    code = block(PAGE, "WGradQueue")
    exec(code, {})
    (promised,) = re.findall(r"# (WGradQueue\(.*\))", code)
    assert capsys.readouterr().out.strip() == promised


def test_where_there_is_nothing_to_gain() -> None:
    (shown, *layout) = map(
        float, re.findall(r"This is ([\d.]+) % .*p = (\d+), v = (\d+), m = (\d+)", PAGE.read_text())[0]
    )
    stages, chunks, microbatches = map(int, layout)
    sizes = {"pipeline_parallel": stages, "chunks": chunks, "microbatches": microbatches, "model": "qwen3-235B"}
    runs = json.loads((PAGE.parent / "bench" / "published_runs.json").read_text())["runs"]
    assert any(sizes.items() <= run.items() for run in runs)
    idle = simulate(schedules.interleaved(stages, microbatches, chunks)).bubble_rate
    assert idle == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1))
    assert f"{idle:.1%}" == f"{shown}%"


def pipeline_program() -> tuple[int, bool]:
    names: dict[str, Any] = {}
    exec(block(PAGE, "train.py").replace('torch.distributed.init_process_group("gloo")', "pass"), names)
    return names["step"], names["loss"] is not None


@pytest.mark.dist
def test_with_a_pipeline(two_ranks: Any) -> None:
    assert two_ranks.run(pipeline_program) == [(9, False), (9, True)]
