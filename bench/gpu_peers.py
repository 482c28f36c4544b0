"""Kernels of other libraries, if installed: what the rows of `bench.gpu` are compared with besides torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Peers = dict[str, Callable[..., Any]]

_PACKAGES = ("torch", "triton", "liger_kernel", "quack-kernels", "flash_attn", "flash_attn_3", "nvidia-cutlass-dsl")


def versions() -> dict[str, str]:
    """Of every package here whose kernels may appear in the table."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _function(module: str, name: str) -> Callable[..., Any] | None:
    """That function, or None where its package is missing or does not import."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # a package built for another torch or GPU fails in many ways
        return None


def rms_norm(weight: Tensor, eps: float) -> Peers:
    """name -> function of x [M, K], differentiable."""
    peers: Peers = {"torch": lambda x: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)}
    liger = _function("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    if liger is not None:
        peers["Liger"] = lambda x: liger.apply(x, weight, eps)
    quack = _function("quack.rmsnorm", "rmsnorm")
    if quack is not None:
        peers["QuACK"] = lambda x: quack(x, weight, eps=eps)
    return peers


def added_rms_norm(weight: Tensor, eps: float) -> Peers:
    """name -> function of x, residual [M, K]: (the norm of their sum, the sum)."""

    def two(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + residual
        return torch.nn.functional.rms_norm(summed, weight.shape, weight, eps), summed

    peers: Peers = {"torch": two}
    quack = _function("quack.rmsnorm", "rmsnorm")
    if quack is not None:
        peers["QuACK"] = lambda x, residual: quack(x, weight, residual=residual, eps=eps)
    return peers


def rotary(cos: Tensor, sin: Tensor, interleaved: bool) -> Peers:
    """name -> function of x [B, T, H, D], of which all columns are turned by cos, sin [T, D / 2]."""
    wide = cos[:, None], sin[:, None]

    def eager(x: Tensor) -> Tensor:
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = a * wide[0] - b * wide[1], b * wide[0] + a * wide[1]
        joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        return joined.to(x.dtype)

    peers: Peers = {"torch": eager}
    flash = _function("flash_attn.layers.rotary", "apply_rotary_emb")
    if flash is not None:
        peers["flash_attn"] = lambda x: flash(x, cos.to(x.dtype), sin.to(x.dtype), interleaved=interleaved)
    return peers


def attention(device: torch.device) -> Peers:
    """name -> function of q, k, v [B, T, H, D], causal, differentiable."""

    def sdpa(backend: SDPBackend | None) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            inputs = [t.transpose(1, 2) for t in (q, k, v)]
            if backend is None:
                return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True).transpose(1, 2)
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True).transpose(1, 2)

        return run

    if device.type != "cuda":
        return {"SDPA": sdpa(None)}
    peers: Peers = {"SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION), "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION)}
    for name, module in (("FA3", "flash_attn_interface"), ("FA2", "flash_attn")):
        function = _function(module, "flash_attn_func")
        if function is not None:
            peers[name] = _first(function)
    return peers


def _first(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Some versions return the log-sum-exp, too."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, causal=True)
        return result[0] if isinstance(result, tuple) else result

    return run


def linear_cross_entropy() -> Peers:
    """name -> function of x [M, K], weight [V, K], target [M]: the mean loss, differentiable."""

    def whole(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((x @ weight.t()).float(), target)

    peers: Peers = {"torch": whole}
    liger = _function("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    if liger is not None:
        peers["Liger"] = lambda x, weight, target: liger(x, weight, target)
    quack = _function("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    if quack is not None:
        peers["QuACK"] = lambda x, weight, target: quack(x, weight, target)
    return peers
