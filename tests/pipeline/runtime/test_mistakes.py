"""What a user does wrong in a step: what the error says, or a warning where it may be meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.chunks import needed, run_pipelines
from zbkern.pipeline import Pipeline, schedules
from zbkern.pipeline.transport.base import PipelineError


def test_a_chunk_of_another_width_says_what_arrived_and_from_where() -> None:
    step = lambda pipe: pipe.step(torch.ones(4, 6), torch.ones(4, 3))  # noqa: E731
    for error in run_pipelines(schedules.zb_h1(2, 2), [nn.Linear(6, 5), nn.Linear(6, 3)], step, keep_errors=True):
        assert "rank 1, action 1F0: RuntimeError: " in str(error)
        assert str(error).endswith("; its input, of chunk 0 on rank 0, was float32 [2, 5]")


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda output, target: nn.functional.nll_loss(output, target.long()), "RuntimeError"),
        (nn.MSELoss, "RuntimeError"),
        (lambda output: output.sum(), "TypeError"),
        (lambda output, target: output[:, int(target.max())].sum(), "IndexError"),
    ],
    ids=["labels", "class", "argument", "place"],
)
def test_an_error_in_the_loss_says_so_and_what_the_loss_got(loss_fn: Any, said: str) -> None:
    step = lambda pipe: pipe.step(torch.ones(4, 6), torch.full((4, 3), 9.0))  # noqa: E731
    chunks = [nn.Linear(6, 5), nn.Linear(5, 3)]
    for error in run_pipelines(schedules.zb_h1(2, 2), chunks, step, loss_fn, keep_errors=True):
        assert f"rank 1, action 1F0: {said}: " in str(error)
        assert str(error).endswith("; in loss_fn(output, target): output was float32 [2, 3], and target float32 [2, 3]")


def test_a_chunk_that_modifies_its_input_says_what_to_do() -> None:
    class InPlace(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.add_(1))

    step = lambda pipe: pipe.step(torch.ones(4, 6), torch.ones(4, 6))  # noqa: E731
    for error in run_pipelines(schedules.zb_h1(2, 2), [nn.Linear(6, 6), InPlace(6, 6)], step, keep_errors=True):
        assert str(error).endswith("; a chunk must not modify its input: let it change a clone")


def test_weights_on_the_meta_device_are_refused() -> None:
    chunks = [nn.Linear(6, 6), nn.Linear(6, 6, device="meta")]
    first, second = run_pipelines(schedules.zb_h1(2, 2), chunks, lambda pipe: None, keep_errors=True)
    assert str(second).startswith("Pipeline: chunk 1 must have its weights; 'weight' is on the meta device: ")
    assert isinstance(first, PipelineError)


def test_targets_of_one_row_for_several_of_inputs_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    chunks = [nn.Linear(6, 6), nn.Linear(6, 6)]
    for rows, noticed in ((8, False), (4, False), (2, True)):
        caplog.clear()
        step = lambda pipe, rows=rows: pipe.step(*needed(pipe, torch.ones(8, 6), torch.ones(rows, 6)))  # noqa: E731
        run_pipelines(schedules.zb_h1(2, 2), chunks, step, _sums)
        assert ("inputs have 8 rows and targets 2, which is one for a microbatch" in caplog.text) == noticed


def test_side_inputs_that_differ_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale

    for differ in (False, True):
        caplog.clear()

        def step(pipe: Pipeline, differ: bool = differ) -> None:
            scale = torch.arange(4.0)[:, None] + differ * pipe.rank
            pipe.step(torch.ones(4, 6), torch.ones(4, 6), side={"scale": scale})

        run_pipelines(schedules.zb_h1(2, 2), [Scaled(6, 6), Scaled(6, 6)], step)
        said = "the side inputs of ranks [0, 1] differ, and each rank's chunks take its own"
        assert (said in caplog.text) == differ


def test_what_is_no_tensor_is_named_in_short() -> None:
    step = lambda pipe: pipe.step(torch.ones(4000, 6).numpy(), None)  # noqa: E731
    error = run_pipelines(schedules.zb_h1(2, 2), [nn.Linear(6, 6), nn.Linear(6, 6)], step, keep_errors=True)[0]
    assert str(error).startswith("Pipeline.step: inputs must hold tensors with a batch dimension")
    assert len(str(error)) < 300


def _sums(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum() - target.sum()
