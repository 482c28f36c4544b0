"""Which modules of other libraries, or of one's own, are an RMSNorm: found by trying, since all write it anew.

Names do not tell: of some 200 such classes in the transformers library most are RMSNorm, T5LayerNorm among them, but
GemmaRMSNorm multiplies by 1 + weight, and others by a gate.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from zbkern.nn import eps_of

SIZES = ((1.0, 0.01, 100.0), (10.0, 1e-3, 1e-4))  # of rows in two batches: with the small ones eps is what counts
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # a few roundings, of what is added up


def looks_like_rms_norm(module: nn.Module) -> bool:
    """True for a module of one tensor, a weight [K], that has an eps and takes one argument."""
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.dim() == 1
        and weight.is_floating_point()
        and len(module._parameters) + len(module._buffers) + len(module._modules) == 1
        and eps_of(module) is not None
        and "forward" not in vars(module)
        and len(inspect.signature(type(module).forward).parameters) == 2
    )


def is_rms_norm(module: nn.Module) -> bool:
    """True when a module that looks like RMSNorm gives the values and gradients of RMSNorm on random tensors.

    In float32, and in bfloat16 with a few roundings more or less. The module is not touched: a copy that shares
    everything but the weight computes, on the CPU and without hooks.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            return all(_agrees(module, dtype, tolerance) for dtype, tolerance in TOLERANCES.items())
    except Exception:  # whatever it needs, it is not what RMSNorm needs
        return False


def _agrees(module: nn.Module, dtype: torch.dtype, tolerance: float) -> bool:
    sizes = torch.tensor(SIZES, device="cpu").unsqueeze(-1)
    generator, features = torch.Generator().manual_seed(0), module.get_parameter("weight").numel()
    x, dy = torch.randn(2, *sizes.shape[:-1], features, generator=generator, device="cpu")
    weight = torch.randn(features, generator=generator, device="cpu")
    own = [nn.Parameter(tensor.to(dtype)) for tensor in (x * sizes, weight)]
    twin = copy.copy(module)
    vars(twin)["_parameters"] = {"weight": own[1]}
    found = type(module).forward(twin, own[0])
    if found.dtype != dtype:
        return False
    found = (found, *torch.autograd.grad(found, own, dy.to(dtype)))
    wide = [nn.Parameter(tensor.detach().double()) for tensor in own]
    dy = dy.to(dtype).double()
    rstd = torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + (eps_of(module) or 0.0))
    y = wide[0] * rstd * wide[1]
    expected = (y, *torch.autograd.grad(y, wide, dy))
    largest = [(dy * rstd * wide[1]).abs().amax(-1, keepdim=True), (dy * wide[0] * rstd).abs().sum((0, 1))]
    return all(
        a.shape == b.shape and bool(((a.double() - b).abs() <= tolerance * most).all())
        for a, b, most in zip(found, expected, [y.abs(), *largest], strict=True)
    )
