"""Costs: how long each pass of each chunk takes, and how much memory it holds; a JSON file can carry them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from zbkern.planning.costs.json_file import JsonFile
from zbkern.schedules.actions import check_count
from zbkern.schedules.units import MEMORY_UNITS, TIME_UNITS

if TYPE_CHECKING:
    from typing_extensions import Self

PerChunk = float | Sequence[float]
COPY_SIZE = 64 * 2**20  # bytes: a millisecond or two of a link to the host, and a small part of a chunk's activations
_EXPECTED = "a number or one number per chunk"
_SLOWEST = 1e-3  # of ranks: one that is slower than that is broken
ROUNDING = 1e-9  # relative: sums of fractions of one number differ in the last digits
LARGEST = 1e100  # of any cost: sums and ratios of costs then stay far from the ends of floating point


class ChunkCosts(NamedTuple):
    """`Costs` written out: one number per chunk in model order (`communication`, `message`: one per edge between
    neighbours)."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    fused: tuple[float, ...]
    communication: tuple[float, ...]
    activation: tuple[float, ...]
    held: tuple[float, ...]
    merge_saving: tuple[float, ...]
    static: tuple[float, ...]
    recompute: tuple[float, ...]
    checkpoint: tuple[float, ...] | None  # None where the costs do not say
    streamed: tuple[float, ...]  # of the activation, what is on the device while it is offloaded during F
    attention_forward: tuple[float, ...]
    attention_backward: tuple[float, ...]
    overhead: tuple[float, ...]
    carried: tuple[float, ...]
    carried_gradients: tuple[float, ...]
    latency: tuple[float, ...]  # of the communication over each edge
    network_forward: tuple[float, ...]
    network_backward: tuple[float, ...]
    collectives: tuple[float, ...]
    message: tuple[float, ...]
    masked_forward: tuple[float, ...]
    masked_backward: tuple[float, ...]


@dataclass(frozen=True, repr=False, kw_only=True)
class CommonCosts(JsonFile):
    """What costs of chunks and of layers share: messages and copies, the length of sequences, the speeds of ranks, and
    units."""

    latency: float = 0.0
    offload_bandwidth: float | None = None
    reload_bandwidth: float | None = None
    copy_slowdown: float = 0.0
    copy_size: float | None = None
    tokens: int | None = None
    speeds: tuple[float, ...] | None = None
    time_unit: str | None = None
    memory_unit: str | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name in ("latency", "offload_bandwidth", "reload_bandwidth", "copy_slowdown", "copy_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checked_number(owner, name, getattr(self, name)))
        if 0.0 in (self.offload_bandwidth, self.reload_bandwidth, self.copy_size):
            raise ValueError(
                f"{owner}: offload_bandwidth, reload_bandwidth and copy_size must be above 0, or None; got 0"
            )
        for name, known in (("time_unit", tuple(TIME_UNITS)), ("memory_unit", MEMORY_UNITS)):
            unit = getattr(self, name)
            if unit is not None and unit not in known:
                raise ValueError(f"{owner}: {name} must be {' or '.join(map(repr, known))}, or None; got {unit!r}")
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise ValueError(
                f"{owner}: tokens must be those of a sequence, a whole number, or None; got {self.tokens!r}"
            )
        if self.speeds is not None:
            object.__setattr__(self, "speeds", checked_speeds(owner, self.speeds))

    def _at_speeds(self, ranks: int) -> Self:
        """For so many ranks: without speeds that are of another number."""
        return self if self.speeds is None or len(self.speeds) == ranks else replace(self, speeds=None)


@dataclass(frozen=True, repr=False)
class Costs(CommonCosts):
    """Times and memory of one microbatch, of whole sequences, in one chunk: a number, or one per chunk in model order.

    Args:
        forward, backward, weight: time of F, B and W, all in one unit (B is the input gradient alone).
        communication: time of a message between neighbouring chunks on different ranks, a number or one per edge
            (edge i joins chunks i and i+1, and is as slow for gradients as for activations).
        latency: of every message, the time that does not shrink with the length of a slice.
        activation: memory a microbatch holds after F until B.
        held: what it holds between B and W, inputs and output gradients; as much as the activation where it is not
            given (a Llama block holds more: `profile` measures it).
        split_overhead: a fused BW takes backward + weight - split_overhead.
        merge_saving: what a W gains when it directly follows another W of the same chunk.
        static: memory of the chunk's model states, which stay during the whole step: weights, gradients and optimizer
            states.
        recompute: time of R, by default that of F.
        checkpoint: memory that a microbatch holds between an F and its R, what the chunk was given; needed for
            schedules that recompute.
        offload_bandwidth, reload_bandwidth: memory per time of copies from a rank's device to its host and back; needed
            for schedules that offload.
        copy_slowdown: how much longer a pass takes, as a share of its time, while one copy runs beside it.
        copy_size: memory of one transfer of activations to the host or back, which go in the order in which F leaves
            and B needs them; None where those of a microbatch are one transfer.
        attention_forward, attention_backward: this and the next four are for the passes of a slice, whose costs
            otherwise grow with its length. Of forward and backward, the time that grows with the length times the mean
            context (the keys before a query).
        overhead: of each F, B and W, the time that does not shrink with the length.
        carried: of the activation, what a sequence keeps for its later slices, keys and values: it is there as a whole
            from the sequence's first F to its last B.
        carried_gradients: memory of its gradients, from the sequence's first B to its last: twice as much for 16-bit
            keys, whose gradients are summed in fp32; as much as carried where it is not given.
        network_forward, network_backward: of forward and backward, the time in which a collective of the pass is in
            flight (all-to-alls of experts, all-gathers of weights), and the rank could compute something else. Passes
            beside each other hide it (`Schedule.beside`); in turn a pass takes all of its time.
        collectives: how many an F has, and a B, whose network time they share equally, with as much of the compute
            before, between and behind them; one at least where there is network time.
        message: memory of a message between neighbouring chunks on different ranks, a number or one per edge: a rank
            has room for those that others may have sent before it takes them (`FlatCosts.ahead`).
        masked_forward, masked_backward: of F and B of a pack of many short sequences, which has as many tokens as the
            sequence, the time of attention between them, where a mask hides it; 0 where attention leaves it out.
        tokens: of a sequence, where they are known: slices that a plan chooses are then multiples of 128.
        speeds: of the ranks, where they differ: passes of a chunk take its times, without those of the
            network, divided by the speed of its rank.
        time_unit: "s", "ms", "us", or None where times have no unit.
        memory_unit: "bytes", or None where memory has no unit; `memory_limit` and `peak_memory` are in the same one.
            Tables, pictures and errors print the units that are known (15 ms, 24.5 GB) and plain numbers otherwise.

    Raises TypeError or ValueError for anything but numbers from 0 to 1e100 and these units.
    """

    forward: PerChunk = 1.0
    backward: PerChunk = 1.0
    weight: PerChunk = 1.0
    communication: PerChunk = 0.0
    activation: PerChunk = 1.0
    held: PerChunk = None  # type: ignore[assignment]  # replaced by the activation
    split_overhead: PerChunk = 0.0
    merge_saving: PerChunk = 0.0
    static: PerChunk = 0.0
    recompute: PerChunk | None = None
    checkpoint: PerChunk | None = None
    attention_forward: PerChunk = 0.0
    attention_backward: PerChunk = 0.0
    overhead: PerChunk = 0.0
    carried: PerChunk = 0.0
    carried_gradients: PerChunk | None = None
    network_forward: PerChunk = 0.0
    network_backward: PerChunk = 0.0
    collectives: PerChunk = 0.0
    message: PerChunk = 0.0
    masked_forward: PerChunk = 0.0
    masked_backward: PerChunk = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held is None:
            object.__setattr__(self, "held", self.activation)
        for name in number_fields():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                object.__setattr__(self, name, checked("Costs", name, getattr(self, name)))

    def per_chunk(self, chunks: int) -> ChunkCosts:
        """Every cost as a tuple with one number for each of `chunks` chunks in model order, and `fused` worked out.

        Raises ValueError when a field has another number of entries, or when an overhead or saving exceeds what it is
        taken from, TypeError when `chunks` is no whole number.
        """
        check_count("Costs.per_chunk: chunks", chunks)
        given = {name: getattr(self, name) for name in number_fields()}
        for name, other in (("recompute", "forward"), ("carried_gradients", "carried")):
            given[name] = given[other] if given[name] is None else given[name]
        flat: dict[str, Any] = {
            name: None if value is None else _spread(name, value, chunks - (name in OF_EDGES))
            for name, value in given.items()
        }
        for name, wholes in PARTS.items():
            most = [sum(each) for each in zip(*(flat[whole] for whole in wholes), strict=True)]
            for chunk, (part, whole) in enumerate(zip(flat[name], most, strict=True)):
                if part > whole * (1 + ROUNDING):
                    must = f"must be at most its {' + '.join(wholes)}, {whole:g}"
                    raise ValueError(f"Costs: {name} of chunk {chunk} {must}; got {part:g}")
            flat[name] = tuple(map(min, flat[name], most))
        passes = zip(flat["backward"], flat["weight"], flat.pop("split_overhead"), strict=True)
        fused = tuple(backward + weight - overhead for backward, weight, overhead in passes)
        # one transfer fills while another is copied
        streamed = tuple(a if self.copy_size is None else min(a, 2 * self.copy_size) for a in flat["activation"])
        latency = tuple(min(self.latency, each) for each in flat["communication"])
        return ChunkCosts(fused=fused, streamed=streamed, latency=latency, **flat)


PARTS = {
    "split_overhead": ("backward", "weight"),
    "merge_saving": ("weight",),
    "attention_forward": ("forward",),
    "attention_backward": ("backward",),
    "carried": ("activation",),
    "network_forward": ("forward",),
    "network_backward": ("backward",),
}
"""What each of these costs is a part of, and no more than."""
OF_EDGES = ("communication", "message")  # one per pair of neighbouring chunks
TIMES = (
    *("forward", "backward", "weight", "split_overhead", "merge_saving"),
    *("attention_forward", "attention_backward", "overhead", "network_forward", "network_backward"),
)  # of passes: in a chunk those of its layers together
COMPUTED = (
    *("forward", "backward", "weight", "fused", "merge_saving", "recompute"),
    *("attention_forward", "attention_backward", "overhead", "masked_forward", "masked_backward"),
)  # times of `ChunkCosts` that depend on how fast a rank computes
MEMORY = ("activation", "held", "carried", "carried_gradients")  # of a microbatch
_OPTIONAL = ("recompute", "checkpoint", "carried_gradients")  # of the fields with a number per chunk: they may be None


def number_fields() -> list[str]:
    """The names of those fields of `Costs` that have a number per chunk or edge."""
    return [field.name for field in fields(Costs) if not field.kw_only]


def checked(owner: str, name: str, value: Any) -> float | tuple[float, ...]:
    """A cost, or one per chunk. Raises TypeError or ValueError in the name of `owner`."""
    if hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(
            entry
            if type(entry) is float and 0 <= entry <= LARGEST
            else checked_number(owner, f"{name}[{index}]", entry, expected=_EXPECTED)
            for index, entry in enumerate(value)
        )
    return checked_number(owner, name, value, expected=_EXPECTED)


def checked_number(owner: str, name: str, value: Any, most: float = LARGEST, expected: str = "a number") -> float:
    """A number from 0 to `most`. Raises TypeError or ValueError in the name of `owner`."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{owner}: {name} must be {expected}; got {type(value).__name__} {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond 1e308
        number = math.inf if value > 0 else -math.inf
    if not 0 <= number <= most:
        bound = f"from 0 to {most:g}, in whatever unit makes it so" if most < math.inf else "at least 0"
        raise ValueError(f"{owner}: {name} must be {bound}; got {number:g}")
    return number


def checked_speeds(owner: str, value: Any, ranks: int | None = None) -> tuple[float, ...]:
    """The speed of every rank. Raises TypeError or ValueError in the name of `owner`."""
    each = checked(owner, "speeds", value)
    count = len(each) if isinstance(each, tuple) else 0
    if count != ranks if ranks else not count:
        raise ValueError(f"{owner}: speeds must be one number per rank{f' ({ranks})' if ranks else ''}; got {value!r}")
    assert isinstance(each, tuple)
    if not all(_SLOWEST <= speed <= 1 / _SLOWEST for speed in each):
        raise ValueError(f"{owner}: speeds must be from {_SLOWEST:g} to {1 / _SLOWEST:g}, 1 as measured; got {value!r}")
    return each


def _spread(name: str, value: Any, count: int) -> tuple[float, ...]:
    if isinstance(value, float):
        return (value,) * count
    if len(value) != count:
        what = "edges between chunks" if name in OF_EDGES else "chunks"
        raise ValueError(
            f"Costs: {name} has {len(value)} entries and the schedule {count} {what}; give one number, or {count}, or "
            "plan for the chunks that these are of: plan(..., placement=schedule.placement)"
        )
    return value
