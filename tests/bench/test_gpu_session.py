"""The whole session on a CPU, with jobs that hang, die and are wrong, and with the session killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import gpu_rows, gpu_session

ROOT = Path(__file__).parents[2]


def start(folder: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "bench.gpu_session", "--rehearse", "--out", str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)


def jobs(folder: Path) -> dict[str, dict]:
    return {job["name"]: job for job in json.loads((folder / "session.json").read_text())["jobs"]}


@pytest.mark.slow
def test_every_failure_costs_only_its_own_job(tmp_path: Path) -> None:
    faults = ("hang=rms_norm_fwd", "wrong=rms_norm_dgrad", "kill=RMSNorm backward")
    options = ["--only", "norm_|RMSNorm", "--dtype", "float32", "--kernel-limit", "7", "--seconds", "60"]
    assert start(tmp_path, *options, *(option for fault in faults for option in ("--fault", fault))).wait(90) == 1
    found = jobs(tmp_path)
    statuses = {name: job["status"] for name, job in found.items()}
    assert statuses == {
        **dict.fromkeys(("layer_norm_fwd", "layer_norm_dgrad", "norm_wgrad", "RMSNorm forward"), "ok"),
        **dict.fromkeys(("compile RMSNorm forward", "compile RMSNorm backward"), "ok"),
        "rms_norm_fwd": "timed out",
        "rms_norm_dgrad": "wrong",
        "RMSNorm backward": "died",
    }
    assert "output 0: differs by" in found["rms_norm_dgrad"]["detail"]
    assert found["RMSNorm backward"]["detail"] == "exit code -9"
    assert found["RMSNorm forward"]["figures"][0]["rate"] > 0
    assert "timed out" in (tmp_path / "session.md").read_text()


@pytest.mark.slow
def test_what_was_found_before_it_is_killed_stays(tmp_path: Path) -> None:
    options = ["--only", "activation_", "--dtype", "float32", "--workers", "1", "--fault", "hang=activation_bwd"]
    session = start(tmp_path, *options)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if (tmp_path / "session.json").exists() and jobs(tmp_path)["activation_fwd"]["status"] == "ok":
                break
            time.sleep(0.1)
    finally:
        os.killpg(session.pid, signal.SIGKILL)
        session.wait()
    found = jobs(tmp_path)
    assert found["activation_fwd"]["status"] == "ok"
    assert found["activation_bwd"]["status"] in ("not reached", "running")
    assert "activation_fwd" in (tmp_path / "session.md").read_text()


def test_rows_are_those_of_the_benchmark() -> None:
    assert set(gpu_session.ROWS) <= {row.name for row in gpu_rows.ROWS}


def test_a_fault_that_does_not_exist(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gpu_session.main(["--out", "nowhere", "--rehearse", "--fault", "sleep=rms_norm_fwd"])
    assert "hang, wrong, kill" in capsys.readouterr().err


def test_the_kernels_compiled_last_are_left_out(tmp_path: Path) -> None:
    for age, name in enumerate(("first", "second", "third")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "kernel.cubin").write_bytes(bytes(1000))
        os.utime(folder, (age, age))
    wheel = tmp_path / "wheels" / "zbkern.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(bytes(500))
    assert gpu_session.drop_youngest(tmp_path, 3500) == 0
    assert gpu_session.drop_youngest(tmp_path, 1500) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "wheels"]
    assert gpu_session.drop_youngest(tmp_path, 100) == 1
    assert wheel.exists()


def test_an_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    assert not gpu_session.build_wheel(tmp_path, str(tmp_path / "python"))


@pytest.mark.slow
def test_what_a_gpu_elsewhere_needs_is_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "bench.gpu_session", "--prepare", "--only", "^activation_fwd float32"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("1 kernels"), done.stderr
    assert [path.name for path in tmp_path.glob("*/*.cubin")] == ["_activation_fwd.cubin"]
    assert not list(tmp_path.glob("*/*.ptx"))  # only what is loaded
