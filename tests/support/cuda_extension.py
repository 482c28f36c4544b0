"""A program that runs every CUDA kernel once; and a stand-in for zbkern._cuda, which computes on CPU memory what the
extension computes on the GPU's, address by address.

With the stand-in the tensor side of kernels/cuda runs without a GPU: which addresses, strides and flags go into a
launch, how segments are split over launches, and what is copied first.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

SMALL_RUN = """
from functools import partial
import torch
from zbkern.kernels.cuda import wgrad

chosen = wgrad._cuda.wgrad

def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)

for dtype in (torch.bfloat16, torch.float16):
    for out in (torch.float32, dtype):
        for n, k, tile in ((136, 264, 256), (264, 72, 128), (1024, 1024, 128), (1024, 1024, 256)):
            wgrad._cuda.wgrad = partial(chosen, tile_k=tile)
            segments = [(random(m, k, dtype=dtype), random(m, n, dtype=dtype)) for m in (65, 128, 1)]
            dweight, dbias = random(n, k, dtype=out), random(n, dtype=out)
            for places, options in ((2, {}), (132, {}), (132, {"max_tiles": 1})):
                wgrad._processors = lambda device: places
                for outputs in ((dweight, dbias), (dweight, None)):
                    wgrad.linear_wgrads([(segments, outputs)], True, **options)
                    wgrad.linear_wgrads([(segments, outputs)], False, **options)
wgrad._cuda.wgrad = chosen
products = [([(random(m, k), random(m, n))], (random(n, k, dtype=torch.float32), random(n, dtype=torch.float32)))
            for m, n, k in ((64, 136, 264), (100, 512, 256), (1, 8, 8), (70, 256, 128), (64, 128, 128))]
wgrad.linear_wgrads(products, True)
torch.cuda.synchronize()
"""
"""A program, on small sizes."""

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


class HostExtension:
    """launches: the number of weights and of segments of each launch. grids: its places and max_tiles."""

    MAX_SEGMENTS = 16
    MAX_PRODUCTS = 4

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []
        self.grids: list[tuple[int, int]] = []

    def wgrad(
        self,
        products: list[tuple],
        x_kind: int,
        dweight_kind: int,
        dbias_kind: int,
        accumulate: bool,
        *rest: Any,
        tile_k: int = 0,
    ) -> None:
        """As the extension does, in float64; tile_k is the GPU's alone."""
        assert len(products) <= self.MAX_PRODUCTS
        self.launches.append((len(products), sum(len(product[-1]) for product in products)))
        assert self.launches[-1][1] <= self.MAX_SEGMENTS
        self.grids.append(rest[:2])
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
    def _aligned(*addresses: int) -> None:
        assert all(address % 16 == 0 for address in addresses)

    @staticmethod
    def _write(output: Tensor, value: Tensor, accumulate: bool) -> None:
        output.copy_(output.double() + value if accumulate else value)
