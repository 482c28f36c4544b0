"""Plain matmuls by the libraries that torch has on board, and which of two takes one on a CPU.

torch gives fp32 matmuls to MKL, which leaves AVX-512 alone on processors that are not Intel's. oneDNN, which torch
has on board for other work, uses it there: 2.1 times as fast on a core with whole AVX-512 units (EPYC, Zen 5: 199
against 90 GFLOP/s of 237), from about two million multiplications on. `torch.backends.mkldnn.enabled = False` leaves
everything to MKL.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MIN_MULTIPLICATIONS = 1 << 21  # multiplications: below, oneDNN's look-ups (10 us) take what its matmuls save
SMALL = 1 << 12  # elements of an operand or of the result: below, MKL is the faster one or not much slower
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_BLOCK = 1 << 22  # elements of a result on its way to where it is added: larger ones cost page faults


def library() -> str:
    """Which library computes matmuls on this machine's CPU."""
    if _onednn is None or not torch.backends.mkldnn.enabled:
        return "matmuls by torch's default library"
    return "large matmuls by oneDNN, because torch's default, MKL, has no AVX-512 for this processor"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias in new memory, x [..., K], weight [N, K], bias [N]."""
    if x.numel() < SMALL or not _faster(x, weight, weight.size(0)):
        return F.linear(x, weight, bias)
    return _onednn(x, weight, None if bias is None else bias.contiguous(), "none", [], "")


def linear_again(memory: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear of x [M, K], in the given memory where the library writes where it is told: MKL does, oneDNN does not."""
    if _faster(x, weight, weight.size(0)):
        return linear(x, weight, bias)
    write_linear(memory, x, weight, bias)
    return memory


def write_linear(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """y = x weight^T + bias, x [M, K]."""
    if _faster(x, weight, weight.size(0)):
        for part, rows in _blocks(y, x):
            part.copy_(linear(rows, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b in new memory, a [M, K], b [K, N]."""
    if a.numel() < SMALL or not _faster(a, b, b.size(1)):
        return a.mm(b)
    return _onednn(a, b.mT, None, "none", [], "")


def addmm_into(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """out (+)= a b, in place; narrower inputs are multiplied and accumulated in the dtype of `out`."""
    if out.dtype == a.dtype and (a.numel() < SMALL or not _faster(a, b, b.size(1))):
        if accumulate:
            out.addmm_(a, b)
        else:
            torch.mm(a, b, out=out)
    elif out.is_cuda and out.dtype == torch.float32 and torch.version.hip is None:  # torch for AMD's refuses out_dtype
        _addmm_into_float32(out, a, b, accumulate)
    else:
        wide = torch.promote_types(out.dtype, a.dtype)
        b = b.to(wide)
        for part, rows in _blocks(out, a):
            value = matmul(rows.to(wide), b)
            part.add_(value) if accumulate else part.copy_(value)


def _addmm_into_float32(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """out (+)= a b of float16 or bfloat16, which cuBLAS sums and writes in float32."""
    if not accumulate:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    elif _TORCH >= (2, 10):
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:  # which add to nothing but a matrix of the operands' dtype
        for part, rows in _blocks(out, a):
            part.add_(torch.mm(rows, b, out_dtype=torch.float32))


def _blocks(out: Tensor, a: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Rows of the result, and of the first operand, that may be in new memory on their way to `out`."""
    rows = max(1, _BLOCK // max(1, out.size(1)))
    return zip(out.split(rows), a.split(rows), strict=True)


def _faster(a: Tensor, b: Tensor, columns: int) -> bool:
    """Whether oneDNN takes less time than MKL for the matmul of a [..., K] and b, of which `columns` come out."""
    elements = a.numel()
    if _onednn is None or elements < SMALL or elements * columns < _MIN_MULTIPLICATIONS:
        return False
    inner = a.size(-1)
    return (
        min(inner, elements // inner) >= 4
        and elements // inner * columns >= SMALL
        and a.dtype is torch.float32
        and type(a) in _PLAIN
        and type(b) in _PLAIN
        and a.is_cpu
        and bool(torch.backends.mkldnn.enabled)
        and torch._C._len_torch_dispatch_stack()
        == 0  # a mode that counts flops, or decides what to save, knows aten.mm
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _processor() -> str:
    """A text that names the processor's maker: AuthenticAMD, GenuineIntel."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()  # Windows: "AMD64 Family 26 ..., AuthenticAMD"


def _mkl_is_slow() -> bool:
    capable = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return capable and torch.backends.mkl.is_available() and "AuthenticAMD" in _processor()


# torch's only public entry that takes ordinary tensors is F.linear under torch.compile, which calls this.
_onednn: Any = torch.ops.mkldnn._linear_pointwise.default if _mkl_is_slow() else None
