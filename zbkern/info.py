"""What this machine can run, op by op, and what to do about the rest. Needs no torch to say that torch is missing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from importlib import metadata

import zbkern

_GET = {
    "torch": "pip install torch (2.8 or later); without a GPU, a CPU build saves gigabytes",
    "triton": "comes with CUDA builds of torch on Linux; only kernels for the GPU and their tests need it",
}


_WITHOUT_LAUNCHER = "each launch of a Triton kernel takes the host tens of microseconds"


def lines() -> list[str]:
    """The report, a line each."""
    found = [f"zbkern {zbkern.__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}", ""]
    for package, how in _GET.items():
        found.append(_row(package, _version(package) or f"not installed: {how}"))
    found.append(_row("planner", _compiled("_planner", "the best published schedule is the plan")))
    found.append(_row("launcher", _compiled("_launcher", _WITHOUT_LAUNCHER)))
    found.append(_row("CUDA kernels", _cuda_kernels()))
    if importlib.util.find_spec("torch") is None:
        return [*found, "", "Schedules, their simulation and their pictures work now; layers and pipelines need torch."]
    return [*found, "", *_devices(), "", *_ops()]


def main() -> int:
    """Prints the report."""
    print("\n".join(lines()))
    return 0


def _devices() -> list[str]:
    import torch
    import torch.distributed as dist

    from zbkern.kernels.reference import matmul as reference_matmul

    threads = torch.get_num_threads()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = [name for name in ("gloo", "nccl") if dist.is_available() and dist.is_backend_available(name)]
    return [
        _row("devices", f"CPU with {threads} thread{'s' * (threads > 1)}" + "".join(f", {gpu}" for gpu in gpus)),
        _row("fp32 on a CPU", reference_matmul.library()),
        _row("GPU", "visible" if gpus else "none is visible: ops run through torch on the CPU"),
        _row(
            "pipelines", f"over {' and '.join(backends)}" if backends else "none: this torch has no torch.distributed"
        ),
    ]


def _ops() -> list[str]:
    import torch

    from zbkern.kernels import dispatch, spec
    from zbkern.ops.functions import attention_backends

    device = "cuda" if torch.cuda.is_available() else "cpu"
    groups: dict[str, list[str]] = {}  # ops of which the same is to be said
    for op in spec.OPS:
        reasons = {impl: dispatch.why_not(op, impl, device) for impl in spec.IMPLEMENTATIONS}
        chosen = next((impl for impl in dispatch.candidates(device) if reasons[impl] is None), "nothing")
        named = [impl for impl, reason in reasons.items() if reason is None and impl != chosen]
        if chosen == "triton" and "linear_fwd" in spec.OPS[op]:
            single_w = torch.cuda.get_device_capability()[0] in dispatch.W_OF_THE_LIBRARY
            chosen += f" (matmuls with nothing to fuse{' and W over one microbatch' * single_w}: cuBLAS)"
        also = f", where named through {' or '.join(named)}" if named else ""
        passed = [f"  not {impl}: {reason}" for impl, reason in reasons.items() if reason is not None]
        if op == "attention" and device == "cuda":  # which has more to choose from
            groups["impl='auto' on cuda\n" + "\n".join(attention_backends.lines(device, reasons["triton"]))] = [op]
            continue
        groups.setdefault("\n".join([f"run through {chosen} on {device}{also}", *passed]), []).append(op)
    return [f"{', '.join(ops)}\n  {text}" for text, ops in groups.items()]


def _compiled(module: str, without: str) -> str:
    """Whether it was: `pip install` does where it finds a C++ compiler."""
    try:
        importlib.import_module(f"zbkern.{module}")
    except ImportError:
        return f"{without}: install a C++ compiler, then install zbkern again"
    return "compiled"


def _cuda_kernels() -> str:
    """What was built, for what, or why nothing was and what to do."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [f"{home}/bin" for home in homes if home]
    nvcc = shutil.which("nvcc", path=os.pathsep.join([*places, os.environ.get("PATH", "")]))
    try:
        built = importlib.import_module("zbkern._cuda")
    except ModuleNotFoundError:
        if _no_gpu_is_of((9, 0)):
            return "not built: no GPU here is of compute capability 9.0, which they are for"
        if nvcc is None:
            return "not built: nvcc was not found; install the CUDA toolkit or set CUDA_HOME, then install zbkern again"
        return f"not built, but {nvcc} is here: install zbkern again with ZBKERN_BUILD=cuda"
    except ImportError as error:
        return f"built, but they do not load: {error}; install zbkern again"
    version = f"{built.CUDA_VERSION // 1000}.{built.CUDA_VERSION % 1000 // 10}"
    return f"built with CUDA {version} and CUTLASS {built.CUTLASS_VERSION} for compute capability 9.0"


def _no_gpu_is_of(capability: tuple[int, int]) -> bool:
    """Whether there are GPUs, and all are others."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return bool(found) and capability not in found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _row(name: str, value: str) -> str:
    return f"{name:<15} {value}"


if __name__ == "__main__":
    sys.exit(main())
