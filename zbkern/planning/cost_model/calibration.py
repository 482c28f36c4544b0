"""What a measured block, or the step of a training run, corrects in the computed costs of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbkern.planning.costs.layers import LayerCosts, ModelCosts
from zbkern.schedules.layout import layer_of
from zbkern.schedules.units import TIME_UNITS

_PASSES = ("forward", "backward", "weight")
_MEMORY = ("activation", "held")
_CORRECTED = {
    "forward": ("forward", "attention_forward", "network_forward"),
    "backward": ("backward", "attention_backward", "network_backward"),
    "weight": ("weight", "merge_saving"),
    **{name: (name,) for name in _MEMORY},
}


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
        changed = {name: getattr(layer, name) * getattr(self, by) for by, names in _CORRECTED.items() for name in names}
        both, apart = layer.backward + layer.weight, self.split_overhead
        apart = (layer.split_overhead / both if both else 0.0) if apart is None else apart
        changed["split_overhead"] = apart * (changed["backward"] + changed["weight"])
        return replace(layer, **changed, overhead=layer.overhead * min(self.forward, self.backward, self.weight))


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
    for ours, theirs in pairs:
        whole = ours.output * ranks
        if round(theirs.output) not in (round(ours.output), round(whole)):
            raise ValueError(
                f"{theirs.name} passes on {theirs.output:,.0f} bytes, and {whole:,.0f} with these sizes in "
                "bf16: plan with the sequence and the microbatch size that were measured, or measure again"
            )
    mine, found = (
        {name: sum(getattr(layer, name) for layer in layers) for name in (*_PASSES, *_MEMORY, "split_overhead")}
        for layers in zip(*pairs, strict=True)
    )
    to_ms, engine = 1e3 / TIME_UNITS[measured.time_unit], len(pairs) * computed.pass_overhead
    times = {name: to_ms * found[name] / (mine[name] + engine) for name in _PASSES}
    apart = found["split_overhead"] / (found["backward"] + found["weight"])
    memory = {name: found[name] / mine[name] for name in _MEMORY}
    return Calibration(**times, **memory, split_overhead=apart, source=source)


def of_step(computed: float, measured: float, source: str) -> Calibration:
    """From the seconds of a whole step: everything takes so many times as long."""
    ratio = measured / computed
    return Calibration(ratio, ratio, ratio, rest=ratio, source=source)
