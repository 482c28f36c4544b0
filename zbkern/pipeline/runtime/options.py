"""StepOptions: what a Pipeline does in a step besides its actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zbkern.pipeline.simulation.costs import COPY_SIZE


@dataclass(frozen=True)
class StepOptions:
    """What a Pipeline does in a step besides its actions; on each rank as it likes.

    on_idle: called where the rank would wait and no W is left; it does a little work of yours and returns True while
    there is more. nonfinite: "raise" ends the step with the microbatch whose loss is not finite (it waits for the
    device once per loss), "ignore" leaves that to an Optimizer, which skips the step. record: keep samples of the W
    queue and of memory (`Pipeline.samples`). copy_size: bytes of activations after which an offload begins to copy
    them, while the forward goes on (`Costs.copy_size` is the planner's). recompute: which parts of a chunk its R run
    again, patterns of their names in the chunk ("*norm*", "layers.*.mlp") and classes (torch.nn.SiLU); the whole chunk
    where there are none. Raises TypeError or ValueError for anything else.
    """

    on_idle: Callable[[], bool] | None = None
    nonfinite: str = "ignore"
    record: bool = False
    copy_size: int = COPY_SIZE
    recompute: Sequence[str | type] = ()

    def __post_init__(self) -> None:
        if self.on_idle is not None and not callable(self.on_idle):
            raise TypeError(f"StepOptions: on_idle must be callable without arguments, or None; got {self.on_idle!r}")
        if self.nonfinite not in ("ignore", "raise"):
            raise ValueError(f'StepOptions: nonfinite must be "ignore" or "raise"; got {self.nonfinite!r}')
        if not isinstance(self.record, bool):
            raise TypeError(f"StepOptions: record must be True or False; got {self.record!r}")
        if not isinstance(self.copy_size, int) or isinstance(self.copy_size, bool):
            raise TypeError(f"StepOptions: copy_size must be a number of bytes, an int; got {self.copy_size!r}")
        if self.copy_size < 1:
            raise ValueError(f"StepOptions: copy_size must be at least 1 byte; got {self.copy_size}")
        if isinstance(self.recompute, str) or not all(isinstance(each, (str, type)) for each in self.recompute):
            raise TypeError(
                "StepOptions: recompute must be a list of names of parts, such as '*norm*', and of their classes; got "
                f"{self.recompute!r}"
            )
