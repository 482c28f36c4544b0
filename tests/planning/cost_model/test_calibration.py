"""Measured blocks and steps correct what is computed, and what they do not say stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zbkern.pipeline import ModelCosts
from zbkern.planning.cost_model.architecture import load_architecture
from zbkern.planning.cost_model.calibration import Calibration, of_blocks, of_step
from zbkern.planning.cost_model.hardware import Hardware, load_hardware
from zbkern.planning.cost_model.job import Job
from zbkern.planning.cost_model.model_costs import Setting

LLAMA = load_architecture(Path(__file__).parents[3] / "bench" / "configurations" / "llama-3-8b.json")
H100 = load_hardware("h100")
JOB = Job(4096)
COSTS = Setting(LLAMA, H100, JOB).costs


def measured(computed: ModelCosts = COSTS, tensor_parallel: int = 1) -> ModelCosts:
    """Two blocks, one a chunk, in seconds: F 1.5, B 1.2 and W 0.9 times as long, 1.3 times the activation."""
    engine = computed.pass_overhead
    layers = [
        replace(
            layer,
            forward=1.5 * (layer.forward + engine) / 1e3,
            backward=1.2 * (layer.backward + engine) / 1e3,
            weight=0.9 * (layer.weight + engine) / 1e3,
            activation=1.3 * layer.activation,
            split_overhead=0.1 * (1.2 * (layer.backward + engine) + 0.9 * (layer.weight + engine)) / 1e3,
            merge_saving=0.0,
            output=layer.output * tensor_parallel,
        )
        for layer in computed.layers[3:5]
    ]
    return ModelCosts(layers, time_unit="s", memory_unit="bytes")


def test_a_block_corrects_all_layers() -> None:
    found = of_blocks(COSTS, measured(), 1, "block.json")
    corrected = Setting(LLAMA, replace(H100, calibration=found), JOB).costs
    for before, after in zip(COSTS.layers, corrected.layers, strict=True):
        assert after.forward == pytest.approx(1.5 * before.forward)
        assert after.backward == pytest.approx(1.2 * before.backward)
        assert after.weight == pytest.approx(0.9 * before.weight)
        assert after.split_overhead == pytest.approx(0.1 * (after.backward + after.weight))
        assert (after.activation, after.held) == pytest.approx((1.3 * before.activation, before.held))
        assert (after.static, after.output) == (before.static, before.output)
    alone, expected = (each.chunk_costs([0, 3, 4]).per_chunk(3) for each in (corrected, COSTS))
    assert alone.forward[1] == pytest.approx(1.5 * expected.forward[1])  # the chunk that was measured, as it was
    assert (corrected.latency, corrected.bandwidth) == (COSTS.latency, COSTS.bandwidth)
    assert Setting(LLAMA, replace(H100, calibration=found), JOB).beside(4) == Setting(LLAMA, H100, JOB).beside(4)
    times = "F 1.50, B 1.20 and W 0.90 times as long as computed"
    assert found.describe() == f"corrected by block.json: {times}, 1.30 times the memory from F to B"


def test_measured_halves_correct_whole_blocks_too() -> None:
    halves = Setting(LLAMA, H100, replace(JOB, halves=True)).costs
    found = of_blocks(halves, measured(halves), 1, "halves.json")
    assert (found.forward, found.backward, found.weight) == pytest.approx((1.5, 1.2, 0.9))


def test_a_block_may_pass_on_whole_rows_under_tensor_parallelism() -> None:
    computed = Setting(LLAMA, H100, Job(4096, tensor_parallel=4)).costs
    assert of_blocks(computed, measured(computed, 4), 4, "").forward == pytest.approx(1.5)
    assert of_blocks(computed, measured(computed), 4, "").forward == pytest.approx(1.5)


def test_a_step_corrects_everything() -> None:
    found = replace(H100, calibration=of_step(2.0, 3.0, "log.json"))
    corrected = Setting(LLAMA, found, JOB).costs
    ratios = [a.forward / b.forward for a, b in zip(corrected.layers, COSTS.layers, strict=True)]
    assert ratios == pytest.approx([1.5] * len(ratios))
    assert corrected.latency == 1.5 * COSTS.latency
    assert corrected.bandwidth == COSTS.bandwidth / 1.5
    assert corrected.pass_overhead == 1.5 * COSTS.pass_overhead
    assert Setting(LLAMA, found, JOB).beside(4) == pytest.approx(1.5 * Setting(LLAMA, H100, JOB).beside(4))
    assert [layer.activation for layer in corrected.layers] == [layer.activation for layer in COSTS.layers]


def test_what_does_not_describe_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="in a unit of time and in bytes"):
        of_blocks(COSTS, replace(measured(), time_unit=None), 1, "")
    other = replace(measured(), layers=[replace(measured().layers[0], name="layer 0")])
    with pytest.raises(ValueError, match=r"blocks of the model, model.layers.0 for one; it has layer 0"):
        of_blocks(COSTS, other, 1, "")
    twice = Setting(LLAMA, H100, Job(4096, microbatch_size=2)).costs
    with pytest.raises(ValueError, match=r"model.layers.2 passes on 67,108,864 bytes, and 33,554,432 with these sizes"):
        of_blocks(COSTS, measured(twice), 1, "")
    with pytest.raises(TypeError, match="Hardware: calibration is for zbkern plan --calibrate; got 2"):
        Hardware(**{**vars(H100), "calibration": 2})
    for before, after in zip(COSTS.layers, Calibration().applied(COSTS).layers, strict=True):
        assert vars(after) == pytest.approx(vars(before))  # what nobody measured is as computed, also the split's cost
