"""The program that runs the GPU's tests: what it keeps, and what it says was never reached."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[1] / "gpu" / "run.py"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    specification = importlib.util.spec_from_file_location("gpu_run", PATH)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


EVERY = "tests/gpu/test_triton_every_launch.py::test_the_same_bits_in_every_run"


def test_a_log_has_what_came_before_the_end(run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    results = run.Results(tmp_path)

    def lines() -> Iterator[str]:
        yield f"{EVERY}[linear_wgrad-dtype0] PASSED [ 10%]\n"
        yield f"{EVERY}[norm_fwd-dtype1] FAILED [ 20%]\n"
        yield f"{EVERY}[rotary_fwd-dtype1] SKIPPED (no time left: --seconds) [ 30%]\n"
        assert "shard-1| tests/gpu/test_triton_every_launch.py" in (tmp_path / "log.txt").read_text()
        yield "E   AssertionError\n"

    results.read("shard-1", lines())
    assert results.counts() == "1 failed, 1 passed, 1 skipped"
    assert results.summary() == (tmp_path / "summary.txt").read_text()
    assert f"FAILED {EVERY}[norm_fwd-dtype1]" in results.summary()
    assert "FAILED" in capsys.readouterr().out
    missing = run.unreached(results.ran())
    assert "rotary_fwd" in missing
    assert not {"linear_wgrad", "norm_fwd"} & set(missing)


@pytest.mark.slow
def test_it_runs_pytest_and_names_what_was_not_reached(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options = ["--tests", "tests/gpu/test_triton_large.py", "--shards", "1", "--seconds", "60", "--out", str(tmp_path)]
    code = run.main(options)
    out = capsys.readouterr().out
    assert code == 0, out
    assert "launches that no test has reached: linear_fwd, " in out
    assert "launches that no test has reached: linear_fwd, " in (tmp_path / "summary.txt").read_text()
    assert re.search(r"^alone\| .*test_linear", (tmp_path / "log.txt").read_text(), re.MULTILINE)
