"""StepOptions: what a Pipeline does in a step besides its actions; ProfileOptions: how costs are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zbkern.planning.costs.chunks import COPY_SIZE
from zbkern.schedules.actions import check_count


@dataclass(frozen=True)
class StepOptions:
    """What a Pipeline does in a step besides its actions; on each rank as it likes.

    Args:
        record: keep samples of the W queue and of memory (`pipe.last.samples`).
        max_wgrad_bytes: bytes that waiting W may pin before the oldest run at once, None for no limit.
        copy_size: bytes of activations after which an offload begins to copy them, while the forward goes on
            (`Costs.copy_size` is the planner's).
        recompute: which parts of a chunk its R run again, patterns of their names in the chunk ("*norm*",
            "layers.*.mlp") and classes (torch.nn.SiLU); the whole chunk where there are none.
        check_values: compare what an R computes with what its F did, and what W reads with what it was in B, in every
            step, and not in the first two only.
        same_bits: gradients that are the same to the bit for any number of stages and any schedule of the same
            microbatches and slices (docs/same_bits.md): no W are merged, and schedules are refused whose order of
            passes would change a sum. On every rank.

    Raises TypeError or ValueError for other numbers and parts.
    """

    record: bool = False
    max_wgrad_bytes: int | None = None
    copy_size: int = COPY_SIZE
    recompute: Sequence[str | type] = ()
    check_values: bool = False
    same_bits: bool = False

    def __post_init__(self) -> None:
        _check(self)
        if self.max_wgrad_bytes is not None:
            check_count("StepOptions: max_wgrad_bytes", self.max_wgrad_bytes, 0)


@dataclass(frozen=True)
class ProfileOptions:
    """How `profile` and `profile_layers` measure.

    Args:
        repeats: steps of every kind after one to warm up, of which times are medians; up to four times as many while
            the quartiles of any pass's times are more than 10% apart, and a warning where they remain so.
        bytes_per_parameter: of a weight, its gradient and optimizer states together, which a rank's memory includes
            (`static`); None for AdamW's two moments, all in the weight's dtype.
        copy_size: that of the `StepOptions` to come; in the costs it is what transfers of these activations have, which
            end with whole tensors.
        recompute: likewise, the parts of chunks that an R runs again, for the time of R and what an F keeps; else an R
            is a whole F, which keeps what it is given. In a chunk without such a part there is nothing to recompute.
        slices: also measure sequences in slices, for what plans of slices weigh: attention, overhead, and what is
            carried. Sequences as long as the longest that plans are for tell most; those of less than 16 tokens little.
        packs: inputs and side inputs with which the rows of the batch are packs, such as `as_packs` makes: also measure
            what attention between the sequences of a pack takes, under a mask. With slices alone.

    Raises TypeError or ValueError for other numbers and parts.
    """

    repeats: int = 3
    bytes_per_parameter: float | None = None
    copy_size: int = COPY_SIZE
    recompute: Sequence[str | type] = ()
    slices: bool = False
    packs: tuple[Any, Any] | None = None

    def __post_init__(self) -> None:
        _check(self)
        check_count("ProfileOptions: repeats", self.repeats)
        if self.packs is not None and (not self.slices or not isinstance(self.packs, tuple) or len(self.packs) != 2):
            raise TypeError(
                "ProfileOptions: packs must be (inputs, side), beside slices=True; got "
                f"{type(self.packs).__name__} beside slices={self.slices!r}"
            )


def _check(options: StepOptions | ProfileOptions) -> None:
    owner, value = type(options).__name__, options.recompute
    check_count(f"{owner}: copy_size", options.copy_size)
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(e, (str, type)) for e in value):
        raise TypeError(
            f"{owner}: recompute must be a list of names of parts, such as '*norm*', and of their classes; got "
            f"{value!r}"
        )
