"""Which W run as one launch: those of one weight, and those of weights whose launch takes several."""

from __future__ import annotations

import pytest
import torch

import zbkern
from tests.support.queued import fill, recorder
from zbkern import wgrad
from zbkern.wgrad import grouping


@pytest.mark.parametrize(("merge", "expected"), [(True, [3, 3]), (False, [1] * 6)])
def test_merging_is_one_launch_per_weight(merge: bool, expected: list[int]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    launches: list[int] = []

    def run_many(layers, accumulate):
        assert merge
        for layer in layers:
            recorder(launches)(*layer, accumulate)

    queue = zbkern.WGradQueue(merge=merge)
    fill(queue, wgrad.WGradKernel(recorder(launches), run_many), parameters)
    assert queue.run() == 6
    assert launches == expected
    for parameter in parameters:
        assert parameter.grad.tolist() == [111.0, 111.0]


def test_run_one_takes_the_oldest_with_its_weight() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    queue = zbkern.WGradQueue()
    fill(queue, recorder([]), parameters)
    queue.run_one()
    assert parameters[0].grad.tolist() == [111.0, 111.0]
    assert parameters[1].grad is None
    queue.discard()
    queue = zbkern.WGradQueue(merge=False)
    fill(queue, recorder([]), [parameters[1]])
    queue.run_one()
    assert parameters[1].grad.tolist() == [1.0, 1.0]
    assert queue.discard() == 2


def test_weights_whose_launch_takes_several_share_it() -> None:
    """Those that are written and those that are added to apart, and never two groups with one parameter."""
    calls: list[tuple[int, bool]] = []

    def one(segments, outputs, accumulate):
        run_many([(segments, outputs)], accumulate)

    def run_many(layers, accumulate):
        calls.append((len(layers), accumulate))
        for segments, outputs in layers:
            recorder([])(segments, outputs, accumulate)

    kernel = wgrad.WGradKernel(one, run_many)
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    parameters[1].grad = torch.ones(2)
    queue = zbkern.WGradQueue()
    fill(queue, kernel, parameters)
    queue.run([0, 1])
    assert calls == [(3, False), (1, True)]
    queue.run()
    assert calls[2:] == [(4, True)]
    assert [parameter.grad[0].item() for parameter in parameters] == [111, 112, 111, 111]

    calls.clear()
    shared = (parameters[0],)
    queue.add(wgrad.WGradTask(kernel, (torch.ones(2),), shared))
    queue.add(wgrad.WGradTask(lambda *arguments: one(*arguments), (torch.ones(2),), (parameters[1],)))
    queue.add(wgrad.WGradTask(kernel, (torch.ones(2), torch.ones(2)), (parameters[0], parameters[2])))
    assert [len(batch) for batch, _ in grouping.batches(queue.tasks(), True)] == [1, 1, 1]
    tied = [task for task in queue.tasks() if task.kernel is kernel]
    assert [len(batch) for batch, _ in grouping.batches(tied, True)] == [1, 1]
    queue.discard()
