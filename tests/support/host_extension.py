"""A stand-in for zbkern._cuda that computes on CPU memory what the extension computes on the GPU's, address by address.

With it the tensor side of kernels/cuda/wgrad.py runs without a GPU: which addresses, strides and flags go into a
launch, how segments are split over launches, and what is copied first.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensor_at(address: int, kind: int, shape: tuple[int, ...], stride: int | None = None) -> Tensor:
    """The tensor that lies there. stride: between rows."""
    dtype = DTYPES[kind]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    strides = (stride, 1) if len(shape) == 2 else (1,)
    count = sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
    buffer = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)


class AdamTensors:
    """Addresses of tensors and their states: params, exp_avgs, exp_avg_sqs, steps, masters, and numbers of elements."""

    def __init__(self, columns: tuple[list[int], ...]) -> None:
        self.rows = list(zip(*columns, strict=True))
        self.grads: list[int] = []

    def set_grads(self, grads: list[int]) -> None:
        self.grads = grads


class Spans:
    def __init__(self, data: list[int], counts: list[int]) -> None:
        self.data, self.counts, self.workspace = data, counts, 2 * len(counts)


class HostExtension:
    """launches: the number of weights and of segments of each launch. grids: its places, max_tiles and hopper. reduced:
    whether stores may add.

    adams: the number of tensors of each launch of AdamW.
    """

    MAX_SEGMENTS = 16
    MAX_PRODUCTS = 4

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []
        self.grids: list[tuple[int, int, bool]] = []
        self.reduced: list[bool] = []
        self.adams: list[int] = []

    def has_sm90(self) -> bool:
        return True

    def wgrad(
        self, products: list[tuple], x_kind: int, dweight_kind: int, dbias_kind: int, accumulate: bool, *rest: Any
    ) -> None:
        assert len(products) <= self.MAX_PRODUCTS
        self.launches.append((len(products), sum(len(product[-1]) for product in products)))
        assert self.launches[-1][1] <= self.MAX_SEGMENTS
        self.grids.append(rest[:3])
        self.reduced.append(rest[5])
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

    @staticmethod
    def AdamTensors(*columns: list[int]) -> AdamTensors:
        return AdamTensors(columns)

    @staticmethod
    def Spans(data: list[int], counts: list[int]) -> Spans:
        return Spans(data, counts)

    def adam(
        self, tensors: AdamTensors, param: int, grad: int, control: int, lr: float, lr_at: int,
        beta1: float, beta2: float, eps: float, weight_decay: float, max_norm: float, maximize: bool, undo: bool,
        *rest: Any,
    ) -> None:  # fmt: skip
        self.adams.append(len(tensors.rows))
        rate, factor = tensor_at(lr_at, 0, (1,)).item() if lr_at else lr, -1.0 if maximize else 1.0
        if control:
            squares, bad, scale = tensor_at(control, 0, (3,)).tolist()
            if bad or not math.isfinite(squares):
                return
            factor *= min(1.0, max_norm / (math.sqrt(squares) / scale + 1e-6)) / scale
        for grad_at, (param_at, m_at, v_at, step_at, master_at, count) in zip(tensors.grads, tensors.rows, strict=True):
            count_of_steps = tensor_at(step_at, 0, (1,))
            count_of_steps += 0 if undo else 1
            step = count_of_steps.item()
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
                count_of_steps -= 1

    def squared_norm(self, spans: Spans, kind: int, accumulate: bool, result: int, *rest: Any) -> None:
        values = [tensor_at(at, kind, (count,)).double() for at, count in zip(spans.data, spans.counts, strict=True)]
        norm = sum(value.square().sum().item() for value in values)
        bad = any(not value.isfinite().all() for value in values)
        out = tensor_at(result, 0, (2,))
        before = out.tolist() if accumulate else (0.0, 0.0)
        out.copy_(torch.tensor([before[0] + norm, max(before[1], float(bad))]))

    @staticmethod
    def _aligned(*addresses: int) -> None:
        assert all(address % 16 == 0 for address in addresses)

    @staticmethod
    def _write(output: Tensor, value: Tensor, accumulate: bool) -> None:
        output.copy_(output.double() + value if accumulate else value)
