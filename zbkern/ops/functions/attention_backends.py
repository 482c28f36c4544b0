"""Which attention core impl="auto" runs on a GPU: ours, one of torch's, or an installed FlashAttention.

`ORDER` decides. A core that cannot take the case is passed over; `zbkern info` says which are there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zbkern.kernels import reference
from zbkern.kernels.reference.attention import ends_on_host
from zbkern.kernels.spec import AttentionOptions, largest_head
from zbkern.ops.functions.attention import attention, attention_with_torch

# Published for H100 (bf16, heads of 128, causal, 8192 tokens), TFLOP/s of forward and backward: FlashAttention-3 660
# and 575, cuDNN 566 and 470, FlashAttention-2 306 and 166 where it is deterministic. Measured on an H200 (bench.gpu):
# cuDNN 612 and 539, ours 476 and 340, torch's flash 320 and 292. Elsewhere ours stands behind what is known to be fast
# on that GPU, and before what was written for the one before it.
ORDER: Mapping[int, tuple[str, ...]] = {
    8: ("flash_attn 2", "torch flash", "triton", "torch cudnn", "torch"),
    9: ("flash_attn 3", "torch cudnn", "triton", "flash_attn 2", "torch flash", "torch"),
    10: ("torch cudnn", "triton", "flash_attn 2", "torch flash", "torch"),
}
"""By the major number of the compute capability; later ones as the last here."""


class Case(NamedTuple):
    """A call of attention. backend: our kernels, or None where they cannot run."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: AttentionOptions
    sinks: Tensor | None = None
    backend: Any = None


def fastest(case: Case, name: str = "") -> Tensor:
    """Attention through the first core that can; name: of the layer."""
    return _CORES[cores(case)[0]].run(case, name)


def cores(case: Case) -> list[str]:
    """The names of those that can run the case, fastest first."""
    order = _order(case.q.device)
    if case.q.dtype not in (torch.float16, torch.bfloat16):  # ours multiplies three times, in small tiles
        order = ("torch", "triton") if _is_plain(case) and not _is_masked(case) else ("triton", "torch")
    return [core for core in order if _CORES[core].takes(case)]


def lines(device: torch.device | str, why_not_ours: str | None) -> list[str]:
    """For `zbkern info`: what half precisions try on that GPU, in this order."""
    reasons = {"triton": why_not_ours, **{core: _why_not_installed(core) for core in _PACKAGES}}
    tried = [core if reasons.get(core) is None else f"not {core}: {reasons[core]}" for core in _order(device)]
    return ["  half precisions: the first of these that takes the case", *(f"  {core}" for core in tried)]


def _order(device: torch.device | str) -> tuple[str, ...]:
    major = torch.cuda.get_device_capability(device)[0]
    return ORDER[min(max(major, min(ORDER)), max(ORDER))]


def _is_plain(case: Case) -> bool:
    """Whether the cores of torch and of packages can compute the case."""
    return (
        case.sinks is None
        and case.options.softcap is None
        and not isinstance(case.options.queries, Tensor)
        and case.v.shape[-1] == case.q.shape[-1]
        and min(case.q.numel(), case.k.numel()) > 0
    )


def _is_masked(case: Case) -> bool:
    """Whether torch would read a plain case's mask from memory, or run its packed sequences one by one."""
    uneven = case.options.queries != case.options.keys
    return case.q.dim() == 3 or case.options.window is not None or (case.options.causal and uneven)


class _Core(NamedTuple):
    takes: Callable[[Case], bool]
    run: Callable[[Case, str], Tensor]


def _of_torch(backend: SDPBackend, can_use: str, deterministic: bool) -> _Core:
    def takes(case: Case) -> bool:
        if not _is_plain(case) or _is_masked(case):
            return False
        if torch.are_deterministic_algorithms_enabled() and not deterministic:
            return False
        grouped = case.q.shape[-2] != case.k.shape[-2]
        q, k, v = (t.transpose(1, 2) for t in (case.q, case.k, case.v))
        parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, case.options.causal, grouped)
        return getattr(torch.backends.cuda, can_use)(parameters)

    def run(case: Case, name: str) -> Tensor:
        with sdpa_kernel(backend):
            return attention_with_torch(None, case.q, case.k, case.v, case.options)

    return _Core(takes, run)


_PACKAGES = {"flash_attn 3": "flash_attn_interface", "flash_attn 2": "flash_attn"}


def _of_package(core: str) -> _Core:
    def takes(case: Case) -> bool:
        written_for = core != "flash_attn 3" or torch.cuda.get_device_capability(case.q.device)[0] == 9
        fits = case.q.shape[-1] <= 256 and case.q.shape[-1] % 8 == 0
        return _is_plain(case) and written_for and fits and _why_not_installed(core) is None

    def run(case: Case, name: str) -> Tensor:
        q, k, v, options = case[:4]
        functions: Any = importlib.import_module(_PACKAGES[core])
        arguments = {
            "softmax_scale": options.scale,
            "causal": options.causal,
            "window_size": (-1, -1) if options.window is None else (options.window - 1, 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if case.q.dim() == 4:
            y = functions.flash_attn_func(q, k, v, **arguments)
        else:
            both = ends_on_host(options.queries), ends_on_host(options.keys)
            ends, longest = (_ends(e, q.device) for e in both), (max(b - a for a, b in pairwise(e)) for e in both)
            y = functions.flash_attn_varlen_func(q, k, v, *ends, *longest, **arguments)
        return y[0] if isinstance(y, tuple) else y

    return _Core(takes, run)


_CORES = {
    "torch": _Core(lambda case: True, lambda case, name: attention(reference, *case[:5], name)),
    "torch cudnn": _of_torch(SDPBackend.CUDNN_ATTENTION, "can_use_cudnn_attention", deterministic=False),
    "torch flash": _of_torch(SDPBackend.FLASH_ATTENTION, "can_use_flash_attention", deterministic=True),
    "triton": _Core(
        lambda case: case.backend and max(case.q.shape[-1], case.v.shape[-1]) <= largest_head(case.q.dtype),
        lambda case, name: attention(case.backend, *case[:5], name),
    ),
    **{core: _of_package(core) for core in _PACKAGES},
}


@functools.cache
def _why_not_installed(core: str) -> str | None:
    module = _PACKAGES[core]
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"installed, but does not load: {error}"
    if core == "flash_attn 2":
        version = metadata.version("flash-attn").split(".")
        if tuple(int(part) for part in version[:2]) < (2, 5):  # bottom-right masks, windows, deterministic backward
            return f"version {'.'.join(version)} is too old; 2.5 or later"
    return None


@functools.lru_cache(maxsize=256)
def _ends(ends: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)
