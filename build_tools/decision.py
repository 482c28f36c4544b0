"""What to build on a machine: one pure function, and the functions that find out what the machine has."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODES = ("auto", "cpu", "cuda", "off")
PARTS = ("planner", "launcher", "cuda")

OLDEST_CUDA = (12, 1)  # whose kernels take more than 4 KB of parameters
CAPABILITY = "9.0"  # what the CUDA kernels are written for: H100, H200 and their kin


@dataclass(frozen=True)
class Machine:
    """What the decision depends on. compiler, nvcc: their paths, or None. visible: compute capabilities of its GPUs.

    cuda: the version of nvcc.
    """

    environment: Mapping[str, str]
    compiler: str | None
    nvcc: str | None
    visible: Sequence[str] = ()
    cores: int = 1
    platform: str = "linux"
    cuda: tuple[int, int] = (13, 0)


@dataclass(frozen=True)
class Decision:
    """parts: of PARTS. jobs: compilers that may run at a time."""

    parts: tuple[str, ...]
    jobs: int = 1


def decide(machine: Machine) -> Decision:
    """What to build. Raises ValueError, with what to do, when what is asked for cannot be built here."""
    mode = machine.environment.get("ZBKERN_BUILD", "auto")
    if mode not in MODES:
        raise ValueError(f"ZBKERN_BUILD must be one of {', '.join(MODES)}; got {mode!r}")
    if mode == "off":
        return Decision(())
    reason = why_no_cuda(machine)
    if mode == "cuda" and reason is not None:
        raise ValueError(f"ZBKERN_BUILD=cuda: {reason}; or build without the CUDA kernels: ZBKERN_BUILD=cpu")
    linux = machine.platform.startswith("linux")
    host = () if machine.compiler is None else ("planner", "launcher") if linux else ("planner",)
    useful = CAPABILITY in machine.visible  # where no GPU is, minutes of compiling are asked for by name
    builds_cuda = mode == "cuda" or (mode == "auto" and reason is None and useful)
    return Decision((*host, "cuda") if builds_cuda else host, jobs_at_a_time(machine.environment, machine.cores))


def why_no_cuda(machine: Machine) -> str | None:
    """Why the CUDA kernels cannot be built here and what would change it, or None when they can."""
    if not machine.platform.startswith("linux"):
        return f"the CUDA kernels are built on Linux only; this is {machine.platform}"
    if machine.nvcc is None:
        return "no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda; install the CUDA toolkit or set CUDA_HOME"
    if machine.cuda < OLDEST_CUDA:
        found, oldest = (".".join(map(str, version)) for version in (machine.cuda, OLDEST_CUDA))
        return (
            f"{machine.nvcc} is of CUDA {found} and the kernels need {oldest}; install a newer toolkit or set CUDA_HOME"
        )
    if machine.compiler is None:
        return "nvcc needs a C++ compiler and there is none; install g++ or clang++, or set CXX"
    return None


def jobs_at_a_time(environment: Mapping[str, str], cores: int) -> int:
    """MAX_JOBS if it is set, else the number of cores."""
    asked = environment.get("MAX_JOBS", "")
    if not asked:
        return max(1, cores)
    if not asked.isdigit() or int(asked) == 0:
        raise ValueError(f"MAX_JOBS must be a positive number; got {asked!r}")
    return int(asked)


def this_machine(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Machine:
    """The machine at hand."""
    nvcc = find_nvcc(environment)
    compiler = find_compiler(environment, platform)
    if nvcc is None:
        return Machine(environment, compiler, None, (), cores(), platform)
    return Machine(environment, compiler, nvcc, visible_capabilities(), cores(), platform, cuda_version(nvcc))


def find_compiler(environment: Mapping[str, str], platform: str) -> str | None:
    """The C++ compiler that setuptools will use, if there is one."""
    if environment.get("CXX"):
        return shutil.which(shlex.split(environment["CXX"])[0])
    names = ("cl",) if platform == "win32" else ("c++", "g++", "clang++")
    return next((path for path in map(shutil.which, names) if path is not None), None)


def find_nvcc(environment: Mapping[str, str], default: str = "/usr/local/cuda") -> str | None:
    """nvcc of CUDA_HOME, of CUDA_PATH, on PATH, or where the toolkit installs itself; the first that is there."""
    homes = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    places = [*(str(Path(home) / "bin") for home in homes), environment.get("PATH", ""), str(Path(default) / "bin")]
    return next((path for place in places if place and (path := shutil.which("nvcc", path=place))), None)


def cuda_version(nvcc: str) -> tuple[int, int]:
    """Such as (13, 0); (0, 0) when it does not say, because it does not run or is no nvcc."""
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    release = re.search(r"release (\d+)\.(\d+)", answer.stdout)
    return (int(release[1]), int(release[2])) if release is not None else (0, 0)


def visible_capabilities() -> tuple[str, ...]:
    """Compute capabilities of the GPUs that the driver shows, each once; empty where there is no driver."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(sorted(set(re.findall(r"^\d+\.\d$", answer.stdout, re.MULTILINE))))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
