"""The optimizer without a barrier over two stages of two replicas, DistributedDataParallel or FSDP2."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.two_by_two import (
    MAX_NORM,
    Pairs,
    Setup,
    assert_close,
    make_optimizer,
    mean_square,
    mesh,
    plain_steps,
)
from zbkern.pipeline import Optimizer, Pipeline

pytestmark = pytest.mark.dist


class Trained:
    """What a rank has after steps with forced gradients: of (chunk, step), in one microbatch of the second replica."""

    def __init__(
        self,
        kind: str,
        name: str,
        forced: dict[tuple[int, int], float],
        dtype: torch.dtype = torch.float64,
        wrapper: dict[str, Any] | None = None,
        make_pairs: Callable[[list[nn.Parameter]], Pairs] | None = None,
        **options: Any,
    ) -> None:
        setup = Setup(kind, name, dtype, **(wrapper or {}))
        self.losses: list[float] = []

        def forward(chunk: int, original: Any, microbatch: int, *inputs: Any) -> Any:
            value = forced.get((chunk, step)) if (setup.replica, microbatch) == (1, 2) else None
            setup.plain[setup.chunks.index(chunk)][1].force = value
            return original(microbatch, *inputs)

        with Pipeline(setup.modules, setup.schedule, mean_square, mesh().get_group("stage"), timeout=30) as pipe:
            for chunk, stage in pipe.stages.items():
                stage.forward = functools.partial(forward, chunk, stage.forward)
            parameters = setup.parameters()
            optimizer = Optimizer(
                make_pairs(parameters) if make_pairs else make_optimizer(parameters),
                pipe,
                max_norm=None if make_pairs else MAX_NORM,
                master_weights=dtype.itemsize < 4,
                **options,
            )
            for step in range(7):
                optimizer.zero_grad()
                loss = pipe.step(*setup.data(step))
                if loss is not None and setup.replica == 0:
                    self.losses.append(loss.item())
                optimizer.step()
            optimizer.validate()
        self.weights = setup.named(lambda p: p)
        self.counts = (optimizer.undone, optimizer.clipped, optimizer.skipped)


BAD = {(1, 1): 100.0, (0, 2): math.nan, (1, 3): math.inf, (1, 4): 90.0, (0, 5): 80.0}


def train_forced(kind: str, name: str, adaptive: bool) -> tuple[int, int, int]:
    """Equal to the plain loop up to rounding, and bit for bit to steps that wait."""
    at_once = Trained(kind, name, BAD, adaptive=adaptive)
    chunks = len(Setup(kind, name).schedule.placement)
    _, expected, losses = plain_steps(chunks, 7, tuple(BAD.items()))
    assert_close(at_once.weights, expected[-1], "after all steps", rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(at_once.losses, losses if at_once.losses else [], rtol=1e-6, atol=0)
    waited = Trained(kind, name, BAD, undo=None)
    assert at_once.losses == waited.losses
    for key, value in at_once.weights.items():
        assert torch.equal(value, waited.weights[key]), key
    assert waited.counts[0] == 0
    return at_once.counts


@pytest.mark.parametrize(
    ("kind", "name", "adaptive"),
    [
        ("ddp", "zb_h2", False),
        pytest.param("fsdp", "zb_v", True, marks=pytest.mark.slow),
        pytest.param("ddp", "zb_v", True, marks=pytest.mark.slow),
        pytest.param("fsdp", "zb_h2", False, marks=pytest.mark.slow),
    ],
)
def test_optimizer_of_replicas_equals_one_process(four_ranks: Any, kind: str, name: str, adaptive: bool) -> None:
    counts = four_ranks.run(train_forced, kind, name, adaptive)
    assert counts[0] == counts[2]
    assert counts[1] == counts[3]
    assert [count[0] for count in counts[:2]] == [1 if adaptive else 3, 0]
    assert {count[1:] for count in counts} == {(3, 2)}


def train_with(kind: str, options: dict[str, Any]) -> int:
    trained = Trained(kind, "zb_h2", BAD, adaptive=False, **options)
    _, expected, _ = plain_steps(2, 7, tuple(BAD.items()))
    assert_close(trained.weights, expected[-1], "after all steps", rtol=1e-6, atol=1e-7)
    return trained.counts[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fsdp", {"wrapper": {"reshard_after_forward": True}}),
        ("ddp", {"wrapper": {"gradient_as_bucket_view": True}}),
        ("ddp", {"undo": "inverse"}),
        pytest.param("fsdp", {"undo": "inverse"}, marks=pytest.mark.slow),
    ],
)
def test_optimizer_with_other_options(four_ranks: Any, kind: str, options: dict[str, Any]) -> None:
    """Forwards that run ahead gather, too, also if they run again; gradients of a pending step live in DDP buckets."""
    assert four_ranks.run(train_with, kind, options) == [3, 0, 3, 0]


def matrices_and_rest(kind: str, parameters: list[nn.Parameter]) -> Pairs:
    matrices = [p for p in parameters if p.dim() == 2]
    first = torch.optim.Muon(matrices, lr=0.02) if kind == "Muon" else torch.optim.SGD(matrices, lr=0.1, momentum=0.9)
    return [(first, 2.2), (make_optimizer([p for p in parameters if p.dim() != 2]), MAX_NORM)]


def train_pairs(kind: str, first: str, tolerance: float) -> tuple[int, int, int]:
    make_pairs = functools.partial(matrices_and_rest, first)
    trained = Trained(kind, "zb_h2", BAD, make_pairs=make_pairs, adaptive=False)
    _, expected, _ = plain_steps(2, 7, tuple(BAD.items()), make_pairs)
    assert_close(trained.weights, expected[-1], "after all steps", rtol=tolerance, atol=tolerance)
    return trained.counts


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize(
    ("kind", "first", "tolerance"),
    [
        ("ddp", "Muon", 1e-12),
        ("fsdp", "Muon", 0.02),  # its products are in bfloat16, and of shards they are rounded elsewhere
        pytest.param("fsdp", "SGD", 1e-12, marks=pytest.mark.slow),
    ],
)
def test_two_optimizers_of_replicas(four_ranks: Any, kind: str, first: str, tolerance: float) -> None:
    """One step is clipped by the norm of the matrices, three by the other one; what is not finite skips both."""
    counts = four_ranks.run(train_pairs, kind, first, tolerance)
    assert [count[0] for count in counts] == [4, 0, 4, 0]
    assert {count[1:] for count in counts} == {(4, 2)}


def train_small(kind: str, dtype: torch.dtype, policy: bool) -> tuple[int, int, int]:
    """Steps at once are steps that wait, bit for bit, below fp32, too."""
    wrapper = {}
    if policy:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        wrapper["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    at_once = Trained(kind, "zb_h2", BAD, dtype, wrapper, adaptive=False)
    waited = Trained(kind, "zb_h2", BAD, dtype, wrapper, undo=None)
    assert at_once.losses == waited.losses
    assert all(math.isfinite(loss) for loss in at_once.losses)
    for key, value in at_once.weights.items():
        assert torch.equal(value, waited.weights[key]), key
    return at_once.counts


@pytest.mark.parametrize(
    ("kind", "dtype", "policy"),
    [
        ("ddp", torch.bfloat16, False),
        ("fsdp", torch.bfloat16, False),
        ("fsdp", torch.float32, True),
    ],
)
@pytest.mark.slow
def test_small_dtypes_of_replicas(four_ranks: Any, kind: str, dtype: torch.dtype, policy: bool) -> None:
    results = four_ranks.run(train_small, kind, dtype, policy)
    assert [counts[0] for counts in results] == [3, 0, 3, 0]
    assert {counts[1:] for counts in results} == {(3, 2)}
