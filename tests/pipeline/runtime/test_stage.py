from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zbkern
from tests.support.chunks import needed, one_rank, results_on_threads, run_pipelines
from tests.support.schedules import saved_in_turn, with_actions
from zbkern.pipeline import Pipeline, PipelineError, schedules
from zbkern.pipeline.transport.local import LocalTransport

ONES = torch.ones(4, 2)


class Calls(nn.Module):
    """A layer around which a function of the test does the rest."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = zbkern.convert(nn.Linear(2, 2))
        self._function = function

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._function(self.layer, *arguments, **keywords)


@dataclasses.dataclass
class State:
    x: torch.Tensor
    mask: torch.Tensor | None = None


torch.utils._pytree.register_dataclass(State)  # as torch.export.register_dataclass does


class Takes(nn.Module):
    """One tensor, nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = zbkern.convert(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("masked", [True, False])
def test_chunks_pass_on_dataclasses(masked: bool) -> None:
    """As nodes of torch's trees, which leave out what is None, as the gradient of a mask is."""

    def chunks() -> list[Any]:
        torch.manual_seed(0)
        first = Calls(lambda layer, x: State(layer(x), x > 0 if masked else None))
        second = Calls(lambda layer, state: State(layer(state.x), state.mask))
        return [first, second, Calls(lambda layer, state: layer(state.x) * (1 if state.mask is None else state.mask))]

    whole, parts, x = chunks(), chunks(), torch.randn(4, 2)
    run_pipelines(schedules.zb_h1(3, 2), parts, lambda pipe: pipe.step(x, ONES))
    output: Any = x
    for chunk in whole:
        output = chunk(output)
    nn.functional.mse_loss(output, ONES).backward()
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.layer.weight.grad, other.layer.weight.grad)


def step(*modules: nn.Module, loss_fn: Any = nn.functional.mse_loss, inputs: Any = ONES) -> Any:
    with one_rank(modules, schedules.zb_v(1, 2), loss_fn) as pipe:
        return pipe.step(inputs, ONES)


def _raise(error: Exception) -> Any:
    raise error


CALLED = r"2 positional .* 3 were given; its input, of chunk 0 on rank 0, was float32 \[2, 2\], float"


@pytest.mark.parametrize(
    ("first", "last", "loss_fn", "message"),
    [
        (lambda y: (y, y), None, None, CALLED),
        (lambda y: None, None, None, "chunk 0 must return at least one tensor; got none: is there a return"),
        (lambda y: (), None, None, "chunk 0 must return at least one tensor"),
        (lambda y: (y, 1), None, None, r"chunk 0 must return tensors \(or None\) for the next chunk.*got 1 among"),
        (lambda y: y.to_sparse(), None, None, r"chunk 0 must return dense tensors .*got torch.sparse_coo: call .to_de"),
        (None, lambda y: _raise(TypeError("mine")), None, "action 1F0: TypeError: mine"),
        (None, lambda y: None, None, "chunk 1 must return what loss_fn takes; got None: is there a return"),
        (None, None, lambda y, target: {"loss": y.mean()}, "must return the loss alone, .*; got dict"),
        (None, None, lambda y, target: y.mean().item(), r"a tensor of one number without .item\(\); got float"),
        (None, None, lambda y, target: y - target, r"a tensor of one number .*; got shape \[2, 2\]"),
        (None, None, lambda y, target: y.mean().detach(), "got one that is detached"),
    ],
)
def test_what_chunks_and_losses_must_not_return_is_told(first: Any, last: Any, loss_fn: Any, message: str) -> None:
    chunks = [
        Takes() if returned is None else Calls(lambda layer, x, r=returned: r(layer(x))) for returned in (first, last)
    ]
    with pytest.raises(PipelineError, match=message):
        step(*chunks, loss_fn=loss_fn or nn.functional.mse_loss)


def test_arguments_may_be_left_out_of_a_batch() -> None:
    seen = []

    def forward(layer: nn.Module, x: torch.Tensor, mask: Any) -> torch.Tensor:
        seen.append((x.shape[0], mask))
        return layer(x)

    step(Calls(forward), Takes(), inputs={"x": ONES, "mask": None})
    assert seen == [(2, None)] * 2


@pytest.mark.parametrize("frozen", [False, True])
def test_a_chunk_that_its_own_forward_cuts_off_is_told_once(caplog: pytest.LogCaptureFixture, frozen: bool) -> None:
    cut = Calls(lambda layer, x: layer(x).detach()).requires_grad_(not frozen)
    run_pipelines(schedules.zb_h1(2, 2), [cut, Takes()], lambda pipe: [pipe.step(ONES, ONES) for _ in range(2)])
    told = [record.getMessage().split(",")[0] for record in caplog.records]
    assert told == ([] if frozen else ["chunk 0: its parameters get no gradient"])


class Conjugate(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.complex(super().forward(x), x)
        return z.conj(), z.conj().imag  # torch notes on the tensors that they are a conjugate, and negative


class Parts(nn.Linear):
    def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(z.conj().imag * 2 + z.real + y)


def conjugates_step() -> None:
    rank = torch.distributed.get_rank()
    model = nn.ModuleList([Conjugate(2, 2), Parts(2, 2)])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.randn(4, 2, generator=generator)
    expected = copy.deepcopy(model)
    nn.functional.mse_loss(expected[1](*expected[0](x)), x).backward()
    with Pipeline(zbkern.convert(model[rank]), schedules.zb_h1(2, 2), nn.functional.mse_loss) as pipe:
        pipe.step(x if rank == 0 else None, x if rank == 1 else None)
    torch.testing.assert_close(model[rank].weight.grad, expected[rank].weight.grad)


@pytest.mark.dist
def test_conjugates_over_gloo(two_ranks: Any) -> None:
    two_ranks.run(conjugates_step)


class InFlight(torch.autograd.Function):
    """x, and its gradient, as a collective gives them that nobody has waited for: wrappers without memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert type(gradient) is torch.Tensor
        return AsyncCollectiveTensor(gradient.clone())


class BetweenCollectives(nn.Module):
    def __init__(self, collective: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self._collective = collective

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert type(x) is type(y) is torch.Tensor
        product = self._collective(x) * self._collective(self.weight)
        return self._collective(product), self._collective(y * y)


def sum_of_squares(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return ((outputs[0] + outputs[1] - target) ** 2).sum()


def step_between_collectives(transport: LocalTransport | None, offload: bool) -> None:
    """One microbatch: a second one would add its gradient to the first one's, in memory."""
    schedule = schedules.zb_h1(2, 1)
    if offload:
        schedule = with_actions(schedule, saved_in_turn("copied"))
    inputs, target = (ONES, 2 * ONES), 3 * ONES
    model = nn.ModuleList(BetweenCollectives(lambda x: x) for _ in range(2))
    model[1].weight = model[0].weight
    sum_of_squares(model[1](*model[0](*inputs)), target).backward()
    chunk = BetweenCollectives(InFlight.apply)
    with Pipeline(chunk, schedule, sum_of_squares, transport, tied={"weight": chunk.weight}, timeout=60) as pipe:
        pipe.step(*needed(pipe, inputs, target))
    torch.testing.assert_close(chunk.weight.grad + 0, model[0].weight.grad)


@pytest.mark.dist
@pytest.mark.parametrize("offload", [False, True])
def test_what_a_collective_brings_is_sent_once_it_is_there(two_ranks: Any, offload: bool) -> None:
    results_on_threads(2, lambda transport: step_between_collectives(transport, offload))
    two_ranks.run(step_between_collectives, None, offload)


def tensor_parallel_step() -> list[str]:
    """What the log says of a converted chunk whose parameters are DTensors."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    chunk = zbkern.convert(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)))
    parallelize_module(chunk, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return said_of(chunk)


def said_of(chunk: nn.Module) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zbkern").addHandler(handler)
    try:
        with one_rank(chunk, schedules.zb_h1(1, 2)) as pipe:
            pipe.step(ONES, ONES)
    finally:
        logging.getLogger("zbkern").removeHandler(handler)
    return said


@pytest.mark.dist
def test_w_of_a_converted_chunk_of_dtensors_waits(two_ranks: Any) -> None:
    assert two_ranks.run(tensor_parallel_step) == [[], []]


def test_a_warning_of_a_chunk_whose_layers_cannot_wait_names_what_says_why() -> None:
    (warning,) = said_of(nn.utils.parametrizations.weight_norm(zbkern.nn.Linear(2, 2)))
    assert "zbkern.unconverted and zbkern.coverage say why (docs/gradients.md)" in warning
