"""An optimizer step in a few launches, whatever the number of tensors: AdamW and its inverse, the norm, copies.

Nothing here waits for the GPU, and everything can be captured in a CUDA graph: what changes from step to step is read
on the device (`control`). Step, clip and undo then need no synchronisation:

    squared_norm(grads, norm)                     # one pass: the norm and whether all gradients are finite
    control[2:] = factor and skip, from norm      # torch operations on the device
    adamw(params, grads, exp_avgs, exp_avg_sqs, control)

Raw launches, for engines that keep their own optimizer state; nothing in zbkern calls them. `zbkern.pipeline.Optimizer`
drives any torch optimizer, and waits for the norm on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zbkern.kernels.cuda import KINDS, _cuda, raw_stream


def control(device: torch.device | str) -> Tensor:
    """What adamw reads on the device at each step, to be written there: [learning rate, step, factor, skip], float32.

    step: 1 at the first. factor: of all gradients (clipping, loss scale). skip: nonzero leaves everything as it is.
    """
    return torch.tensor([0.0, 1.0, 1.0, 0.0], device=device)


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    control: Tensor,
    *,
    masters: Sequence[Tensor] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    undo: bool = False,
) -> None:
    """One AdamW step of all tensors in one launch, in place; can be captured in a CUDA graph.

    params: of one dtype, float32, bf16 or fp16; grads: likewise. exp_avgs, exp_avg_sqs, masters: float32; with masters
    (the weights in float32) each param is the rounded copy. All contiguous. undo: the inverse, with the gradients of
    the step; exact up to rounding (arXiv 2401.10241, appendix). For an exact return, save
    the tensors with copy_all before the step. Raises ValueError.
    """
    lists = [params, grads, exp_avgs, exp_avg_sqs] + ([] if masters is None else [masters])
    if len({len(tensors) for tensors in lists}) != 1:
        raise ValueError(f"adamw: lists of tensors must be equally long; got {[len(tensors) for tensors in lists]}")
    if not params:
        return
    for name, tensors, dtype in (
        ("params", params, params[0].dtype),
        ("grads", grads, grads[0].dtype),
        ("exp_avgs", exp_avgs, torch.float32),
        ("exp_avg_sqs", exp_avg_sqs, torch.float32),
        ("masters", masters or (), torch.float32),
    ):
        _check_list("adamw", name, tensors, dtype, params)
    items = [
        (*(tensor.data_ptr() for tensor in tensors), *([0] if masters is None else []), tensors[0].numel())
        for tensors in zip(*lists, strict=True)
    ]
    device = params[0].device.index
    kinds = KINDS[params[0].dtype], KINDS[grads[0].dtype]
    _cuda.adam(items, *kinds, control.data_ptr(), *betas, eps, weight_decay, undo, device, raw_stream(device))


def squared_norm(
    tensors: Sequence[Tensor], result: Tensor, *, accumulate: bool = False, workspace: Tensor | None = None
) -> None:
    """result[0] (+)= sum of the squares of all elements, result[1] = 1 where one is not finite. result [2] float32.

    tensors: of one dtype, contiguous. One pass; the sum has a fixed order. workspace: squared_norm_workspace floats,
    which is allocated where it is not given. Raises ValueError.
    """
    if tensors:
        _check_list("squared_norm", "tensors", tensors, tensors[0].dtype, tensors)
    spans = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
    if workspace is None:
        workspace = result.new_empty(_cuda.squared_norm_workspace(spans))
    kind = KINDS[tensors[0].dtype] if tensors else 0
    device = result.device.index
    _cuda.squared_norm(spans, kind, accumulate, result.data_ptr(), workspace.data_ptr(), device, raw_stream(device))


def squared_norm_workspace(tensors: Sequence[Tensor]) -> int:
    """Floats that squared_norm needs."""
    return _cuda.squared_norm_workspace([(0, tensor.numel()) for tensor in tensors])


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target in one launch; same dtypes and sizes, contiguous. Raises ValueError."""
    if len(targets) != len(sources):
        raise ValueError(f"copy_all: as many targets as sources are needed; got {len(targets)} and {len(sources)}")
    for target, source in zip(targets, sources, strict=True):
        _check_list("copy_all", "sources", [source], target.dtype, [target])
        _check_list("copy_all", "targets", [target], target.dtype, [source])
    if targets:
        device = targets[0].device.index
        pairs = zip(targets, sources, strict=True)
        copies = [(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in pairs]
        _cuda.copy_all(copies, device, raw_stream(device))


def _check_list(
    function: str, name: str, tensors: Sequence[Tensor], dtype: torch.dtype, like: Sequence[Tensor]
) -> None:
    for index, (tensor, other) in enumerate(zip(tensors, like, strict=False)):
        if tensor.dtype != dtype or (function != "copy_all" and dtype not in KINDS):
            raise ValueError(f"{function}: {name}[{index}] must be {dtype}, one of {list(KINDS)}; got {tensor.dtype}")
        if tensor.numel() != other.numel() or tensor.device != other.device or not tensor.is_contiguous():
            raise ValueError(
                f"{function}: {name}[{index}] must be contiguous, with {other.numel()} elements on {other.device}; "
                f"got {tensor.numel()} with strides {tensor.stride()} on {tensor.device}"
            )
