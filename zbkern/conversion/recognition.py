"""Which modules of other libraries, or of one's own, are an RMSNorm: those whose forward does what one of these does.

Neither names nor a trial tell: GemmaRMSNorm multiplies by 1 + weight, others clamp what is large, repair NaN, or act by
the shape. So the code of the forward is compared, operation by operation; whatever differs is left to interception.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from zbkern.nn import EPS_NAMES, eps_of


class _RoundedBeforeWeight(nn.Module):
    def forward(self: Any, x: Tensor) -> Any:
        dtype = x.dtype
        x = x.to(torch.float32)
        mean = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean + self.eps)
        return self.weight * x.to(dtype)


class _RoundedAfterWeight(nn.Module):
    def forward(self: Any, x: Tensor) -> Any:
        dtype = x.dtype
        x = x.to(torch.float32)
        mean = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean + self.eps)
        return (self.weight * x).to(dtype)


class _RoundedAsWeight(nn.Module):
    def forward(self: Any, x: Tensor) -> Any:
        mean = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


class _WithoutWeightFirst(nn.Module):
    def forward(self: Any, x: Tensor) -> Any:
        y = self._norm(x.float()).type_as(x)
        return y * self.weight

    def _norm(self: Any, x: Tensor) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def is_rms_norm(module: nn.Module) -> bool:
    """True for a module of one tensor, a weight [K], whose forward is one of those above, by whatever names."""
    weight, kind = module._parameters.get("weight"), type(module)
    return (
        weight is not None
        and weight.dim() == 1
        and weight.is_floating_point()
        and len(module._parameters) + len(module._buffers) + len(module._modules) == 1
        and eps_of(module) is not None
        and sum(hasattr(module, name) for name in EPS_NAMES) == 1
        and not hasattr(kind, "weight")
        and any(_has_methods_of(form, module) for form in FORMS)
    )


FORMS = (_RoundedBeforeWeight, _RoundedAfterWeight, _RoundedAsWeight, _WithoutWeightFirst)


def _has_methods_of(form: type[nn.Module], module: nn.Module) -> bool:
    methods = {name: method for name, method in vars(form).items() if isinstance(method, FunctionType)}
    present = {name: getattr(type(module), name, None) for name in methods}
    return not methods.keys() & vars(module).keys() and all(_same(present[name], methods[name]) for name in methods)


def _same(function: Any, other: FunctionType) -> bool:
    """Whether two functions run the same instructions, whatever their variables and the eps are called."""
    if not isinstance(function, FunctionType) or function.__globals__.get("torch") is not torch:
        return False
    code, form = function.__code__, other.__code__
    names = tuple("eps" if name in EPS_NAMES else name for name in code.co_names)
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, len(code.co_varnames)
    expected = form.co_argcount, form.co_posonlyargcount, form.co_kwonlyargcount, len(form.co_varnames)
    # Constants by their text: 1 == True
    return (code.co_code, names, repr(code.co_consts), arguments, code.co_freevars) == (
        *(form.co_code, form.co_names, repr(form.co_consts), expected, ()),
    )
