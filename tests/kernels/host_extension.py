"""A stand-in for zbkern._cuda that computes on CPU memory what the extension computes on the GPU's, address by address.

With it the tensor side of kernels/cuda.py runs without a GPU: which addresses, strides and flags go into a launch, how
segments are split over launches, and what is copied first.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensor_at(address: int, kind: int, shape: tuple[int, ...], stride: int | None = None) -> Tensor:
    """The tensor that lies there. stride: between rows."""
    dtype = DTYPES[kind]
    strides = (stride, 1) if len(shape) == 2 else (1,)
    count = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
    buffer = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)


class HostExtension:
    """launches: the number of weights and of segments of each launch. grids: its places, max_tiles and hopper."""

    MAX_SEGMENTS = 16
    MAX_PRODUCTS = 4

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []
        self.grids: list[tuple[int, int, bool]] = []

    def has_sm90(self) -> bool:
        return True

    def wgrad(
        self, products: list[tuple], x_kind: int, dweight_kind: int, dbias_kind: int, accumulate: bool, *rest: Any
    ) -> None:
        assert len(products) <= self.MAX_PRODUCTS
        self.launches.append((len(products), sum(len(product[-1]) for product in products)))
        assert self.launches[-1][1] <= self.MAX_SEGMENTS
        self.grids.append(rest[:3])
        for dweight_at, dbias_at, n, k, stride, segments in products:
            dweight = tensor_at(dweight_at, dweight_kind, (n, k), stride)
            self._aligned(dweight_at, stride * dweight.itemsize)
            total = torch.zeros(n, k, dtype=torch.float64)
            bias = torch.zeros(n, dtype=torch.float64)
            for x_at, dy_at, rows, x_stride, dy_stride in segments:
                assert rows > 0
                self._aligned(x_at, dy_at, 2 * x_stride, 2 * dy_stride)
                assert x_stride >= k, "rows of x overlap"
                assert dy_stride >= n, "rows of dy overlap"
                dy = tensor_at(dy_at, x_kind, (rows, n), dy_stride).double()
                total += dy.t() @ tensor_at(x_at, x_kind, (rows, k), x_stride).double()
                bias += dy.sum(0)
            self._write(dweight, total, accumulate)
            if dbias_at:
                self._write(tensor_at(dbias_at, dbias_kind, (n,)), bias, accumulate)

    def adam(
        self, tensors: list[tuple], param: int, grad: int, control: int,
        beta1: float, beta2: float, eps: float, weight_decay: float, undo: bool, *rest: Any,
    ) -> None:  # fmt: skip
        rate, step, factor, skip = tensor_at(control, 0, (4,)).tolist()
        if skip:
            return
        for param_at, grad_at, m_at, v_at, master_at, count in tensors:
            weight, g = tensor_at(param_at, param, (count,)), tensor_at(grad_at, grad, (count,)).double() * factor
            m, v = tensor_at(m_at, 0, (count,)), tensor_at(v_at, 0, (count,))
            master = tensor_at(master_at, 0, (count,)) if master_at else weight
            if not undo:
                m.copy_(beta1 * m.double() + (1 - beta1) * g)
                v.copy_(beta2 * v.double() + (1 - beta2) * g * g)
            change = rate * m.double() / (1 - beta1**step) / ((v.double() / (1 - beta2**step)).sqrt() + eps)
            decay = 1 - rate * weight_decay
            new = (master.double() + change) / decay if undo else decay * master.double() - change
            master.copy_(new)
            weight.copy_(new)
            if undo:
                m.copy_((m.double() - (1 - beta1) * g) / beta1)
                v.copy_(((v.double() - (1 - beta2) * g * g) / beta2).clamp_min(0))

    def squared_norm_workspace(self, spans: list[tuple[int, int]]) -> int:
        return 2 * len(spans)

    def squared_norm(self, spans: list[tuple], kind: int, accumulate: bool, result: int, *rest: Any) -> None:
        values = [tensor_at(at, kind, (count,)).double() for at, count in spans]
        norm = sum(value.square().sum().item() for value in values)
        bad = any(not value.isfinite().all() for value in values)
        out = tensor_at(result, 0, (2,))
        before = out.tolist() if accumulate else (0.0, 0.0)
        out.copy_(torch.tensor([before[0] + norm, max(before[1], float(bad))]))

    def copy_all(self, copies: list[tuple[int, int, int]], *rest: Any) -> None:
        for target, source, size in copies:
            ctypes.memmove(target, source, size)

    @staticmethod
    def _aligned(*addresses: int) -> None:
        assert all(address % 16 == 0 for address in addresses)

    @staticmethod
    def _write(output: Tensor, value: Tensor, accumulate: bool) -> None:
        output.copy_(output.double() + value if accumulate else value)
