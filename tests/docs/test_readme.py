"""The programs of the README run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import block

PAGE = Path(__file__).parents[2] / "README.md"


def test_without_a_pipeline(capsys: pytest.CaptureFixture) -> None:
    code = block(PAGE, "WGradQueue")
    exec(code, {})
    (promised,) = re.findall(r"# (WGradQueue\(.*\))", code)
    assert capsys.readouterr().out.strip() == promised


def pipeline_program() -> tuple[int, bool]:
    names: dict[str, Any] = {}
    exec(block(PAGE, "train.py").replace('torch.distributed.init_process_group("gloo")', "pass"), names)
    return names["step"], names["loss"] is not None


@pytest.mark.dist
def test_with_a_pipeline(two_ranks: Any) -> None:
    assert two_ranks.run(pipeline_program) == [(9, False), (9, True)]
