"""LayerCosts, ModelCosts: a model's costs layer by layer, from which those of its chunks follow, however it is cut."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from zbkern.planning.costs.chunks import LARGEST, MEMORY, TIMES, CommonCosts, Costs, checked_number
from zbkern.planning.costs.json_file import check_fields, parse_object
from zbkern.schedules.layout import numbers_of

_SUMMED = (*TIMES, *MEMORY, "collectives")
_OF_PARTS = ("recompute", "checkpoint")


@dataclass(frozen=True)
class LayerCosts:
    """One layer: times and memory of one microbatch, as in `Costs`, and what the layer holds and passes on.

    Args:
        held: as much as the activation where it is not given. split_overhead, merge_saving: as in `Costs`.
        output: memory of what it passes to the next layer (its gradient is as large).
        static: memory of its model states: weights, gradients and optimizer states.
        tied: layers of the same name here share weights, an embedding and the head that is its transpose: a rank with
            several of them holds the largest `static` of theirs, and no other.
        recompute, checkpoint: of an R that runs named parts of a chunk again: its time in this layer, and what an F
            with such an R keeps of the layer, the layer's input among it. Both or none, for all layers of a model;
            where they are not given, an R runs the whole chunk, which keeps its input.
        output_again: how much of the output such an R computes again, which a next layer in the same chunk does not
            keep as its input.
        attention_forward, attention_backward, overhead, carried, carried_gradients: what matters to slices of a
            sequence, as in `Costs`.
        network_forward, network_backward, collectives: what passes beside each other hide, as in `Costs`.

    Raises TypeError or ValueError for numbers that `Costs` would not take.
    """

    name: str
    forward: float
    backward: float
    weight: float
    activation: float = 0.0
    held: float = None  # type: ignore[assignment]  # replaced by the activation
    split_overhead: float = 0.0
    merge_saving: float = 0.0
    output: float = 0.0
    static: float = 0.0
    tied: str | None = None
    recompute: float | None = None
    checkpoint: float | None = None
    output_again: float = 0.0
    attention_forward: float = 0.0
    attention_backward: float = 0.0
    overhead: float = 0.0
    carried: float = 0.0
    carried_gradients: float = None  # type: ignore[assignment]  # replaced by what is carried
    network_forward: float = 0.0
    network_backward: float = 0.0
    collectives: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.tied, (str, type(None))):
            raise TypeError(f"LayerCosts: name must be a str, tied a str or None; got {self.name!r} and {self.tied!r}")
        if self.held is None:
            object.__setattr__(self, "held", self.activation)
        if self.carried_gradients is None:
            object.__setattr__(self, "carried_gradients", self.carried)
        for name in (*_SUMMED, *_OF_PARTS, "static", "output", "output_again"):
            if name not in _OF_PARTS or getattr(self, name) is not None:
                checked_number(f"LayerCosts: of layer {self.name!r}", name, getattr(self, name))


@dataclass(frozen=True, repr=False)
class ModelCosts(CommonCosts):
    """Layers in model order, and the links between ranks: a message takes latency + its size / bandwidth.

    latency is in the unit of the layers' times, bandwidth in their memory per their time: those of the slowest link.
    forward_overhead: what every forward of a chunk takes besides its layers (masks, rotary embeddings), a time, too.
    pass_overhead: what every F, B and W of a chunk takes besides (launches, the engine), and a fused backward once.
    tokens, speeds, time_unit and memory_unit, and what schedules with offloading need (offload_bandwidth,
    reload_bandwidth, copy_slowdown, copy_size), are as in `Costs`.

    Raises TypeError or ValueError for numbers that `Costs` would not take.
    """

    layers: tuple[LayerCosts, ...]
    _: KW_ONLY
    bandwidth: float = math.inf
    forward_overhead: float = 0.0
    pass_overhead: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or not all(isinstance(layer, LayerCosts) for layer in self.layers):
            raise TypeError(f"ModelCosts: layers must be a list of LayerCosts, one at least; got {self.layers!r}")
        given = [all(getattr(layer, name) is not None for name in _OF_PARTS) for layer in self.layers]
        if any(getattr(layer, name) is not None for layer in self.layers for name in _OF_PARTS) and not all(given):
            without = self.layers[given.index(False)].name
            raise ValueError(
                "ModelCosts: recompute and checkpoint must both be given for all layers, or for none; got them for "
                f"some and not for {without!r}: a layer without named parts has 0 and its activation"
            )
        for name in ("bandwidth", "forward_overhead", "pass_overhead"):
            most = math.inf if name == "bandwidth" else LARGEST
            object.__setattr__(self, name, checked_number("ModelCosts", name, getattr(self, name), most))
        if self.bandwidth == 0:
            raise ValueError("ModelCosts: bandwidth must be above 0, inf for no limit; got 0")

    def _partition_of(self, firsts: Sequence[int]) -> tuple[float, ...]:
        """What `cut` takes for chunks that begin with layers at these places in `layers`: 4.5 is the second half of a
        block that is two layers here, named as `layers_of(model, halves=True)` names them."""
        numbers = numbers_of(layer.name for layer in self.layers)
        return tuple(numbers[first] for first in firsts)

    def chunk_costs(self, partition: Sequence[float], placement: Sequence[int] | None = None) -> Costs:
        """The costs of the chunks that begin with these layers.

        partition: the first layer of every chunk in model order, as `cut` takes it. placement:
        the rank of every chunk, by default each on its own; what tied layers share is in their rank's first chunk.
        Raises ValueError for another partition or placement.
        """
        numbers, count = self._partition_of(range(len(self.layers))), len(self.layers)
        starts = [numbers.index(each) if each in numbers else -1 for each in partition]
        if starts[:1] != [0] or any(a >= b for a, b in pairwise([*starts, count])):
            raise ValueError(
                f"chunk_costs: partition must be the first layer of every chunk of {count} layers, increasing from 0; "
                f"got {list(partition)}"
            )
        ranks = list(range(len(starts)) if placement is None else placement)
        if len(ranks) != len(starts):
            raise ValueError(f"chunk_costs: placement must be one rank for each of {len(starts)} chunks; got {ranks}")
        chunks = [self.layers[a:b] for a, b in pairwise([*starts, count])]
        summed: dict[str, Any] = {
            name: [sum(getattr(layer, name) for layer in chunk) for chunk in chunks] for name in _SUMMED
        }
        summed["forward"] = [time + self.forward_overhead for time in summed["forward"]]
        for name in ("forward", "backward", "weight", "split_overhead", "overhead"):
            summed[name] = [time + self.pass_overhead for time in summed[name]]
        common = {field.name: getattr(self, field.name) for field in fields(CommonCosts)}
        found = Costs(
            **summed,
            **self._of_recomputation(chunks),
            communication=[self.latency + chunk[-1].output / self.bandwidth for chunk in chunks[:-1]],
            message=[chunk[-1].output for chunk in chunks[:-1]],
            static=self._static(chunks, ranks),
            **common,
        )
        return found._at_speeds(max(ranks) + 1)

    def _of_recomputation(self, chunks: Sequence[Sequence[LayerCosts]]) -> dict[str, Any]:
        if self.layers[0].checkpoint is None:
            return {"checkpoint": [0.0, *(chunk[-1].output for chunk in chunks[:-1])]}
        summed = {name: [sum(getattr(layer, name) for layer in chunk) for chunk in chunks] for name in _OF_PARTS}
        again = [sum(layer.output_again for layer in chunk[:-1]) for chunk in chunks]
        kept = [max(0.0, most - less) for most, less in zip(summed["checkpoint"], again, strict=True)]
        return {"recompute": summed["recompute"], "checkpoint": kept}

    def _static(self, chunks: Sequence[Sequence[LayerCosts]], ranks: Sequence[int]) -> list[float]:
        shared: dict[tuple[int, str | None], float] = {}  # what a rank already holds of tied layers
        static = [0.0] * len(chunks)
        for number, (chunk, rank) in enumerate(zip(chunks, ranks, strict=True)):
            for layer in chunk:
                before = 0.0 if layer.tied is None else shared.get((rank, layer.tied), 0.0)
                shared[rank, layer.tied] = max(before, layer.static)
                static[number] += max(0.0, layer.static - before)
        return static

    def to_json(self) -> str:
        """The JSON object with the fields' names; an unlimited bandwidth is null."""
        bandwidth = self.bandwidth if math.isfinite(self.bandwidth) else None
        return json.dumps(asdict(self) | {"bandwidth": bandwidth}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ModelCosts:
        """The costs that `to_json` wrote; fields that are absent have their defaults. Raises ValueError."""
        data = parse_object("ModelCosts.from_json", text, '{"layers": [...]}')
        if not isinstance(data.get("layers"), list):
            raise ValueError(f'ModelCosts.from_json: expected an object with "layers", a list; got {text[:60]!r}')
        check_fields("ModelCosts.from_json", cls, data)
        for layer in data["layers"]:
            check_fields("ModelCosts.from_json: of a layer", LayerCosts, layer)
        layers = tuple(LayerCosts(**layer) for layer in data["layers"])
        bandwidth = math.inf if data.get("bandwidth") is None else data["bandwidth"]
        return cls(**{**data, "layers": layers, "bandwidth": bandwidth})
