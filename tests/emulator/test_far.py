"""Tensors of more than 2^31 elements, as logits of a large vocabulary: strides fit into 32 bits, offsets do not.

They lie in memory that is not there until it is touched. An offset that wraps around leads elsewhere: out of bounds, or
to zeros.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.emulator import library
from tests.emulator.gpu import gpu
from tests.support import every_launch
from zbkern import testing
from zbkern.kernels import reference, spec
from zbkern.kernels.triton import kernels as triton_kernels
from zbkern.kernels.triton import loss as triton_loss
from zbkern.kernels.triton import norm_backward as triton_norm_backward
from zbkern.kernels.triton import norm_forward as triton_norm_forward


def far(values: Tensor, dimension: int) -> Tensor:
    """The values, along one dimension so far apart that the last begin 2^31 elements after the first."""
    strides, count = list(values.select(dimension, 0).contiguous().stride()), values.shape[dimension] - 1
    strides.insert(dimension, (2**31 // count // 16 + 1) * 16)
    size = 1 + sum((length - 1) * stride for length, stride in zip(values.shape, strides, strict=True))
    try:
        memory = torch.empty(size, dtype=values.dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space for {size} elements: {error}")
    return memory.as_strided(values.shape, strides).copy_(values)


class Far(every_launch.Random):
    """Its matrices have rows, or columns, so far apart."""

    dimension = 0

    def __call__(self, *shape: int, layout: str = "plain") -> Tensor:
        return self.apart(super().__call__(*shape, layout=layout))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.apart(super().empty(*shape, dtype=dtype))

    def apart(self, values: Tensor) -> Tensor:
        return values if values.dim() != 2 or 1 in values.shape else far(values, self.dimension)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dimension"), [(90, 0), (80, 0), (80, 1)])
def test_every_launch(capability: int, dimension: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 9.0 by descriptors, which compute offsets themselves, and rows of norms held; for 8.0 by pointers, in pieces,
    and with indices of 32 bits."""
    if capability == 80:
        monkeypatch.setattr(triton_norm_forward, "HELD", 2)
        monkeypatch.setattr(triton_norm_backward, "HELD", 2)
    monkeypatch.setattr(Far, "dimension", dimension)
    sizes = 3, 16, 16, torch.int64 if capability == 90 else torch.int32
    with gpu(capability):
        torch.manual_seed(0)
        expected = every_launch.cases(reference, every_launch.Random(torch.float16, "cpu", scale=0.3), *sizes)
        torch.manual_seed(0)
        for name, case in every_launch.cases(triton_kernels, Far(torch.float16, "cpu", scale=0.3), *sizes).items():
            if capability == 80 and name in spec.OPS["float8"]:
                continue  # it has no instruction for them
            for got, wanted in zip(case.results(), expected[name].results(), strict=True):
                if got.itemsize == 1:
                    got, wanted = got.float(), wanted.float()
                if got.shape != wanted.shape:  # as many partial sums as a backend likes
                    got, wanted = got.sum(1), wanted.sum(1)
                testing.assert_close(got, wanted, name, tolerance=0.02)
    assert not library.findings()


@pytest.mark.parametrize("dimension", range(4))
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(hopper: None, interleaved: bool, dimension: int) -> None:
    shape = [1, 2, 4, 8]
    shape[dimension] = 3
    values, angles = torch.randn(shape).half(), torch.randn(shape[1], shape[3] // 2)
    y, wanted = far(torch.zeros(shape).half(), dimension), torch.empty(shape).half()
    triton_kernels.rotary_fwd(values, angles.cos(), angles.sin(), interleaved, wanted)
    triton_kernels.rotary_fwd(far(values, dimension), angles.cos(), angles.sin(), interleaved, y)
    assert torch.equal(y, wanted)


def test_attention_of_heads_far_apart(hopper: None) -> None:
    q, k, v = (torch.randn(shape).half() for shape in ((5, 3, 16), (6, 3, 16), (6, 3, 16)))
    options = spec.AttentionOptions(0.25, True, None, (0, 5), (0, 6))
    results = []
    for some_q in (q, far(q, 1)):
        results.append((torch.empty_like(q), torch.empty(3, 5)))
        triton_kernels.attention_fwd(some_q, k, v, options, *results[-1])
    assert all(map(torch.equal, *results))


def test_logits_far_apart(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the launch's own."""
    x, weight, target = torch.randn(3, 16).half(), torch.randn(40, 16).half(), torch.tensor([3, 39, 0])
    results, head = [], {"weight": weight, "bias": None, "options": spec.CrossEntropyOptions()}
    for _ in range(2):
        loss, lse, dx, dweight = torch.zeros(3), torch.zeros(3), torch.zeros(3, 16).half(), torch.zeros(40, 16)
        triton_kernels.cross_entropy_fwd(x, weight, None, target, head["options"], loss, lse, dx)
        triton_kernels.cross_entropy_wgrad([(x, target, lse, torch.ones(3))], (dweight, None), False, **head)
        results.append((loss, lse, dx, dweight))
        monkeypatch.setattr(triton_loss, "_logits", lambda *_: far(torch.zeros(3, 40).half(), 0))
    assert all(map(torch.equal, *results))
