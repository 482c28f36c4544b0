"""`WGradTask`: one W that has not run yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Segment = tuple[Tensor, ...]
Launch = Callable[[Sequence[Segment], Sequence["Tensor | None"], bool], None]


class WGradTask:
    """One W: run `launch(segments, outputs, accumulate)` into the gradients of `parameters`.

    launch: a raw wgrad launch (`kernels/spec.py`); it sums over `segments` and writes or adds to each output, aligned
    with `parameters` (None where a parameter takes no gradient). tensors: what this task's one segment holds, usually
    the layer's input and its output gradient, detached. arithmetic: the launch's flops, or a function of `tensors`
    that counts them when somebody asks. ddp_managed: something that leaves no trace on the parameters waits for their
    gradients at autograd's accumulation, as DistributedDataParallel's reducer does.
    """

    __slots__ = (
        *("_arithmetic", "ddp_managed", "key", "launch", "name", "parameters", "pins", "ready", "tensors"),
        *("version", "weight"),
    )

    def __init__(
        self,
        launch: Launch,
        tensors: Segment,
        parameters: tuple[Tensor | None, ...],
        arithmetic: int | Callable[[Segment], int] = 0,
        name: str = "",
        ddp_managed: bool = False,
    ) -> None:
        self.launch = launch
        self.tensors = tensors
        self.parameters = parameters
        self._arithmetic = arithmetic
        self.name = name
        self.ddp_managed = ddp_managed
        self.key: Any = None  # hashable
        self.ready: Any = None  # an event after which `tensors` hold their values, where W has a stream of its own
        self.pins: list[list[int]] = []  # a queue's entries for the storages of the tensors
        version = 0  # grows whenever one of the tensors is modified in place
        try:
            for tensor in tensors:
                version += tensor._version
        except AttributeError:
            raise TypeError(f"WGradTask: tensors must be a tuple of tensors; got {tensors!r}") from None
        self.version = version
        self.weight = (launch, *map(id, parameters))  # equal for tasks that can be one launch

    @property
    def flops(self) -> int:
        """The arithmetic of the launch."""
        return self._arithmetic if isinstance(self._arithmetic, int) else self._arithmetic(self.tensors)

    @property
    def has_hooks(self) -> bool:
        """True when the gradients must go through autograd's accumulation, because hooks wait for them there."""
        if self.ddp_managed:
            return True
        for parameter in self.parameters:  # a loop: half the time of any() over a generator, and this runs per task
            if parameter is not None and (parameter._post_accumulate_grad_hooks or parameter._backward_hooks):
                return True
        return False

    def __repr__(self) -> str:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in self.tensors)
        return f"WGradTask({self.name or 'unnamed layer'}, {shapes}, key={self.key!r})"
