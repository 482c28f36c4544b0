"""Offsets that overflow, which only Triton's interpreter shows: tests/kernels/test_interpreted.py runs this file.

Tensors of more than 2^31 elements, as logits of a large vocabulary: strides fit into 32 bits, offsets do not. They lie
in the middle of memory that is reserved and not there until touched; an offset that wraps around stays in it.
"""

from __future__ import annotations

import mmap

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support import every_launch
from tests.support.interpreter import quicken
from zbkern.kernels import spec
from zbkern.kernels.triton import attention_forward as triton_attention_forward
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.kernels.triton import loss as triton_loss
from zbkern.kernels.triton import matmul_tile as triton_matmul_tile
from zbkern.kernels.triton import norm_backward as triton_norm_backward
from zbkern.kernels.triton import norm_forward as triton_norm_forward

FAR = 2**30 + 17  # odd, so that products go by pointers, not by descriptors
RESERVED = 4 * (FAR + 2**20)


@pytest.fixture(autouse=True)
def quick_interpreter() -> None:
    quicken()


def reserved(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros, of which only the touched pages take memory."""
    size, flags = elements * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)
    except (OSError, ValueError) as error:
        pytest.skip(f"no address space for {size} bytes: {error}")


@pytest.fixture(scope="module")
def room() -> Tensor:
    """One test uses it at a time."""
    return reserved(RESERVED, torch.float16)


def far(values: Tensor, dimension: int, room: Tensor, start: int = 0) -> Tensor:
    """The values, the three along one dimension FAR apart, the others one after the other from `start` on."""
    assert values.shape[dimension] == 3
    strides = list(values.select(dimension, 0).contiguous().stride())
    strides.insert(dimension, FAR)
    return room.as_strided(values.shape, strides, room.numel() // 2 + start).copy_(values)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale).half()


class Far(every_launch.Random):
    """Its matrices have rows, or columns, so far apart that the last begins 2^31 elements after the first."""

    rows = True

    def __call__(self, *shape: int, layout: str = "plain") -> Tensor:
        values = super().__call__(*shape, layout=layout)
        return self.empty(*shape, dtype=self.dtype).copy_(values)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if len(shape) != 2 or 1 in shape:
            return super().empty(*shape, dtype=dtype)
        count = shape[0] if self.rows else shape[1]
        stride = (2**31 // (count - 1) // 16 + 1) * 16
        return reserved(count * stride, dtype).as_strided(shape, (stride, 1) if self.rows else (1, stride))


@pytest.mark.parametrize("indices", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_every_launch(first: bool, rows: bool, indices: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offset that overflows ends a launch (tests/support/interpreter.py). first: by descriptors, and rows of norms
    held; else by pointers, and in pieces."""
    capability = 90 if first else 80
    monkeypatch.setattr(triton_matmul_tile, "_machine", lambda device: (capability, 4))
    monkeypatch.setattr(triton_attention_forward, "capability_of", lambda device: capability)
    if not first:
        monkeypatch.setattr(triton_norm_forward, "HELD", 2)
        monkeypatch.setattr(triton_norm_backward, "HELD", 2)
    monkeypatch.setattr(Far, "rows", rows)
    found = []
    for random in (every_launch.Random, Far):
        torch.manual_seed(0)
        made = every_launch.cases(triton_kernels, random(torch.float16, "cpu", scale=0.3), 3, 16, 16, indices)
        wanted = {"embedding_wgrad"} if indices == torch.int32 else made.keys()
        found.append({name: case.results() for name, case in made.items() if name in wanted})
    for name, results in found[0].items():
        for got, expected in zip(found[1][name], results, strict=True):
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dimension", range(4))
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(room: Tensor, interleaved: bool, dimension: int) -> None:
    shape = [1, 2, 4, 8]
    shape[dimension] = 3
    values, angles = normal(*shape), torch.randn(shape[1], shape[3] // 2)
    y, wanted = far(torch.zeros(shape).half(), dimension, room, 128), torch.empty(shape).half()
    triton_kernels.rotary_fwd(values, angles.cos(), angles.sin(), interleaved, wanted)
    triton_kernels.rotary_fwd(far(values, dimension, room), angles.cos(), angles.sin(), interleaved, y)
    assert torch.equal(y, wanted)


def test_attention(room: Tensor) -> None:
    q, k, v = (normal(*shape) for shape in ((5, 3, 16), (6, 3, 16), (6, 3, 16)))
    options = spec.AttentionOptions(0.25, True, None, (0, 5), (0, 6))
    results = []
    for some_q in (q, far(q, 1, room)):  # heads first
        y, lse = torch.empty_like(q), torch.empty(3, 5)
        triton_kernels.attention_fwd(some_q, k, v, options, y, lse)
        results.append((y, lse))
    assert all(torch.equal(got, wanted) for got, wanted in zip(results[1], results[0], strict=True))


def test_cross_entropy(room: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are the launch's own: they are put far apart."""
    x, weight, target = normal(3, 16), normal(40, 16), torch.tensor([3, 39, 0])
    results = []
    for place in (None, lambda *_: far(torch.zeros(3, 40).half(), 0, room)):
        if place is not None:
            monkeypatch.setattr(triton_loss, "_logits", place)
        loss, lse, dx, dweight = torch.zeros(3), torch.zeros(3), torch.zeros(3, 16).half(), torch.zeros(40, 16)
        triton_kernels.cross_entropy_fwd(x, weight, None, target, spec.CrossEntropyOptions(), loss, lse, dx)
        segments = [(x, target, lse, torch.ones(3))]
        options = {"weight": weight, "bias": None, "options": spec.CrossEntropyOptions()}
        triton_kernels.cross_entropy_wgrad(segments, (dweight, None), False, **options)
        results.append((loss, lse, dx, dweight))
    assert all(torch.equal(got, wanted) for got, wanted in zip(results[1], results[0], strict=True))


@triton.jit
def _nested(x, y, operation: tl.constexpr):
    if operation == "add":
        return x + y
    if operation == "sub":
        return x - y
    return x * y


@triton.jit
def _combine(x_ptr, y_ptr, out_ptr, operation: tl.constexpr):
    where = tl.arange(0, 4)
    tl.store(out_ptr + where, _nested(tl.load(x_ptr + where), tl.load(y_ptr + where), operation))


def combined(operation: str, x: int, y: int, dtype: torch.dtype) -> list[int]:
    out = torch.zeros(4, dtype=dtype)
    _combine[(1,)](*(torch.tensor([1, 2, 3, last], dtype=dtype) for last in (x, y)), out, operation)
    return out.tolist()


@pytest.mark.parametrize(
    ("operation", "x", "y", "beyond"),
    [("add", 2**31 - 2, 1, 2), ("sub", 1 - 2**31, 1, 2), ("mul", 2**15, 2**15, 2**16)],
)
def test_an_overflow_of_32_bits_ends_the_launch(operation: str, x: int, y: int, beyond: int) -> None:
    assert combined(operation, x, y, torch.int32) == combined(operation, x, y, torch.int64)
    with pytest.raises(Exception, match=f"int32 overflow detected for operation {operation}"):
        combined(operation, x, beyond, torch.int32)
    combined(operation, x, beyond, torch.int64)
