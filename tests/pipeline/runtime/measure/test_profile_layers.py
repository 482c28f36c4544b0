"""profile_layers: every layer is measured by itself, on any rank, and the link between ranks with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.counted import counted_time as counted_time
from tests.support.counted import results_on_counted_ranks
from zbkern.pipeline import ModelCosts, ProfileOptions, plan, profile_layers
from zbkern.pipeline.transport.local import LocalTransport


class Mixed(nn.Module):
    """A linear that zbkern has, and one whose W it never sees."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def layers_on_ranks(cut: list[list[str]], **changes: Any) -> list[ModelCosts]:
    """profile_layers of embedding-like, wide and narrow layers; cut: the names on every rank."""
    torch.manual_seed(0)
    modules = {"in": Mixed(16, 32), "wide": Mixed(32, 512), "narrow": Mixed(512, 8), "out": Mixed(8, 16)}
    data = torch.randn(8, 16)

    def rank(transport: LocalTransport) -> ModelCosts:
        mine = {name: zbkern.convert(modules[name]) for name in cut[transport.rank]}
        arguments = {"options": ProfileOptions(1), "group": transport, **changes}
        return profile_layers(mine, nn.functional.mse_loss, data, data, **arguments)

    return results_on_threads(len(cut), rank)


def test_layers_are_measured_one_by_one_on_any_cut() -> None:
    whole = layers_on_ranks([["in", "wide", "narrow", "out"]])[0]
    parts = layers_on_ranks([["in"], ["wide", "narrow"], ["out"]])
    assert parts[0] == parts[1] == parts[2]
    for costs in (whole, parts[0]):
        assert [layer.name for layer in costs.layers] == ["in", "wide", "narrow", "out"]
        assert [layer.output for layer in costs.layers[:3]] == [2 * size * 4 for size in (32, 512, 8)]
        # weight, gradient and two moments of it
        assert [layer.static for layer in costs.layers] == [16 * n for n in (512, 16384, 4096, 128)]
        # inputs and output gradients of one microbatch of two rows
        assert [layer.held for layer in costs.layers] == [
            8 * (a + b) for a, b in ((16, 32), (32, 512), (512, 8), (8, 16))
        ]
        assert all(layer.forward > 0 and layer.backward > 0 and layer.weight > 0 for layer in costs.layers)
        assert (costs.time_unit, costs.memory_unit) == ("ms", "bytes")
    assert (whole.latency, whole.bandwidth) == (0, math.inf)
    assert 0 < parts[0].latency < math.inf
    assert 0 < parts[0].bandwidth < math.inf
    assert plan(whole, 2, 4, memory_limit=1e6, effort=0).partition is not None


@pytest.mark.usefixtures("counted_time")
def test_messages_take_what_they_take_on_the_slowest_link() -> None:
    links = {(0, 1): (4.0, 100.0), (1, 2): (8.0, 200.0)}  # latency in ms, bytes per ms

    def travel(sender: int, receiver: int, tag: Any, message: Any) -> float:
        latency, bandwidth = links.get((min(sender, receiver), max(sender, receiver)), (0.0, 1.0))
        return (latency + (message.nbytes - 4) / bandwidth) / 1e3 if isinstance(message, torch.Tensor) else 0.0

    def measured(transport: LocalTransport) -> ModelCosts:
        layer, data = zbkern.convert(nn.Linear(8, 8)), torch.randn(4, 8)
        options = {"microbatches": 1, "options": ProfileOptions(1), "group": transport}
        return profile_layers({f"layer {transport.rank}": layer}, nn.functional.mse_loss, data, data, **options)

    found = results_on_counted_ranks(3, measured, travel)
    assert found[0] == found[1] == found[2]
    assert (found[0].latency, found[0].bandwidth) == pytest.approx((8.0, 100.0))


def test_layers_of_one_process_need_no_group() -> None:
    layers = {"first": zbkern.convert(nn.Linear(4, 4)), "second": zbkern.convert(nn.Linear(4, 4))}
    layers["second"].weight = layers["first"].weight
    costs = profile_layers(
        layers, nn.functional.mse_loss, *torch.randn(2, 8, 4), options=ProfileOptions(bytes_per_parameter=18)
    )
    assert [layer.static for layer in costs.layers] == [18 * 20] * 2
    assert costs.layers[0].tied == costs.layers[1].tied == "rank 0: 0"


class Windowed(nn.Module):
    def __init__(self, layer_idx: int, sliding_window: int) -> None:
        super().__init__()
        self.layer_idx, self.sliding_window, self.linear = layer_idx, sliding_window, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_equal_layers_get_the_median_of_their_times() -> None:
    windows = [8, 8, 16, 8, 16, 8, 8]
    layers = {f"layer {n}": zbkern.convert(Windowed(n, window)) for n, window in enumerate(windows)}
    layers["layer 5"].linear.requires_grad_(False)  # has no W
    costs = profile_layers(layers, nn.functional.mse_loss, *torch.randn(2, 8, 4), options=ProfileOptions(1))
    times = [(layer.forward, layer.backward, layer.weight, layer.split_overhead) for layer in costs.layers]
    assert times[1] == times[3]
    assert times[2] == times[4]
    assert len({*times}) == 5  # the first, the last, each window, the frozen one
