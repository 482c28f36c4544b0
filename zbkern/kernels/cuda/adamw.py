"""An optimizer step in a few launches of the compiled extension, whatever the number of tensors (contract: spec.py).

Nothing here waits for the GPU, and everything can be captured in a CUDA graph: what changes from step to step is read
on the device. The host's share is a list of addresses, and a comparison with that of the step before: only what has
moved is checked and packed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zbkern.kernels.cuda.wgrad import KINDS, _cuda, raw_stream
from zbkern.kernels.cuda.wgrad import why_not as why_not
from zbkern.kernels.spec import AdamWOptions

DTYPES = tuple(KINDS)  # of parameters and of gradients


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    options: AdamWOptions,
    control: Tensor | None = None,
    undo: bool = False,
    memory: dict[str, Any] | None = None,
) -> None:
    """One step of all tensors in one launch, and one that counts it in `steps`; in place.

    params: of one dtype, float32, bf16 or fp16; grads: likewise. Everything else in float32; all contiguous. undo:
    exact up to rounding. Raises ValueError.
    """
    if not params:
        return
    memory = {} if memory is None else memory
    state = [params, exp_avgs, exp_avg_sqs, steps, *([] if masters is None else [masters])]
    if {len(tensors) for tensors in state} != {len(grads)}:
        lengths = [len(tensors) for tensors in (*state, grads)]
        raise ValueError(f"adamw: lists of tensors must be equally long; got {lengths}")
    addresses = [tensor.data_ptr() for tensors in state for tensor in tensors]
    moving = [grad.data_ptr() for grad in grads]
    if memory.get("addresses") != addresses:
        memory["addresses"] = memory["grads"] = None  # should a check fail
        for name, tensors, dtype in (
            ("params", params, params[0].dtype),
            ("exp_avgs", exp_avgs, torch.float32),
            ("exp_avg_sqs", exp_avg_sqs, torch.float32),
            ("masters", masters or (), torch.float32),
        ):
            _check_list("adamw", name, tensors, dtype, params)
        for index, step in enumerate(steps):
            if step.dtype != torch.float32 or step.numel() != 1 or step.device != params[0].device:
                raise ValueError(
                    f"adamw: steps[{index}] must be one float32 on {params[0].device}; got {step.numel()} {step.dtype} "
                    f"on {step.device}"
                )
        count = len(params)
        columns = [addresses[first : first + count] for first in range(0, len(addresses), count)]
        columns += [] if masters is not None else [[0] * count]
        memory["tensors"] = _cuda.AdamTensors(*columns, [param.numel() for param in params])
        memory["addresses"] = addresses
    if memory["grads"] != moving:
        _check_list("adamw", "grads", grads, grads[0].dtype, params)
        memory["tensors"].set_grads(moving)
        memory["grads"] = moving
    device = params[0].get_device()
    lr, lr_at, alive = options.lr, 0, None
    if isinstance(lr, Tensor):
        if lr.is_cuda:
            alive = lr.to(device=params[0].device, dtype=torch.float32)  # itself, as a rule
            lr, lr_at = 0.0, alive.data_ptr()
        else:
            lr = float(lr)
    _cuda.adam(
        memory["tensors"], KINDS[params[0].dtype], KINDS[grads[0].dtype], 0 if control is None else control.data_ptr(),
        lr, lr_at, *options.betas, options.eps, options.weight_decay, options.max_norm, options.maximize, undo,
        device, raw_stream(device),
    )  # fmt: skip


def squared_norm(
    tensors: Sequence[Tensor], control: Tensor, accumulate: bool = False, memory: dict[str, Any] | None = None
) -> None:
    """One pass over tensors of one dtype, contiguous; the sum has a fixed order. Raises ValueError."""
    memory = {} if memory is None else memory
    addresses = [tensor.data_ptr() for tensor in tensors]
    if memory.get("spans_at") != addresses or "spans" not in memory:
        _check_list("squared_norm", "tensors", tensors, tensors[0].dtype if tensors else torch.float32, tensors)
        memory["spans"] = _cuda.Spans(addresses, [tensor.numel() for tensor in tensors])
        memory["spans_at"] = addresses
    # not kept: a graph has memory of its own
    workspace = torch.empty(memory["spans"].workspace, dtype=torch.float32, device=control.device)
    kind = KINDS[tensors[0].dtype] if tensors else 0
    device = control.get_device()
    _cuda.squared_norm(
        memory["spans"], kind, accumulate, control.data_ptr(), workspace.data_ptr(), device, raw_stream(device)
    )


def _check_list(
    function: str, name: str, tensors: Sequence[Tensor], dtype: torch.dtype, like: Sequence[Tensor]
) -> None:
    for index, (tensor, other) in enumerate(zip(tensors, like, strict=False)):
        if tensor.dtype != dtype or dtype not in KINDS:
            raise ValueError(f"{function}: {name}[{index}] must be {dtype}, one of {list(KINDS)}; got {tensor.dtype}")
        if tensor.numel() != other.numel() or tensor.device != other.device or not tensor.is_contiguous():
            raise ValueError(
                f"{function}: {name}[{index}] must be contiguous, with {other.numel()} elements on {other.device}; "
                f"got {tensor.numel()} with strides {tensor.stride()} on {tensor.device}"
            )
