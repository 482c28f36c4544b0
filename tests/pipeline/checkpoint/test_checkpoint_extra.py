"""What a run saves beside model and optimizer: alike on all ranks it loads anywhere, else each rank gets its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zbkern
from tests.support.checkpointed import WIDTH, chunks
from tests.support.chunks import results_on_threads
from zbkern.pipeline import Optimizer, Pipeline, checkpoint, schedules
from zbkern.pipeline.checkpoint.packed import digest
from zbkern.pipeline.transport.local import LocalTransport

RATES = [0.1, 0.01, 0.05, 0.001]  # of the layers


def built(transport: LocalTransport, make: Any) -> tuple[Pipeline, Optimizer]:
    schedule = make(transport.size, 2)
    mine = chunks(schedule.placement, transport.rank)
    pipe = Pipeline([zbkern.convert(each) for each in mine.values()], schedule, nn.functional.mse_loss, transport)
    layers = [layer for module in mine.values() for layer in module.named_children()]
    groups = [{"params": [*layer.parameters()], "lr": RATES[int(name[-1])]} for name, layer in layers]
    return pipe, Optimizer(torch.optim.SGD(groups), pipe)


def save(folder: Path, extra: Any = None) -> None:
    """On two ranks, after two steps with layer-wise rates. extra: by rank, in place of a schedule's."""

    def rank_loop(transport: LocalTransport) -> None:
        pipe, optimizer = built(transport, schedules.zb_h1)
        with pipe:
            scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
            for _ in range(2):
                pipe.step(torch.ones(4, WIDTH), torch.zeros(4, WIDTH))
                optimizer.step()
                scheduler.step()
            own = scheduler.state_dict() if extra is None else extra[transport.rank]
            checkpoint.save(folder, 2, pipe, optimizer, own)

    results_on_threads(2, rank_loop)


def test_a_schedule_of_layerwise_rates_goes_on_with_those_of_its_rank(tmp_path: Path) -> None:
    save(tmp_path)

    def rank_loop(transport: LocalTransport) -> list[float]:
        pipe, optimizer = built(transport, schedules.zb_h1)
        with pipe:
            scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
            found = checkpoint.load(tmp_path, pipe, optimizer)
            assert found is not None
            scheduler.load_state_dict(found.extra)
            scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    assert results_on_threads(2, rank_loop) == [[rate / 8 for rate in RATES[:2]], [rate / 8 for rate in RATES[2:]]]


@pytest.mark.parametrize(("ranks", "make"), [(1, schedules.one_f_one_b), (4, schedules.zb_h1), (2, schedules.zb_v)])
@pytest.mark.parametrize("alike", [True, False])
def test_elsewhere_comes_what_all_ranks_have_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int, make: Any, alike: bool
) -> None:
    save(
        tmp_path,
        [{"position": 7, "of": [torch.ones(2), "x"]}, {"of": [torch.ones(2), "x"], "position": 7 if alike else 8}],
    )

    def rank_loop(transport: LocalTransport) -> Any:
        pipe, optimizer = built(transport, make)
        with pipe:
            return checkpoint.load(tmp_path, pipe, optimizer)

    found = [loaded.extra and loaded.extra["position"] for loaded in results_on_threads(ranks, rank_loop)]
    assert found == [7 if alike else None] * ranks
    assert ("as each of 2 ranks saved its own" in caplog.text) is not alike


def test_values_are_compared_and_not_what_they_are_written_as() -> None:
    one, other = "ab", "".join(["a", "b"])
    values = [
        {"a": [one, one], "b": {1: 0.1, "1": torch.ones(2)}},
        {"b": {"1": torch.ones(2), 1: 0.1}, "a": [one, other]},
    ]
    assert len({*map(digest, values)}) == 1
    others = [
        1,
        1.0,
        True,
        "1",
        None,
        torch.ones(1),
        torch.ones(1).double(),
        torch.ones(1, 1),
        [1],
        (1, 2),
        [2, 1],
        {"a": 1},
    ]
    assert len({*map(digest, [*values, *others])}) == 1 + len(others)
