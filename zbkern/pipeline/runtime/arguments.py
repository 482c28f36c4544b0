"""The arguments of a Pipeline, checked before anything begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zbkern.pipeline.runtime.slices.sliced_batch import LossFn, check_sliceable
from zbkern.pipeline.transport.base import check_timeout
from zbkern.pipeline.transport.tied_names import check_tied
from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.program import FILLS
from zbkern.schedules.schedule import Schedule
from zbkern.wgrad import accumulation


def check(fill: str, tied: Any, timeout: float) -> None:
    """Raises TypeError or ValueError for what would be misunderstood; schedules are checked apart."""
    if fill not in FILLS:
        raise ValueError(f"Pipeline: fill must be one of {FILLS}; got {fill!r}")
    check_tied("Pipeline", tied)
    check_timeout("Pipeline", timeout)


def check_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Raises ValueError for hooks that no W would run, and a probe would. A framework that has a `main_grad` knows."""
    for module in modules:
        for name, parameter in module.named_parameters():
            is_plain = type(parameter) is torch.nn.Parameter and parameter.requires_grad
            if not is_plain or accumulation.main_grad_of(parameter) is not None:
                continue
            if accumulation.has_hooks_on_node(parameter):
                raise ValueError(
                    f"Pipeline.step: {name} of {type(module).__name__} must have no hooks on autograd's accumulation "
                    "node (grad_fn.next_functions[0][0].register_hook), which W does not visit; use "
                    "register_post_accumulate_grad_hook (docs/gradients.md)"
                )


def check_place(
    schedule: Schedule, rank: int, size: int, modules: Sequence[torch.nn.Module], loss_fn: LossFn | None
) -> None:
    """Raises ScheduleError, ValueError or TypeError where these are not the modules and the loss of this rank."""
    if size != schedule.ranks:
        raise ScheduleError(
            f"Pipeline: the schedule has {schedule.ranks} ranks and the group {size}; "
            f"build the schedule with stages={size}"
        )
    chunks = schedule.chunks_of(rank)
    if len(modules) != len(chunks):
        raise ValueError(
            f"Pipeline: rank {rank} holds chunks {chunks} of this schedule and needs {len(chunks)} modules, "
            f"in model order; got {len(modules)}"
        )
    if len(schedule.placement) - 1 in chunks and loss_fn is None:
        raise TypeError(f"Pipeline: loss_fn must be callable on rank {rank}, which holds the last chunk; got None")
    for chunk, module in zip(chunks, modules, strict=True):
        if name := next((name for name, parameter in module.named_parameters() if parameter.is_meta), None):
            raise ValueError(
                f"Pipeline: chunk {chunk} must have its weights; {name!r} is on the meta device: `cut` with weights= "
                "reads them, module.to_empty(device=...) makes room for others"
            )
    if schedule.is_sliced:
        check_sliceable(modules)


def module_list(caller: str, modules: torch.nn.Module | Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The chunks of a rank; one module that can be called is one chunk. Raises TypeError for what is or hides none."""
    if isinstance(modules, torch.nn.ModuleList):
        modules = iter(modules)
    chunks = [modules] if isinstance(modules, torch.nn.Module) or not isinstance(modules, Iterable) else [*modules]
    for module in chunks:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{caller}: modules must be a torch.nn.Module or several in model order; got {module!r}")
        if "compile" in vars(type(getattr(module, "_orig_mod", None))):  # of torch.compile(module)
            raise TypeError(
                f"{caller}: {type(module._orig_mod).__name__} compiles its layers one by one: call compile() of the "
                "chunk itself, and give the chunk"
            )
    return chunks


def device_of(device: torch.device | str | None, modules: Sequence[torch.nn.Module]) -> torch.device:
    """The device asked for, by number, else that of the first parameter."""
    if device is None:
        parameter = next((p for module in modules for p in module.parameters()), None)
        return torch.device("cpu") if parameter is None else parameter.device
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:  # threads have a current device each
        return torch.device("cuda", torch.cuda.current_device())
    return device
