"""`StepOptions(same_bits=True)`: what would make the order of a sum, and so its last bits, depend on the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zbkern.schedules.actions import ScheduleError
from zbkern.schedules.schedule import Schedule
from zbkern.wgrad import accumulation


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


class OwnSums:
    """Parameters that several layers of this rank share: within a step each layer has the sum of its own gradients, as
    layers of several ranks do, and these are added at the end, in the order of layers.

    A further layer then has a parameter of its own with the same memory. Raises ValueError for one module under two
    names, and for modules whose parameters data parallelism keeps.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._uses: list[_Use] = []
        self._begun: list[_Use] = []
        firsts: dict[int, tuple[nn.Module, str]] = {}  # by parameter
        for module in modules:
            kept = isinstance(module, DistributedDataParallel)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                first, other = firsts.setdefault(id(parameter), (module, name))
                if first is module and other == name:
                    continue
                place, taken = _place(module, name), {(use.holder, use.key) for use in self._uses}
                can_be_apart = not kept and place not in {_place(first, other), *taken}
                can_be_apart = can_be_apart and not isinstance(parameter, DTensor)
                self._uses.append(_Use(*place, parameter, (other, name), can_be_apart))
                if parameter.requires_grad:
                    self._uses[-1].check()

    @contextmanager
    def during(self) -> Iterator[None]:
        """Around a step."""
        self._begun = [use for use in self._uses if use.parameter.requires_grad]
        try:
            for use in self._begun:
                use.begin()
            yield
        finally:
            for use in self._begun:
                use.end()

    def add(self) -> None:
        """When all W of the step have run."""
        for use in self._begun:
            use.add()


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and its name there."""
    home, _, key = name.rpartition(".")
    return module.get_submodule(home), key


class _Use:
    """A further layer's use of a parameter."""

    def __init__(
        self, holder: nn.Module, key: str, parameter: nn.Parameter, names: tuple[str, str], can_be_apart: bool
    ) -> None:
        self.holder, self.key, self.parameter = holder, key, parameter
        self._names, self._can_be_apart = names, can_be_apart
        self._own: nn.Parameter | None = None

    def check(self) -> None:
        """Raises ValueError where its sum cannot be apart."""
        hooked = accumulation.has_hooks(self.parameter) or accumulation.has_main_grad_flags(self.parameter)
        if hooked or not self._can_be_apart:
            raise ValueError(
                "Pipeline: StepOptions(same_bits=True) needs a trained parameter of several layers of a rank to have "
                "no hooks, and to be in two modules that neither DistributedDataParallel nor fully_shard keeps; got "
                f"one for {self._names[0]!r} and {self._names[1]!r}, whose gradients would be added up in the order in "
                "which their passes run: use a schedule that has them on two ranks, or leave same_bits out"
            )

    def begin(self) -> None:
        self.check()
        parameter, own = self.parameter, self._own
        if own is None or (own.data_ptr(), own.dtype, own.shape) != (
            parameter.data_ptr(),
            parameter.dtype,
            parameter.shape,
        ):
            own = self._own = nn.Parameter(parameter.detach())  # shares its memory, and the count of writes
        own.grad = None
        if (buffer := accumulation.main_grad_of(parameter)) is not None:
            own.main_grad = torch.zeros_like(buffer)  # type: ignore[attr-defined]
        self.holder._parameters[self.key] = own

    @torch.no_grad()
    def add(self) -> None:
        assert self._own is not None
        total, own = accumulation.gradient_of(self.parameter), accumulation.gradient_of(self._own)
        if own is not None and total is not None:
            total.add_(own)
        elif own is not None:
            self.parameter.grad = own

    def end(self) -> None:
        self.holder._parameters[self.key] = self.parameter
        if self._own is not None:
            self._own.grad = None
            self._own.__dict__.pop("main_grad", None)
