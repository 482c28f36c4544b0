"""Which implementation runs an op: named ones run or raise, "auto" takes the first of cuda, triton, torch that can.

An implementation is a module that has the launches of `spec.py` as functions. It is imported when first asked for.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from zbkern.kernels import spec

_MODULES = {"torch": "zbkern.kernels.reference"}


class UnavailableError(RuntimeError):
    """A named implementation cannot run here; the message says why and what would."""


@functools.cache
def why_not(op: str, impl: str, device: str) -> str | None:
    """Why `impl` cannot run `op` on that kind of device ("cpu", "cuda"), or None when it can."""
    if impl not in spec.IMPLEMENTATIONS:
        return f"there is no implementation {impl!r}; choose from {', '.join(spec.IMPLEMENTATIONS)} or 'auto'"
    if impl not in _MODULES:
        return f"this version of zbkern has no {impl} kernels; use impl='torch' or impl='auto'"
    module = importlib.import_module(_MODULES[impl])
    missing = [name for name in spec.OPS[op] if not hasattr(module, name)]
    return f"{impl} lacks {', '.join(missing)}" if missing else None


@functools.cache
def resolve(op: str, impl: str, device: str) -> ModuleType:
    """The module whose launches run `op`. Raises UnavailableError when a named implementation cannot."""
    for candidate in spec.IMPLEMENTATIONS if impl == "auto" else (impl,):
        reason = why_not(op, candidate, device)
        if reason is None:
            return importlib.import_module(_MODULES[candidate])
    raise UnavailableError(f"{op}: impl={impl!r} cannot run on {device}: {reason}")
