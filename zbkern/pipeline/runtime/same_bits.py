"""`StepOptions(same_bits=True)`: what would make the order of a sum, and so its last bits, depend on the pipeline."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.schedule import Schedule


def check_order(call: str, schedule: Schedule) -> None:
    """Raises ScheduleError where a chunk adds units up in another order than one process does.

    Losses are added in the order of F. Gradients are, in that of B and of W: microbatches in order, and of one
    microbatch its last slice first.
    """
    units = schedule.units
    forwards = [*range(len(units))]
    backwards = sorted(forwards, key=lambda number: (units[number].microbatch, -units[number].slice))
    for rank, row in enumerate(schedule.actions):
        for kinds, order in ((("F",), forwards), (("B", "BW"), backwards), (("W", "BW"), backwards)):
            for chunk in schedule.chunks_of(rank):
                found = [action.unit for action in row if action.chunk == chunk and action.kind in kinds]
                if found != order:
                    wrong = next(number for number, right in zip(found, order, strict=True) if number != right)
                    raise ScheduleError(
                        f"{call}: schedule must run units in order for StepOptions(same_bits=True); got "
                        f"{kinds[0]} of {units[wrong]} out of order, in chunk {chunk} on rank {rank}: leave same_bits "
                        "out, or use another schedule"
                    )


def check_one_use(modules: Iterable[nn.Module]) -> None:
    """Raises ValueError for a parameter of two layers of one rank, whose gradients are added up as they come."""
    names: dict[int, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            other = names.setdefault(id(parameter), name)
            if other != name and parameter.requires_grad:
                raise ValueError(
                    f"Pipeline: StepOptions(same_bits=True) needs every trained parameter in one layer of a rank; got "
                    f"one for {other!r} and {name!r}, whose gradients are added up in the order in which their passes "
                    "run: use a schedule that has them on two ranks, or leave same_bits out"
                )
