"""Tensors of more than 2^31 elements on a GPU, where an offset of 32 bits would come out negative: their last rows."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support import launch_checks as checks
from tests.support import needs

ROWS, COLUMNS, FEATURES = 2**17 + 3, 2**14 + 8, 64
NEEDED = 24 * 2**30

pytestmark = [*needs.GPU, pytest.mark.alone]


@pytest.fixture(autouse=True)
def room() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < NEEDED:
        pytest.skip(f"takes up to {NEEDED / 2**30:.0f} GiB of the GPU's memory; {free / 2**30:.0f} GiB are free")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def last(tensor: Tensor) -> Tensor:
    return tensor[-300:].double()


@pytest.mark.parametrize("padding", [0, 3], ids=["by descriptors", "by pointers"])
def test_linear(launches: ModuleType, padding: int) -> None:
    torch.manual_seed(0)
    x, weight = random(ROWS, FEATURES), random(COLUMNS, FEATURES)
    y = torch.full((ROWS, COLUMNS + padding), float("nan"), device="cuda", dtype=torch.bfloat16)[:, :COLUMNS]
    assert y.numel() > 2**31
    launches.linear_fwd(x, weight, None, y)
    checks.check("y", y[-300:].clone(), last(x) @ weight.double().t())
    dx, dweight = torch.empty_like(x), torch.zeros(COLUMNS, FEATURES, device="cuda")
    launches.linear_dgrad(y, weight, dx)
    checks.check("dx", dx[-300:].clone(), last(y) @ weight.double())
    launches.linear_wgrad([(x, y)], (dweight, None), True)
    checks.check("dweight", dweight[-300:].clone(), y[:, -300:].double().t() @ x.double(), terms=ROWS)


def test_activation(launches: ModuleType) -> None:
    z = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16).normal_()
    y = torch.full_like(z, float("nan"))
    launches.activation_fwd(z, "silu", y)
    checks.check("y", y[-300:].clone(), torch.nn.functional.silu(last(z)))


@pytest.mark.parametrize("features", [4096, COLUMNS])  # rows in registers, and in pieces
def test_rms_norm(launches: ModuleType, features: int) -> None:
    rows = ROWS * COLUMNS // features
    x = torch.empty(rows, features, device="cuda", dtype=torch.bfloat16).normal_()
    y, rstd = torch.full_like(x, float("nan")), torch.empty(rows, device="cuda")
    launches.norm_fwd(x, None, None, 1e-5, y, None, rstd)
    checks.check("y", y[-300:].clone(), torch.nn.functional.rms_norm(last(x), (features,), eps=1e-5))
    partials = torch.zeros(1, launches.norm_partials(rows, features, x.device), features, device="cuda")
    dy = torch.empty_like(x).normal_()  # of x itself the gradient is rounding: a norm does not depend on x's length
    launches.norm_dgrad(dy, x, None, None, rstd, y, partials)
    wide = last(x).requires_grad_()
    normed = torch.nn.functional.rms_norm(wide, (features,), eps=1e-5)
    (expected,) = torch.autograd.grad(normed, wide, last(dy))
    checks.check("dx", y[-300:].clone(), expected)


def test_rotary_of_heads_that_lie_far_apart(launches: ModuleType) -> None:
    heads, size = 2**31 // (ROWS * 128) + 2, 128
    x = torch.empty(1, heads, ROWS, size, device="cuda", dtype=torch.bfloat16).normal_().transpose(1, 2)
    y = torch.full_like(x, float("nan"))
    angles = torch.rand(ROWS, size // 2, device="cuda")
    launches.rotary_fwd(x, angles.cos(), angles.sin(), False, y)
    a, b = x[0, :, -1].double().chunk(2, -1)
    cos, sin = angles.double().cos(), angles.double().sin()
    checks.check("y", y[0, :, -1].clone(), torch.cat((a * cos - b * sin, b * cos + a * sin), -1), 3e-2)
