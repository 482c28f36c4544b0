"""The product of an FP8 linear by the compiled extension; what quantises is Triton's (triton/fp8.py)."""

from __future__ import annotations

from torch import Tensor

from zbkern.kernels.cuda import wgrad


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], bias: Tensor | None, out: Tensor, add: bool) -> bool:
    """out [P, Q] (+)= A B^T + bias, of A [P, R] and B [Q, R] in float8_e4m3fn with their scales. Returns False, with
    nothing done, where the extension has no kernel.

    a: (values, scales [R / 128, P]); rows of values are multiples of 16 bytes apart. b: the same (W), or a weight (F,
    B) with scales [R / 128, Q / 128]. Allocates nothing, but a copy of a bias whose elements are not neighbours.
    """
    (values, scales), (right, right_scales) = a, b
    (p, r), q = values.shape, right.shape[0]
    rows = right_scales.shape[1] == q
    if rows:  # of a single row, scales of either kind look the same
        fits = q > 1 and bias is None and out.dtype in wgrad.KINDS
    else:  # rows of A's scales are copied by TMA, as those of out always are: from and to multiples of 16 bytes
        fits = p % 4 == 0 and not add and out.dtype in wgrad.DTYPES and (bias is None or bias.dtype == out.dtype)
    step, unit = out.stride()
    if not fits or unit != 1 or step < q or (step * out.element_size() | out.data_ptr()) % 16:
        return False
    bias = None if bias is None else bias.contiguous()
    device = out.get_device()
    wgrad._cuda.fp8_product(
        (values.data_ptr(), scales.data_ptr(), values.stride(0)),
        (right.data_ptr(), right_scales.data_ptr(), right.stride(0)),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        (p, q, r, step),
        *(wgrad.KINDS[out.dtype], rows, add),
        *(wgrad._processors(device), device, wgrad.raw_stream(device)),
    )
    return True
