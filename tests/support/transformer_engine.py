"""Stand-ins of TransformerEngine's modules, which need a GPU: its contract of delayed W, as of 2.20."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Float8Storage:
    """As those of TransformerEngine: no tensor, made of two, and nothing but arguments by name makes one."""

    def __new__(cls, *, data: Tensor, scale: Tensor) -> Float8Storage:
        made = object.__new__(cls)
        made._data, made._scale, made._transpose = data, scale, None
        return made

    def dequantize(self) -> Tensor:
        return self._data * self._scale


def quantised(x: Tensor) -> Float8Storage:
    return Float8Storage(data=x / 4, scale=torch.tensor(4.0))


class Product(torch.autograd.Function):
    """B of te.Linear 2.20: the input's gradient is returned, W is put into the module's store, with a function that
    returns those of weight and bias; of the latter None where B has it, which is so in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return nn.functional.linear(x, weight, bias if bias.numel() else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        module = ctx.module
        has_bias = bool(module.bias.numel())

        def wgrad_gemm(x: Any, dy: Any) -> tuple[Any, ...]:
            if module.fp8:
                x, dy = x.dequantize(), dy.dequantize()
            fused = module.fuse_wgrad_accumulation
            dw = weight.main_grad.addmm_(dy.t(), x) if fused else dy.t() @ x
            return dw, dy.sum(0) if has_bias and not module.fp8 else None

        module.wgrad_store.put([quantised(x), quantised(dy)] if module.fp8 else [x, dy], wgrad_gemm)
        return dy @ weight, None, dy.sum(0) if has_bias and module.fp8 else None, None


class Store:
    """Its own store: one for each module, which delays or does not."""

    def __init__(self, delays: bool) -> None:
        self.delay_wgrad_compute = lambda: delays


class Reduced(nn.Module):
    """What all of them have: gradients that wait in a store, and what follows W."""

    def __init__(self, fused: bool, delays: bool = True) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation, self.wgrad_store, self.reduced = fused, Store(delays), 0

    def hold_main_grads(self) -> None:
        for name, weight in self.named_parameters():
            if "weight" in name and self.fuse_wgrad_accumulation:
                weight.main_grad = torch.zeros_like(weight)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        self.reduced += 1


class Linear(Reduced):
    """te.Linear: without a bias, its bias is an empty tensor."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, fused: bool = False, delays: bool = True, fp8: bool = False
    ) -> None:
        super().__init__(fused, delays)
        self.fp8 = fp8
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self.bias, self)

    def backward_dw(self) -> None:
        self.wgrad_store.pop()


class Mlp(torch.autograd.Function):
    """B of te.LayerNormMLP 2.20, without its norm: W of fc2 is put first; W of a frozen weight is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, module: Any) -> Tensor:
        hidden = nn.functional.linear(x, w1, b1)
        ctx.save_for_backward(x, hidden, w1, w2)
        ctx.module = module
        return nn.functional.linear(hidden.tanh(), w2, b2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, hidden, w1, w2 = ctx.saved_tensors
        module = ctx.module
        dhidden = (dy @ w2) * (1 - hidden.tanh().square())

        def product(weight: Tensor, x: Tensor, dy: Tensor) -> tuple[Any, ...]:
            fused = module.fuse_wgrad_accumulation
            return weight.main_grad.addmm_(dy.t(), x) if fused else dy.t() @ x, dy.sum(0)

        def fc2_wgrad_gemm(x: Tensor, dy: Tensor) -> tuple[Any, ...]:
            return product(module.fc2_weight, x, dy)

        def fc1_wgrad_gemm(x: Tensor, dy: Tensor) -> tuple[Any, ...]:
            return product(module.fc1_weight, x, dy)

        apart = []  # a bias of a frozen weight has its gradient from B
        for weight, bias, given, gradient, function in (
            (module.fc2_weight, module.fc2_bias, hidden.tanh(), dy, fc2_wgrad_gemm),
            (module.fc1_weight, module.fc1_bias, x, dhidden, fc1_wgrad_gemm),
        ):
            if weight.requires_grad:
                module.wgrad_store.put([given, gradient], function)
            apart.append(gradient.sum(0) if bias.requires_grad and not weight.requires_grad else None)
        return dhidden @ w1, None, apart[1], None, apart[0], None


class LayerNormMLP(Reduced):
    def __init__(self, width: int, hidden: int, fused: bool) -> None:
        super().__init__(fused)
        self.fc1_weight, self.fc1_bias = nn.Parameter(torch.randn(hidden, width)), nn.Parameter(torch.randn(hidden))
        self.fc2_weight, self.fc2_bias = nn.Parameter(torch.randn(width, hidden)), nn.Parameter(torch.randn(width))
        self.hold_main_grads()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return Mlp.apply(x, self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias, self)

    def with_torch(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.fc1_weight, self.fc1_bias).tanh()
        return nn.functional.linear(hidden, self.fc2_weight, self.fc2_bias)


class Grouped(torch.autograd.Function):
    """B of te.GroupedLinear 2.20 with fuse_wgrad_accumulation: one put of lists, by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], module: Any, *params: Tensor) -> Tensor:
        ctx.module, ctx.counts, ctx.params = module, counts, params
        ctx.save_for_backward(x)
        weights, biases = params[: len(counts)], params[len(counts) :] or [None] * len(counts)
        return torch.cat([nn.functional.linear(*each) for each in zip(x.split(counts), weights, biases, strict=True)])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        module, counts, (x,) = ctx.module, ctx.counts, ctx.saved_tensors
        weights, in_w = ctx.params[: len(counts)], module.use_bias and not module.fp8

        def grouped_gemm_wgrad(inputs: list[Any], gradients: list[Any], outputs: list[Tensor]) -> tuple[Any, ...]:
            if module.fp8:
                inputs, gradients = ([each.dequantize() for each in given] for given in (inputs, gradients))
            for x, dy, out in zip(inputs, gradients, outputs, strict=True):
                out.addmm_(dy.t(), x)
            return None, [dy.sum(0) if in_w else None for dy in gradients], None

        both = [list(each.split(counts)) for each in (x, dy)]
        given = [[quantised(part) for part in parts] for parts in both] if module.fp8 else both
        module.wgrad_store.put([*given, [weight.main_grad for weight in weights]], grouped_gemm_wgrad)
        dx = torch.cat([part @ weight for part, weight in zip(both[1], weights, strict=True)])
        biases = [part.sum(0) if module.fp8 else None for part in both[1]] if module.use_bias else []
        return dx, None, None, *[None] * len(counts), *biases


class GroupedLinear(Reduced):
    def __init__(
        self, num_gemms: int, inputs: int, outputs: int, bias: bool, fused: bool = True, fp8: bool = False
    ) -> None:
        super().__init__(fused)
        self.num_gemms, self.use_bias, self.fp8 = num_gemms, bias, fp8
        for number in range(num_gemms):
            setattr(self, f"weight{number}", nn.Parameter(torch.randn(outputs, inputs)))
            if bias:
                setattr(self, f"bias{number}", nn.Parameter(torch.randn(outputs)))
        self.hold_main_grads()

    def _get_weight_tensors(self) -> list[Tensor]:
        return [getattr(self, f"weight{number}") for number in range(self.num_gemms)]

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        biases = [getattr(self, f"bias{number}") for number in range(self.num_gemms)] if self.use_bias else []
        return Grouped.apply(x.requires_grad_(), counts, self, *self._get_weight_tensors(), *biases)
