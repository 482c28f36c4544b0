"""Side inputs: every chunk gets its microbatch's, gradients are those of one process, and ranks must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import needed, one_rank, run_pipelines
from zbkern.pipeline import Pipeline, PipelineError, profile, schedules
from zbkern.pipeline.runtime.batch import identity
from zbkern.pipeline.transport.local import LocalTransport


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(x)) * mask[:, None]
        return y if scale is None else y * scale[:, None]


def model_and_batch(rows: int = 8) -> tuple[list[nn.Module], Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    x, targets = torch.randn(2, rows, 4, dtype=torch.double)
    side = {"mask": (torch.arange(rows) % 3).double(), "scale": torch.rand(rows, dtype=torch.double)}
    return [Masked().double() for _ in range(4)], x, targets, side


@pytest.mark.parametrize(
    ("change", "called"),
    [
        (lambda side: {"mask": side["mask"]}, "step with side mask (8 rows)"),
        (lambda side: {**side, "scale": None}, "step with side mask (8 rows)"),
        (lambda side: None, "step"),
        # of one row each, which every chunk takes as the same for all rows
        (
            lambda side: {name: value[:4] for name, value in side.items()},
            "step with side mask (4 rows), scale (4 rows)",
        ),
        (
            lambda side: [{"mask": side["mask"][:2], "scale": side["scale"][:2]}] * 3 + [{"mask": side["mask"][:2]}],
            "step with side mask (8 rows), scale (2+2+2+0 rows)",
        ),
    ],
)
def test_ranks_with_other_side_inputs_are_refused(change: Callable[[dict[str, Tensor]], Any], called: str) -> None:
    model, x, targets, side = model_and_batch()
    plain = f"step with side mask (8 rows), scale (8 rows) on rank 0 and {called} on rank 1"

    def step(pipe: Pipeline) -> Any:
        try:
            pipe.step(x, targets, change(side) if pipe.rank else side)
        except PipelineError as error:
            return str(error), pipe.step(x, targets, side)  # nothing is lost
        return "no error", None

    found = run_pipelines(schedules.zb_h1(2, 4), model, step, timeout=60)
    for message, _ in found:
        assert plain in message
    assert [loss is not None for _, loss in found] == [False, True]


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (torch.ones(8), "side must be {name: tensor}"),
        ({"mask": torch.ones(7)}, "dimension 0 of side must be a multiple of the 4"),
        (
            {"mask": torch.ones(4)},
            r"\['mask'\] of side must have as many rows as inputs, or be a list of microbatches",
        ),
        ([{}] * 3, "side is a list of 3 microbatches"),
        ([torch.ones(2)] * 4, "side must be {name: tensor}"),
        ({"other": torch.ones(8)}, "unexpected keyword argument 'other'"),
    ],
)
def test_bad_side_inputs_name_the_argument(side: Any, message: str) -> None:
    pipe = one_rank(nn.Linear(4, 4), schedules.one_f_one_b(1, 4))
    with pipe, pytest.raises((TypeError, ValueError, PipelineError), match=message):
        pipe.step(torch.ones(8, 4), torch.ones(8, 4), side)


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("how", ["side", "list", "batch"])
def test_a_side_input_that_takes_a_gradient_is_refused(how: str, leaf: bool) -> None:
    """Every rank would be left with a part of it; one rank alone has all of it."""
    prompt = nn.Parameter(torch.ones(8))
    mask = prompt if leaf else 2 * prompt

    class Split(Masked):
        def split_batch(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            return {"x": batch["x"]}, {"mask": batch["mask"]}

    def call(pipe: Pipeline) -> Any:
        x = torch.ones(8, 4)
        with torch.no_grad():
            pipe.evaluate(x, x, {"mask": mask})
        side = {"mask": mask} if how == "side" else [{"mask": part} for part in mask.chunk(4)]
        if how == "batch":
            return pipe.step({"x": x, "mask": mask}, x)
        return pipe.step(x, x, side)

    kind = Split if how == "batch" else Masked
    for error in run_pipelines(schedules.zb_h1(2, 4), [kind(), kind()], call, keep_errors=True):
        assert "side input 'mask' takes a gradient, of which every rank would get the part of its own" in str(error)
    if how == "side" and leaf:
        run_pipelines(schedules.zb_h1(1, 4), [Masked()], call)
        assert prompt.grad is not None


@pytest.mark.parametrize("named", [False, True])
def test_ranks_with_other_batches_are_told_once(caplog: pytest.LogCaptureFixture, named: bool) -> None:
    """As by a loader that gives every rank other rows; but not where ranks that need none pass None."""
    _, x, targets, _ = model_and_batch()

    def steps(pipe: Pipeline, all_given: bool) -> None:
        rows = torch.arange(8).roll(pipe.rank)
        inputs = {"input": x[rows]} if named and pipe.rank == 0 else x[rows]
        for _ in range(2):
            pipe.step(*((inputs, targets) if all_given else needed(pipe, inputs, targets)))

    layers = [nn.Linear(4, 4).double() for _ in range(2)]
    for given in (True, False):
        run_pipelines(schedules.zb_h1(2, 4), layers, lambda pipe, given=given: steps(pipe, given))
    (said,) = [record.getMessage() for record in caplog.records if "differ" in record.getMessage()]
    assert said.startswith("Pipeline.step: the inputs of ranks [0, 1] differ")


@pytest.mark.parametrize(("apart", "calls"), [(1, ["evaluate", *["step"] * 2]), (2, ["step"] * 4), (3, ["step"] * 5)])
def test_batches_that_differ_later_are_told_of(caplog: pytest.LogCaptureFixture, apart: int, calls: list[str]) -> None:
    """As where ranks draw rows from their default generators, which dropout on some of them moves apart; or where a
    step is not the first call. apart: the first step whose batch differs."""
    _, x, targets, _ = model_and_batch()

    def run(pipe: Pipeline) -> None:
        steps = 0
        for call in calls:
            steps += call == "step"
            differs = pipe.rank * (steps >= apart)
            getattr(pipe, call)(x.roll(differs, 0), targets.roll(differs, 0))

    run_pipelines(schedules.zb_h1(2, 4), [nn.Linear(4, 4).double() for _ in range(2)], run)
    said = [record.getMessage() for record in caplog.records if "differ" in record.getMessage()]
    assert [each.split(" of ")[0] for each in said] == ["Pipeline.step: the inputs", "Pipeline.step: the targets"]
    assert "a generator of its own" in said[0]


def test_conjugates_and_nested_tensors_are_compared_or_left_out() -> None:
    """In any batch: an error of one rank here would be none of the others."""
    numbers = torch.randn(4, 2, dtype=torch.complex128)
    assert identity(numbers.conj()) == identity(numbers.conj().resolve_conj()) != identity(numbers)
    assert identity([torch.nested.nested_tensor([torch.ones(2)])]) == b""


def test_costs_do_not_count_side_inputs() -> None:
    """They are on every rank anyway: what a microbatch holds is the same, however large they are."""
    found = []
    for width in (1, 1000):

        class Wide(nn.Linear):
            def forward(self, x: Tensor, side: Tensor) -> Tensor:  # type: ignore[override]
                return super().forward(x) * side[:, :1]

        costs = profile(
            zbkern.convert(Wide(4, 4)),
            [0],
            nn.functional.mse_loss,
            torch.ones(8, 4),
            torch.ones(8, 4),
            group=LocalTransport.ring(1)[0],
            side={"side": torch.ones(8, width)},
        )
        found.append(costs.activation)
    assert found[0] == found[1]
