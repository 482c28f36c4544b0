"""`WGradTask`: one W that has not run yet, and `WGradKernel`: what runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, strided

from zbkern.wgrad.checksums import are_same, sums_of

Segment = tuple[Tensor, ...]
Gradients = Sequence["Tensor | None"]
WGradFunction = Callable[[Sequence[Segment], Gradients, bool], None]


class WGradKernel(NamedTuple):
    """A kernel that computes W, and further forms of it that some backends have, None for the others.

    run(segments, outputs, accumulate): sums W over `segments`, the tensors of one microbatch each, and writes it
        (accumulate=False) or adds it to every output that is not None.
    run_many([(segments, outputs), ...], accumulate, max_tiles=0): `run` for several weights at once. max_tiles: a block
        of the GPU ends after so many tiles, so that work on other streams gets its multiprocessor; 0 for no bound.
    allocate(segment, params): W of one segment in new memory, None where the parameter is None.
    empty(parameter): memory for a gradient that does not exist yet, where it is not laid out as its parameter is.
    adds: True where B has computed the product that the gradient is, and this adds it; `zbkern.coverage` counts these.
    """

    run: WGradFunction
    run_many: Callable[..., None] | None = None
    allocate: Callable[[Segment, Gradients], Gradients] | None = None
    empty: Callable[[Tensor], Tensor] | None = None
    adds: bool = False


class WGradTask:
    """One W: run `kernel.run(segments, outputs, accumulate)` into the gradients of `parameters`.

    Args:
        kernel: a WGradKernel, or its `run` alone; outputs are aligned with `parameters` (None where a parameter takes
            no gradient).
        tensors: what this task's one segment holds, usually the layer's input and its output gradient, detached.
        arithmetic: the flops of this W, or a function of `tensors` that counts them on demand.
        ddp_managed: the gradients must go through autograd's accumulation although the parameters have no hooks that
            can be seen, because DistributedDataParallel's reducer waits for them there.
        reads: what else the kernel reads, parameters say, whose memory lives on anyway; like `tensors` they must not
            have been modified when W runs.
    """

    __slots__ = (
        *("_arithmetic", "ddp_managed", "kernel", "key", "name", "parameters", "_ready_event", "_storages", "_sums"),
        *("reads", "tensors", "_version", "_weight"),
    )

    def __init__(
        self,
        kernel: WGradKernel | WGradFunction,
        tensors: Segment,
        parameters: tuple[Tensor | None, ...],
        arithmetic: int | Callable[[Segment], int] = 0,
        name: str = "",
        ddp_managed: bool = False,
        reads: Segment = (),
    ) -> None:
        self.kernel = kernel if isinstance(kernel, WGradKernel) else WGradKernel(kernel)
        self.tensors = tensors
        for parameter in parameters:
            if parameter is not None and not parameter.requires_grad:  # frozen since F: autograd drops it in B
                parameters = tuple([p if p is not None and p.requires_grad else None for p in parameters])
                break
        self.parameters = parameters
        self._arithmetic = arithmetic
        self.name = name
        self.ddp_managed = ddp_managed
        self.key: Any = None  # hashable
        self._ready_event: Any = None  # where W has a stream of its own: after it `tensors` hold their values
        self._storages: list[int] = []  # those of `tensors`, as a queue has counted them
        self._sums: list[Tensor] | None = None  # of the values of `tensors`, where a queue compares them
        self.reads = reads
        self._version = self._current_version()
        self._weight = (self.kernel.run, *map(id, parameters))  # equal for tasks that one kernel can sum up

    def _current_version(self) -> int:
        """Grows whenever one of the tensors that W reads is modified in place."""
        version = 0
        for tensor in self.tensors:  # a loop: half the time of sum() over a generator, and this runs per task
            version += tensor._version
        for tensor in self.reads:
            version += tensor._version
        return version

    def _keep_sums(self) -> None:
        """From now on `_is_unchanged` compares values, too."""
        self._sums = sums_of(self._compared())

    def _is_unchanged(self) -> bool:
        """Whether what W reads is what it was, as far as torch counts writes, or all of it after `_keep_sums`."""
        if self._current_version() != self._version:
            return False
        return self._sums is None or are_same(self._sums, sums_of(self._compared()))

    def _compared(self) -> list[Tensor]:
        return [each for each in self.tensors if type(each) is Tensor and each.layout is strided and not each.is_meta]

    @property
    def flops(self) -> int:
        """Floating-point operations of this W."""
        return self._arithmetic if isinstance(self._arithmetic, int) else self._arithmetic(self.tensors)

    @property
    def _has_hooks(self) -> bool:
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
