"""Linears and gated MLPs per group of rows (experts) in plain torch. Contract: spec.py.

On a CPU a loop over the groups, each a linear of its own rows. On a device the host does not know how many rows a group
has, and waiting for that would stop it: what torch's product of groups does not take is computed for all rows of every
group, and its own are kept. That costs as many times the arithmetic as there are groups; the Triton kernels do not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from zbkern.kernels.reference.activation import activation_bwd, activation_function, activation_fwd
from zbkern.kernels.reference.linear import linear_fwd, linear_wgrad
from zbkern.kernels.spec import GateOptions, Outputs, Segments


def grouped_linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, y: Tensor) -> None:
    if not readable(ends):
        y.copy_(grouped_linear(x, weight, bias, ends))
        return
    biases = [None] * weight.shape[0] if bias is None else bias.unbind()
    for (rows, out), part, vector in zip(split(ends, x, y), weight.unbind(), biases, strict=True):
        linear_fwd(rows, part, vector, out)
    rest(ends, y).zero_()


def grouped_linear_dgrad(dy: Tensor, weight: Tensor, ends: Tensor, dx: Tensor) -> None:
    grouped_linear_fwd(dy, weight.mT, None, ends, dx)


def grouped_linear_wgrad(segments: Segments, outputs: Outputs, accumulate: bool) -> None:
    gradient = next(output for output in outputs if output is not None)
    parts = [_groups_of(*segment) for segment in segments]
    for group in range(gradient.shape[0]):
        pairs = [pair for groups in parts if (pair := next(groups))[0].shape[0]]
        targets = [None if output is None else output[group] for output in outputs]
        if pairs:
            linear_wgrad(pairs, targets, accumulate)
        elif not accumulate:
            for target in targets:
                if target is not None:
                    target.zero_()


def grouped_gated_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, options: GateOptions, z: Tensor, h: Tensor
) -> None:
    grouped_linear_fwd(x, weight, bias, ends, z)
    gate, up = _clamped(*halves(z, options), options)
    _activate(gate, options, h)
    h.mul_(up)


def grouped_gated_dgrad(
    dy: Tensor, weight: Tensor, ends: Tensor, z: Tensor, options: GateOptions, dz: Tensor, h: Tensor
) -> None:
    dh = torch.empty_like(h)
    grouped_linear_dgrad(dy, weight, ends, dh)
    gate, up = halves(z, options)
    low, factor = _clamped(gate, up, options)
    _activate(low, options, h)
    dgate, dup = halves(dz, options)
    torch.mul(dh, h, out=dup)
    h.mul_(factor)
    argument = low if options.alpha == 1 else options.alpha * low
    activation_bwd(dh.mul_(factor), argument, options.activation, dgate)
    if options.limit is not None:
        dgate.masked_fill_(gate > options.limit, 0)
        dup.masked_fill_(up.abs() > options.limit, 0)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """grouped_linear_fwd, in operations that autograd can differentiate any number of times."""
    biases = [None] * weight.shape[0] if bias is None else bias.unbind()
    if readable(ends):
        rows = [part for (part,) in split(ends, x)]
        parts = [F.linear(*operands) for operands in zip(rows, weight, biases, strict=True)]
        return torch.cat([*parts, x.new_zeros(rest(ends, x).shape[0], weight.shape[1])])
    groups = group_of_rows(ends, x)
    if _library_takes(x, weight):
        return _by_library(x, weight, bias, ends, groups)
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for group, (matrix, vector) in enumerate(zip(weight, biases, strict=True)):
        y = torch.where(groups == group, F.linear(x, matrix, vector), y)
    return y


def gated(z: Tensor, options: GateOptions) -> Tensor:
    """h of `GateOptions`, in operations that autograd can differentiate any number of times."""
    gate, up = _clamped(*halves(z, options), options)
    return _activated(gate, options) * up


def halves(z: Tensor, options: GateOptions) -> tuple[Tensor, Tensor]:
    """(gate, up) as views of z [..., 2 H]."""
    if options.interleaved:
        return z[..., ::2], z[..., 1::2]
    middle = z.shape[-1] // 2
    return z[..., :middle], z[..., middle:]


def _clamped(gate: Tensor, up: Tensor, options: GateOptions) -> tuple[Tensor, Tensor]:
    """The input of the activation, and the factor of its result."""
    if options.limit is not None:
        gate, up = gate.clamp(max=options.limit), up.clamp(-options.limit, options.limit)
    return gate, up + options.offset if options.offset else up


def _activated(gate: Tensor, options: GateOptions) -> Tensor:
    activation = activation_function(options.activation)
    return activation(gate) if options.alpha == 1 else activation(options.alpha * gate) / options.alpha


def _activate(gate: Tensor, options: GateOptions, out: Tensor) -> None:
    """out = _activated(gate), in place."""
    if options.alpha == 1:
        activation_fwd(gate, options.activation, out)
    else:
        activation_fwd(options.alpha * gate, options.activation, out)
        out.div_(options.alpha)


def _library_takes(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has a product of all groups for these: in bf16, of multiples of 16 bytes."""
    sizes = weight.numel() > 0 and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
    regular = sizes and all(step == 1 or step % 8 == 0 for step in weight.stride())
    return regular and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")


def _by_library(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, groups: Tensor) -> Tensor:
    """x weight[e]^T + bias[e] in rows of group e by that product, 0 in rows of no group, which it leaves alone."""
    in_group = groups < weight.shape[0]
    y = F.grouped_mm(torch.where(in_group, x, 0), weight.mT, offs=ends)
    if bias is not None:
        y = y + bias[groups[:, 0].clamp(max=weight.shape[0] - 1)]
    return torch.where(in_group, y, 0)


def readable(ends: Tensor) -> bool:
    """Whether the host knows them without waiting for a device."""
    return ends.is_cpu and not torch.compiler.is_compiling()


def split(ends: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of every group, of each of the tensors; ends must be readable."""
    places = ends.tolist()
    if not places:
        return iter(())
    sizes = [end - begin for begin, end in zip([0, *places], places, strict=False)]
    return zip(*[tensor[: places[-1]].split(sizes) for tensor in tensors], strict=True)


def rest(ends: Tensor, tensor: Tensor) -> Tensor:
    """The rows that belong to no group; ends must be readable."""
    return tensor[int(ends[-1]) if ends.numel() else 0 :]


def group_of_rows(ends: Tensor, x: Tensor) -> Tensor:
    """[M, 1]: the group of every row of x; the number of groups for rows of none."""
    rows = torch.arange(x.shape[0], dtype=ends.dtype, device=x.device)
    return torch.searchsorted(ends, rows, right=True)[:, None]


def _groups_of(x: Tensor, dy: Tensor, ends: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """(rows of x, of dy) of every group; on a device all rows, zeros where they are another group's."""
    if readable(ends):
        yield from split(ends, x, dy)
        return
    groups, zero = group_of_rows(ends, x), x.new_zeros(())
    for group in range(ends.shape[0]):
        yield torch.where(groups == group, x, zero), torch.where(groups == group, dy, zero)
