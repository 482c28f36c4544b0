"""What a measured block, or the step of a training run, corrects in the computed costs of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbkern.planning.simulation.layers import LayerCosts, ModelCosts
from zbkern.schedules.layout import layer_of
from zbkern.schedules.units import TIME_UNITS

_PASSES = ("forward", "backward", "weight")
_MEMORY = ("activation", "held")


@dataclass(frozen=True)
class Calibration:
    """Measured over computed: the times of F, B and W and the bytes of a layer, and everything else of a step.

    split_overhead: what B and W take longer apart, as a share of both; None where it is not measured. rest: messages,
    and what of a step is no pass. source: what was measured; empty where nothing was.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    activation: float = 1.0
    held: float = 1.0
    split_overhead: float | None = None
    rest: float = 1.0
    source: str = ""

    def describe(self) -> str:
        times = f"F {self.forward:.2f}, B {self.backward:.2f} and W {self.weight:.2f} times as long as computed"
        memory = f", {self.activation:.2f} times the memory from F to B" if self.activation != 1 else ""
        return f"corrected by {self.source}: {times}{memory}"

    def applied(self, costs: ModelCosts) -> ModelCosts:
        return replace(
            costs,
            layers=tuple(map(self._corrected, costs.layers)),
            latency=costs.latency * self.rest,
            bandwidth=costs.bandwidth / self.rest,
            pass_overhead=costs.pass_overhead * self.forward,
        )

    def _corrected(self, layer: LayerCosts) -> LayerCosts:
        backward, weight = layer.backward * self.backward, layer.weight * self.weight
        both, apart = layer.backward + layer.weight, self.split_overhead
        apart = (layer.split_overhead / both if both else 0.0) if apart is None else apart
        return replace(
            layer,
            forward=layer.forward * self.forward,
            backward=backward,
            weight=weight,
            split_overhead=apart * (backward + weight),
            merge_saving=layer.merge_saving * self.weight,
            attention_forward=layer.attention_forward * self.forward,
            attention_backward=layer.attention_backward * self.backward,
            overhead=layer.overhead * min(self.forward, self.backward, self.weight),
            activation=layer.activation * self.activation,
            held=(layer.held or 0.0) * self.held,
        )


NONE = Calibration()
"""Nothing was measured."""


def of_blocks(computed: ModelCosts, measured: ModelCosts, ranks: int, source: str) -> Calibration:
    """From the blocks that are in both by name, measured by `profile_layers` with these sizes, one layer a chunk.

    ranks: of tensor parallelism, among which what is between computed layers is split. Raises ValueError for costs
    without such blocks or units, and for blocks of other sizes.
    """
    if measured.time_unit is None or measured.memory_unit != "bytes":
        raise ValueError("its costs must be measured, in a unit of time and in bytes, as profile_layers saves them")
    blocks = {layer.name: layer for layer in computed.layers if layer_of(layer.name).rpartition(".")[2].isdecimal()}
    pairs = [(blocks[layer.name], layer) for layer in measured.layers if layer.name in blocks]
    if not pairs:
        raise ValueError(
            f"it must have blocks of the model, {next(iter(blocks))} for one; it has {measured.layers[0].name}"
        )
    for mine, found in pairs:
        if round(found.output) not in (round(mine.output), round(mine.output * ranks)):
            raise ValueError(
                f"{found.name} passes on {found.output:,.0f} bytes, and {mine.output * ranks:,.0f} with these sizes in "
                "bf16: plan with the sequence and the microbatch size that were measured, or measure again"
            )
    to_ms = 1e3 / TIME_UNITS[measured.time_unit]

    def total(side: int, name: str) -> float:
        return sum(getattr(pair[side], name) for pair in pairs)

    engine = len(pairs) * computed.pass_overhead
    times = {name: to_ms * total(1, name) / (total(0, name) + engine) for name in _PASSES}
    memory = {name: total(1, name) / total(0, name) for name in _MEMORY}
    apart = total(1, "split_overhead") / (total(1, "backward") + total(1, "weight"))
    return Calibration(**times, **memory, split_overhead=apart, source=source)


def of_step(computed: float, measured: float, source: str) -> Calibration:
    """From the seconds of a whole step: everything takes so many times as long."""
    ratio = measured / computed
    return Calibration(ratio, ratio, ratio, rest=ratio, source=source)
