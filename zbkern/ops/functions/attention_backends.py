"""Which attention core impl="auto" runs on a GPU: ours, one of torch's, or an installed FlashAttention.

`ORDER` decides; `python -m bench.attention` measures what it should be on the GPU at hand. A core that cannot take the
case is passed over; `explain` says why, `zbkern info` prints it, and the log names each first choice.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zbkern.kernels import reference
from zbkern.kernels.reference.attention import ends_on_host
from zbkern.kernels.spec import AttentionOptions
from zbkern.ops.functions.attention import attention, attention_with_torch

_log = logging.getLogger("zbkern")

# Published for H100 (bf16, heads of 128, causal, 8192 tokens), TFLOP/s of forward and backward: FlashAttention-3 660
# and 575, cuDNN 566 and 470, FlashAttention-2 306 and 166 where it is deterministic. Ours is not measured yet: it
# stands behind what is known to be fast on that GPU, and before what was written for the one before it.
ORDER: Mapping[int, tuple[str, ...]] = {
    8: ("flash_attn 2", "torch flash", "triton", "torch cudnn", "torch"),
    9: ("flash_attn 3", "torch cudnn", "triton", "flash_attn 2", "torch flash", "torch"),
    10: ("torch cudnn", "triton", "flash_attn 2", "torch flash", "torch"),
}
"""By the major number of the compute capability; later ones as the last here."""


@dataclass(frozen=True)
class Case:
    """What decides which core can run. packed: sequences of different lengths. square: as many queries as keys.
    further: what only our core and the formula in torch's operations have."""

    capability: tuple[int, int]
    dtype: torch.dtype
    size: int
    causal: bool
    window: bool
    packed: bool
    square: bool
    deterministic: bool
    empty: bool = False
    further: str | None = None


def fastest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    ours: ModuleType | None,
    why_not_ours: str | None,
    sinks: Tensor | None = None,
    name_of_layer: str = "",
) -> Tensor:
    """attention(q, k, v) through the first core that can. ours: the Triton kernels, or None and why not."""
    case = case_of(q, k, v, options, sinks)
    for name in order(case):
        reason = why_not_ours if name == "triton" else None
        if reason is None and why_not(name, case) is None and accepts(name, q, k, v, options):
            _announce(case, name, why_not_ours)
            if sinks is not None:
                backend = ours if ours is not None and name == "triton" else reference
                return attention(backend, q, k, v, options, sinks, name_of_layer)
            return through(name, q, k, v, options, ours)
    raise AssertionError("torch's own operations take every case")


def through(
    name: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, ours: ModuleType | None = None
) -> Tensor:
    """attention(q, k, v) through that core, which can run it."""
    return _RUN[name](q, k, v, options) if ours is None or name != "triton" else attention(ours, q, k, v, options)


def case_of(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, sinks: Tensor | None = None) -> Case:
    packed = q.dim() == 3
    on_device = isinstance(options.queries, Tensor)
    features = {
        "sinks": sinks is not None,
        "a soft cap": options.softcap is not None,
        "lengths on the device": on_device,
        "values of another size": v.shape[-1] != q.shape[-1],
    }
    return Case(
        capability=torch.cuda.get_device_capability(q.device),
        dtype=q.dtype,
        size=max(q.shape[-1], v.shape[-1]),
        causal=options.causal,
        window=options.window is not None,
        packed=packed,
        square=not on_device and options.queries == options.keys,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        empty=q.numel() == 0 or k.numel() == 0 or v.numel() == 0,
        further=", ".join(feature for feature, has in features.items() if has) or None,
    )


def order(case: Case) -> tuple[str, ...]:
    """The names of all cores, fastest first."""
    if case.dtype not in (torch.float16, torch.bfloat16):  # ours multiplies three times, in small tiles
        plain = not (case.packed or case.window or case.further or (case.causal and not case.square))
        return ("torch", "triton") if plain else ("triton", "torch")
    return ORDER[min(max(case.capability[0], min(ORDER)), max(ORDER))]


def explain(case: Case, why_not_ours: str | None = None) -> list[tuple[str, str | None]]:
    """(core, why it cannot run the case, or None) in the order in which they are tried."""
    return [(name, why_not_ours if name == "triton" and why_not_ours else why_not(name, case)) for name in order(case)]


def lines(device: torch.device | str, why_not_ours: str | None) -> list[str]:
    """For `zbkern info`: the usual case on that GPU, and one that others' cores do not take."""
    capability = torch.cuda.get_device_capability(device)
    usual = Case(capability, torch.bfloat16, 128, True, False, False, True, False)
    windowed = replace(usual, dtype=torch.float32, window=True)
    found = []
    for what, case in (("bf16, causal, heads of 128", usual), ("float32 with a window", windowed)):
        cores = explain(case, why_not_ours)
        chosen = next(name for name, reason in cores if reason is None)
        found.append(f"  {what}: through {chosen}" + " (not measured by us yet)" * (case is usual))
        found += [f"  not {name}: {reason}" for name, reason in cores if reason is not None]
    return found


def why_not(name: str, case: Case) -> str | None:
    """Why that core cannot run the case, as far as that can be told without the tensors."""
    half = case.dtype in (torch.float16, torch.bfloat16)
    if name == "torch":
        return None
    if name == "triton":
        return "its kernels take heads of up to 256" if case.size > 256 else None
    if case.further:
        return f"we do not call it with {case.further}"
    if case.empty:
        return "there are no tokens"
    if not half:
        return f"it takes float16 and bfloat16, not {str(case.dtype).removeprefix('torch.')}"
    if name.startswith("flash_attn"):
        if name == "flash_attn 3" and case.capability[0] != 9:
            return "it is written for compute capability 9.0"
        if case.size > 256 or case.size % 8:
            return "it takes heads of up to 256, in multiples of 8"
        return _why_not_installed(name)
    if case.packed:
        return "it would run sequences of different lengths one by one"
    if case.window or (case.causal and not case.square):
        return "it would read this mask from memory"
    if name == "torch cudnn" and case.deterministic:
        return "its backward adds in an order that changes"
    return None


def accepts(name: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """What `why_not` could not tell: torch looks at the tensors, and at its own versions of the libraries."""
    if not name.startswith("torch "):
        return True
    grouped = q.shape[-2] != k.shape[-2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, options.causal, grouped)
    if name == "torch cudnn":
        return torch.backends.cuda.can_use_cudnn_attention(parameters)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _with_backend(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        with sdpa_kernel(backend):
            return attention_with_torch(q, k, v, options)

    return run


def _with_package(module: str) -> Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        functions: Any = importlib.import_module(module)
        window = (-1, -1) if options.window is None else (options.window - 1, 0)
        arguments = {
            "softmax_scale": options.scale,
            "causal": options.causal,
            "window_size": window,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if q.dim() == 4:
            y = functions.flash_attn_func(q, k, v, **arguments)
        else:
            both = ends_on_host(options.queries), ends_on_host(options.keys)
            ends, longest = (_ends(e, q.device) for e in both), (_longest(e) for e in both)
            y = functions.flash_attn_varlen_func(q, k, v, *ends, *longest, **arguments)
        return y[0] if isinstance(y, tuple) else y

    return run


_PACKAGES = {"flash_attn 3": "flash_attn_interface", "flash_attn 2": "flash_attn"}

_RUN = {
    "torch": attention_with_torch,
    "torch cudnn": _with_backend(SDPBackend.CUDNN_ATTENTION),
    "torch flash": _with_backend(SDPBackend.FLASH_ATTENTION),
    **{name: _with_package(module) for name, module in _PACKAGES.items()},
}


@functools.cache
def _why_not_installed(name: str) -> str | None:
    module = _PACKAGES[name]
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"installed, but does not load: {error}"
    if name == "flash_attn 2":
        version = metadata.version("flash-attn").split(".")
        if tuple(int(part) for part in version[:2]) < (2, 5):  # bottom-right masks, windows, deterministic backward
            return f"version {'.'.join(version)} is too old; 2.5 or later"
    return None


@functools.lru_cache(maxsize=256)
def _ends(ends: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=256)
def _longest(ends: tuple[int, ...]) -> int:
    return max((end - start for start, end in pairwise(ends)), default=0)


@functools.lru_cache(maxsize=256)
def _announce(case: Case, name: str, why_not_ours: str | None) -> None:
    """Once per case."""
    before = explain(case, why_not_ours)
    passed = "".join(f"; not {other}: {reason}" for other, reason in before if reason is not None)
    _log.info("attention of %s: through %s%s", case, name, passed)
