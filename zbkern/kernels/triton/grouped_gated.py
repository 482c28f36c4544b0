"""The gated MLP of experts as Triton kernels: the gate of all rows, and its backward in the epilogue of the down
projection's dgrad, where the gradient of h stays in registers.
"""

import torch
from torch import Tensor

from zbkern.kernels.spec import GateOptions
from zbkern.kernels.triton.activation import gate_of, halves
from zbkern.kernels.triton.gate_tile import gate_constants, gate_parts, regular
from zbkern.kernels.triton.gated import gated_dgrad
from zbkern.kernels.triton.grouped import grouped_linear_dgrad, grouped_linear_fwd
from zbkern.kernels.triton.grouped_tile import as_rows, padded, ragged_argument
from zbkern.kernels.triton.matmul_tile import as_operand, has_bulk_copies, plan, precision


def grouped_gated_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, options: GateOptions, z: Tensor, h: Tensor
) -> None:
    """z = x weight[e]^T + bias[e] in rows of group e, h = gate(z); 0 in rows of no group."""
    grouped_linear_fwd(x, weight, bias, ends, z)
    gate_of(z, None, h, None, options)


def grouped_gated_dgrad(
    dy: Tensor, weight: Tensor, ends: Tensor, z: Tensor, options: GateOptions, dz: Tensor, h: Tensor
) -> None:
    """dh = dy weight[e] in rows of group e, then dz, its gradient with respect to z, and h = gate(z) once more."""
    (rows, r), (groups, _, hidden) = dy.shape, weight.shape
    if h.numel() == 0:
        return
    if groups == 0 or not all(regular(tensor, hidden) for tensor in (z, dz, h)):
        dh = torch.empty_like(h, memory_format=torch.contiguous_format)
        grouped_linear_dgrad(dy, weight, ends, dh)
        gate_of(z, dh, h, dz, options)
        return
    left, right = as_rows(dy), as_operand(weight)
    reads = has_bulk_copies(dy.device) and left.describable and right.describable
    wide = reads and not options.interleaved  # a tile of 256 columns beside an interleaved z spills on sm_90
    tile, programs = plan("dgrad", -(-rows // groups), hidden, r, dy.dtype, dy.device, wide, groups=groups)
    x, x_stride = ragged_argument(left, tile.m, tile.k, reads)
    matrices, w_stride = right.argument(tile.k, tile.n, reads)
    strides = (x_stride, right.group_stride, w_stride, z.stride(0), dz.stride(0), h.stride(0))
    flags = (False, right.transposed, reads, precision(dy.dtype), *gate_constants(options), padded(groups))
    arguments = (x, matrices, *halves(z, options), *halves(dz, options), h, ends, rows, groups, hidden, r, *strides)
    sizes = (tile.m, tile.n, tile.k, tile.group, gate_parts(tile.n, dy.dtype, options.interleaved))
    gated_dgrad(programs, arguments, (*flags, *sizes), tile.warps, tile.stages)
