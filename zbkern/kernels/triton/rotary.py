"""Rotary position embedding as a Triton kernel: one pass over memory, float32 inside. Contract: spec.py."""

import triton
import triton.language as tl
from torch import Tensor

from zbkern.kernels.triton.common import Kernel, offset, widen
from zbkern.kernels.triton.replay import replayed

_ELEMENTS = 4096
"""Of one program: 32 per thread of 4 warps; the cosines and sines of a token are loaded once for all of its heads."""


@replayed
def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, y: Tensor) -> None:
    _launch(x, cos, sin, interleaved, y, False)


@replayed
def rotary_dgrad(dy: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dx: Tensor) -> None:
    _launch(dy, cos, sin, interleaved, dx, True)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, y: Tensor, inverse: bool) -> None:
    if x.numel() == 0:
        return
    batch, tokens, heads, size = x.shape
    half = cos.shape[1]
    tile = _tile(heads, size, half)
    strides = (*x.stride(), *cos.stride(), *sin.stride(), *y.stride())
    grid = (batch * tokens, triton.cdiv(heads, tile[0]))
    arguments = (x, cos, sin, y, tokens, heads, size, half, *strides)
    _rotate(grid, arguments, (interleaved, inverse, *tile), warps=4, stages=1)


def _tile(heads: int, size: int, half: int) -> tuple[int, int, int]:
    """(heads, pairs, columns beside the pairs) of one program."""
    pairs, rest = triton.next_power_of_2(max(half, 1)), size - 2 * half
    rest = triton.next_power_of_2(rest) if rest else 0
    width = triton.next_power_of_2(2 * pairs + rest)
    return min(triton.next_power_of_2(heads), max(1, _ELEMENTS // width)), pairs, rest


@Kernel
@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, y_ptr, tokens, heads, size, half, x_batch, x_token, x_head, x_column,
    cos_token, cos_column, sin_token, sin_column, y_batch, y_token, y_head, y_column,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """(a, b) -> (a cos - b sin, b cos + a sin), INVERSE with -sin; x, y [batch, tokens, heads, size], cos, sin [tokens,
    half]. Pairs are (c, c + half), INTERLEAVED (2 c, 2 c + 1).

    One program: HEADS heads of one token, so that its cosines and sines are read once. Pairs that are neighbours are
    read as they lie and parted in registers: half of the columns at a time would ask for every sector twice.
    """
    place = tl.program_id(0).to(tl.int64)
    batch, token = place // tokens, place % tokens
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    x = x_ptr + batch * x_batch + token * x_token + offset(head, x_head)
    y = y_ptr + batch * y_batch + token * y_token + offset(head, y_head)
    pair = tl.arange(0, PAIRS)[None, :]
    cos = widen(tl.load(cos_ptr + token * cos_token + pair * cos_column, pair < half, other=0))
    sin = widen(tl.load(sin_ptr + token * sin_token + pair * sin_column, pair < half, other=0))
    if INVERSE:
        sin = -sin
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        mask = (head < heads) & (column < 2 * half)
        both = tl.reshape(widen(tl.load(x + offset(column, x_column), mask, other=0)), [HEADS, PAIRS, 2])
        a, b = tl.split(both)
        both = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [HEADS, 2 * PAIRS])
        tl.store(y + offset(column, y_column), both.to(y_ptr.dtype.element_ty), mask)
    else:
        mask = (head < heads) & (pair < half)
        a = widen(tl.load(x + offset(pair, x_column), mask, other=0))
        b = widen(tl.load(x + offset(pair + half, x_column), mask, other=0))
        tl.store(y + offset(pair, y_column), (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask)
        tl.store(y + offset(pair + half, y_column), (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        mask = (head < heads) & (column < size)
        tl.store(y + offset(column, y_column), tl.load(x + offset(column, x_column), mask), mask)
