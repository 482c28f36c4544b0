"""Chunks that hold experts, run by a Pipeline: gradients equal one process, and the experts' W waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.expert_parallel import TOP_K, WIDTH, block
from zbkern.pipeline import Pipeline, schedules
from zbkern.pipeline.transport.local import LocalTransport

MICROBATCHES = 4


class Layer(nn.Module):
    """A linear of torch's and experts: an ExpertParallel, or zbkern.nn.Experts whose tokens this forward sorts."""

    def __init__(self, number: int, parallel: bool) -> None:
        super().__init__()
        self.experts = block(1, 0)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(number)
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.double)
            for parameter in self.experts.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        if not parallel:
            self.router, self.experts = self.experts.router, self.experts.experts

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if isinstance(self.experts, zbkern.nn.ExpertParallel):
            return x + self.experts(y)
        tokens = y.flatten(0, -2)
        scores, chosen = self.router(tokens).topk(TOP_K)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.experts.num_experts)
        outputs = self.experts(tokens[order // TOP_K], counts) * scores.softmax(-1).flatten()[order, None]
        return x + torch.zeros_like(tokens).index_add(0, order // TOP_K, outputs).view_as(x)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(2, 2 * MICROBATCHES, 5, WIDTH, dtype=torch.double, generator=generator)
    return inputs, targets


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
@pytest.mark.parametrize("parallel", [True, False], ids=["ExpertParallel", "Experts"])
def test_w_of_experts_waits_in_a_pipeline(parallel: bool, schedule: str) -> None:
    plan = getattr(schedules, schedule)(2, MICROBATCHES)
    plain = nn.Sequential(*(Layer(number, parallel) for number in range(len(plan.placement))))
    inputs, targets = data()
    expected = nn.functional.mse_loss(plain(inputs), targets)
    expected.backward()
    made = {number: zbkern.convert(Layer(number, parallel)) for number in range(len(plan.placement))}

    def of_rank(transport: LocalTransport) -> tuple[float | None, dict[int, nn.Module], set[int]]:
        chunks = {number: made[number] for number in plan.chunks_of(transport.rank)}
        waited: set[int] = set()
        with Pipeline(chunks.values(), plan, nn.functional.mse_loss, transport, timeout=60) as pipe:
            pipe.queue.listeners.append(lambda tasks: waited.update(id(p) for task in tasks for p in task.parameters))
            loss = pipe.step(inputs, targets)
        return None if loss is None else loss.item(), chunks, waited

    results = results_on_threads(2, of_rank)
    assert [loss for loss, _, _ in results if loss is not None] == [pytest.approx(expected.item(), rel=1e-12)]
    for _, chunks, waited in results:
        for number, chunk in chunks.items():
            wanted = gradients(plain[number])
            assert gradients(chunk).keys() == wanted.keys()
            for name, gradient in gradients(chunk).items():
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12, msg=name)
            assert [name for name, p in chunk.named_parameters() if id(p) not in waited] == []
