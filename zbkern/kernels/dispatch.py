"""Which backend runs an op: a named one runs or raises, "auto" takes the first that can.

A backend is a module that has the kernels of `spec.py` as functions. It is imported when first asked for. The CUDA
extension has only the kernels that it is meant to do better than Triton; the others of an op come from there.

On a GPU "auto" takes Triton's kernels, but cuBLAS for a matmul with nothing to fuse, which is known to be near the
ceiling; on 10.x W over one microbatch is one of these until ours has been measured there. No measurement says
otherwise yet: W of the CUDA extension runs where impl="cuda" asks for it, and `python -m bench.gpu --rows W` compares
it with Triton's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor

from zbkern.kernels import spec
from zbkern.kernels.spec import Outputs, Segments

_MODULES = {
    "cuda": "zbkern.kernels.cuda.wgrad",
    "triton": "zbkern.kernels.triton.kernels",
    "torch": "zbkern.kernels.reference",
}
_FALLBACK_BACKEND = {"cuda": "triton"}  # has the kernels that the other one lacks

W_OF_THE_LIBRARY = (10,)
"""Major compute capabilities on which "auto" gives W over one microbatch to cuBLAS: ours is not measured there."""

_OLDEST_TRITON = (3, 6)
"""Earlier compilers are correct, but spill registers in one kernel of ten (Triton 3.4: 47 of 435 variants)."""

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class UnavailableError(RuntimeError):
    """A named backend cannot run here; the message says why, and what to do."""


@functools.cache
def why_not(op: str, impl: str, device: torch.device | str, dtype: torch.dtype | None = None) -> str | None:
    """Why `impl` cannot run `op` on that device for inputs of that dtype (None: of any), or None when it can."""
    if impl not in spec.IMPLEMENTATIONS:
        return f"there is no implementation {impl!r}; choose from {', '.join(spec.IMPLEMENTATIONS)} or 'auto'"
    reason = None
    if impl == "triton":
        reason = _why_not_triton(op, torch.device(device), dtype)
    elif impl == "cuda":
        reason = _why_not_cuda(op, torch.device(device), dtype)
    if reason is not None:
        return reason
    module = _backend(impl)
    missing = [name for name in spec.OPS[op] if not hasattr(module, name)]
    return f"{impl} lacks {', '.join(missing)}" if missing else None


@functools.cache
def resolve(op: str, impl: str, device: torch.device | str, dtype: torch.dtype | None = None) -> ModuleType:
    """The module whose kernels run `op`. Raises UnavailableError when a named backend cannot."""
    for candidate in candidates(device) if impl == "auto" else (impl,):
        reason = why_not(op, candidate, device, dtype)
        if reason is None:
            if impl != "auto" or candidate != "triton":
                return _backend(candidate)
            return _auto_backend(torch.cuda.get_device_capability(device)[0] in W_OF_THE_LIBRARY)
    raise UnavailableError(f"{op}: impl={impl!r} cannot run on {device}: {reason}")


def candidates(device: torch.device | str) -> tuple[str, ...]:
    """The backends that "auto" chooses from, in order.

    Where "auto" takes Triton, some matmuls are cuBLAS's (`_auto_backend`).
    """
    return ("triton", "torch") if torch.device(device).type == "cuda" else ("torch",)


@functools.cache
def _backend(impl: str) -> ModuleType:
    module = importlib.import_module(_MODULES[impl])
    if impl not in _FALLBACK_BACKEND:
        return module
    return _joined(f"{module.__name__} and {_FALLBACK_BACKEND[impl]}", _backend(_FALLBACK_BACKEND[impl]), module)


def _joined(name: str, *owners: ModuleType) -> ModuleType:
    """A module with the kernels of all, those of the last where several have one."""
    joined = ModuleType(name)
    for owner in owners:
        vars(joined).update({kernel: getattr(owner, kernel) for kernel in spec.KERNELS if hasattr(owner, kernel)})
    return joined


@functools.cache
def _auto_backend(single_w: bool) -> ModuleType:
    """Triton's kernels, but F and B of a linear without an activation through torch, which is cuBLAS. single_w: also W
    over one segment, unless its launch leaves room for work on other streams (max_tiles)."""
    triton, library = _backend("triton"), _backend("torch")

    def linear_fwd(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        y: Tensor,
        activation: str | None = None,
        z: Tensor | None = None,
    ) -> None:
        (library if activation is None else triton).linear_fwd(x, weight, bias, y, activation, z)

    joined = _joined("triton, with matmuls of cuBLAS", triton)
    vars(joined).update(linear_fwd=linear_fwd, linear_dgrad=library.linear_dgrad)
    if not single_w:
        return joined

    def linear_wgrads(layers: Iterable[tuple[Segments, Outputs]], accumulate: bool, max_tiles: int = 0) -> None:
        by_library: dict[bool, list[tuple[Segments, Outputs]]] = {True: [], False: []}
        for layer in layers:
            by_library[len(layer[0]) == 1 and not max_tiles].append(layer)
        library.linear_wgrads(by_library[True], accumulate)
        triton.linear_wgrads(by_library[False], accumulate, max_tiles=max_tiles)

    def linear_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
        linear_wgrads([(segments, outputs)], accumulate)

    vars(joined).update(linear_wgrad=linear_wgrad, linear_wgrads=linear_wgrads)
    return joined


def _why_not_cuda(op: str, device: torch.device, dtype: torch.dtype | None) -> str | None:
    module = importlib.import_module(_MODULES["cuda"])
    if not any(hasattr(module, name) for name in spec.OPS[op]):
        return "it has nothing of its own for this; use impl='triton'"
    if dtype is not None and dtype not in module.DTYPES:
        names = " and ".join(str(taken).removeprefix("torch.") for taken in module.DTYPES)
        return f"its kernels take {names}, not {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return f"its kernels need a CUDA device, not {device}"
    return module.why_not(device) or why_not(op, _FALLBACK_BACKEND["cuda"], device, dtype)


def _why_not_triton(op: str, device: torch.device, dtype: torch.dtype | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; it comes with CUDA builds of torch on Linux"
    if dtype is not None and dtype not in _TRITON_DTYPES:
        return f"its kernels take float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return f"its kernels need a CUDA device, not {device}"
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on"):
        return "its kernels are compiled; unset TRITON_INTERPRET"
    if torch.version.hip is not None:
        return "its kernels are written for NVIDIA GPUs"
    version = importlib.import_module("triton").__version__
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_TRITON:
        return "its kernels need Triton {}.{} or later, which comes with torch 2.10; this is {}".format(
            *_OLDEST_TRITON, version
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "its kernels need compute capability 8.0 or later; this GPU has {}.{}".format(*capability)
    if op == "float8" and capability < (8, 9):
        return "numbers of 8 bits need compute capability 8.9 or later; this GPU has {}.{}".format(*capability)
    return None
