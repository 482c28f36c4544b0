"""W on a stream of its own: right whichever stream is late."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import zbkern
from tests.support.simulated_streams import Device, Event, Stream
from zbkern import wgrad


@pytest.fixture(scope="module", autouse=True)
def what_there_is_stays() -> None:
    """A collection in these tests need not visit it, which takes a fifth of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield Device(monkeypatch)
    gc.collect()  # queues that still hold something join their streams while these are simulated


class Training:
    """Steps of a layer with one weight, whose every piece of device work is late: B fills dy, W sums, a step reads.

    What the host frees, the main stream's next work gets: a tensor's memory outlives it, and is overwritten from there.
    """

    def __init__(self, device: Device, queue: zbkern.WGradQueue) -> None:
        self.device, self.queue = device, queue
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.memory: dict[int, Tensor] = {}
        self.count = 0
        self.read: list[list[float]] = []

    def backward(self) -> None:
        self.count += 1
        dy, memory, value = torch.empty(2), torch.full((2,), float("nan")), float(10**self.count)
        self.memory[id(dy)] = memory
        weakref.finalize(dy, self.device.main.work.append, lambda: memory.fill_(float("nan")) is memory)
        self.device.launch(lambda: memory.fill_(value))
        self.queue.add(wgrad.WGradTask(self.launch, (dy,), (self.weight,)), key=self.count)

    def launch(self, segments: list[tuple[Tensor, ...]], outputs: list[Tensor], accumulate: bool) -> None:
        addresses, out = [self.memory[id(dy)] for (dy,) in segments], outputs[0].data
        self.device.launch(lambda: out.add_(sum(addresses)) if accumulate else out.copy_(sum(addresses)))

    def step(self) -> None:
        gradient = self.weight.grad
        self.device.launch(lambda: self.read.append(gradient.tolist()))


@pytest.mark.parametrize("seed", range(60))
def test_gradients_are_right_whichever_stream_is_late(seed: int, device: Device) -> None:
    """W one by one, merged, or early within a limit of bytes; backwards on two streams. Before a step reads gradients,
    the queue runs all, joins, gets another stream, or ends."""
    rng, other = random.Random(seed), Stream("other")
    limit = rng.choice([None, 20, 4])  # two and a half W, and half of one
    training = Training(device, queue := zbkern.WGradQueue(limit, stream=device.side))
    expected, last = [], rng.randint(1, 6)
    for count in range(1, last + 1):
        with device.on(rng.choice([device.main, other]) if limit is None and not expected else device.main):
            training.backward()
        assert limit is None or queue.bytes <= limit
        if rng.random() < 0.4:
            queue.run(count)
        if rng.random() < 0.3 or count == last:
            how = rng.choice(["join", "stream", "end"])
            if queue.pending():
                queue.run()
            elif how == "join":
                queue.join()
            elif how == "stream" or count < last:
                queue.stream = None
                queue.stream = device.side
            else:
                training.queue = queue = None
                gc.collect()
            training.step()
            expected.append([sum(10.0**number for number in range(1, count + 1))] * 2)
    gc.collect()
    device.finish(rng.sample([device.side, device.main, other], 3))
    assert training.read == expected


def test_a_graph_that_is_captured_is_not_asked_how_far_it_is(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(device, queue := zbkern.WGradQueue(stream=device.side))
    training.backward()
    queue.run(1)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        capture.setattr(Event, "query", lambda self: pytest.fail("events of a graph have no state yet"))
        training.backward()
    queue.run()
    training.step()
    device.finish()
    assert training.read == [[110.0, 110.0]]


def test_tensors_go_once_the_host_sees_that_w_has_ended(device: Device) -> None:
    training = Training(device, queue := zbkern.WGradQueue(stream=device.side))
    training.backward()
    queue.run(1)
    assert queue.pending() == 0
    assert queue.bytes == 8  # W runs
    training.backward()
    assert queue.bytes == 16
    device.finish()
    training.backward()
    assert queue.bytes == 16  # of the second and third microbatch
    queue.run([2, 3])
    queue.join()
    assert queue.bytes == 0
    device.finish()
    assert training.weight.grad.tolist() == [1110.0, 1110.0]


def test_what_is_allocated_or_zeroed_for_w_is_ordered_before_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new gradient may get memory that earlier work of the current stream still uses."""
    training = Training(device, zbkern.WGradQueue(stream=device.side))
    training.backward()
    order: list[str] = []
    device.launch(lambda: order.append("last use of freed memory"))
    task = training.queue.tasks()[0]
    task.kernel = wgrad.WGradKernel(lambda segments, outputs, accumulate: device.launch(lambda: order.append("W")))
    training.queue.run(1)
    device.finish((device.side, device.main))
    assert order == ["last use of freed memory", "W"]


def test_gradients_with_hooks_are_computed_on_the_current_stream(device: Device) -> None:
    training = Training(device, zbkern.WGradQueue(stream=device.side))
    training.backward()
    training.queue.run(1)  # beside
    device.finish()
    training.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    used: list[str] = []
    training.backward()
    device.finish()
    task = training.queue.tasks()[0]

    def launch(segments: list[tuple[Tensor, ...]], outputs: list[Tensor], accumulate: bool) -> None:
        used.append(device.current.name)
        outputs[0].fill_(100.0)

    task.kernel = wgrad.WGradKernel(launch)
    training.queue.run(2)
    assert used == ["main"]
    assert training.weight.grad.tolist() == [110.0, 110.0]


@pytest.mark.parametrize("why", ["a hook", "a sparse gradient"])
def test_gradients_that_the_current_stream_adds_wait_for_w(
    why: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, waits = Training(device, zbkern.WGradQueue(stream=device.side)), []
    monkeypatch.setattr(device.main, "wait_event", waits.append)
    training.backward()
    training.queue.run(1)
    assert not waits
    if why == "a hook":
        training.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    else:
        training.weight.grad = torch.zeros(2).to_sparse()
    training.backward()
    training.queue.run(2)
    assert len(waits) == 1


def test_listeners_are_called_in_the_order_of_w(device: Device) -> None:
    training = Training(device, zbkern.WGradQueue(stream=device.side))
    seen: list[list[float]] = []
    training.queue.listeners.append(
        lambda tasks: device.launch(lambda: seen.append(tasks[0].parameters[0].grad.tolist()))
    )
    training.backward()
    training.queue.run(1)
    device.finish()
    assert seen == [[10.0, 10.0]]


def test_a_stream_is_set_before_w_waits(device: Device) -> None:
    queue = zbkern.WGradQueue()
    assert queue.stream is None
    queue.stream = device.side
    assert queue.stream is device.side
    Training(device, queue).backward()
    with pytest.raises(RuntimeError, match=r"1 W are pending.*run\(\) or discard\(\) them first"):
        queue.stream = None
    queue.discard()
    queue.stream = None


def test_blocks_end_early_where_the_launch_can_do_that(device: Device) -> None:
    training = Training(device, zbkern.WGradQueue(stream=device.side))
    seen: list[dict] = []

    def launch(segments: list[tuple[Tensor, ...]], outputs: list[Tensor], accumulate: bool) -> None:
        training.launch(segments, outputs, accumulate)

    def run_many(layers: list[tuple], accumulate: bool, **options: int) -> None:
        seen.append(options)
        for segments, outputs in layers:
            launch(segments, outputs, accumulate)

    for stream in (device.side, None):
        training.queue.stream = stream
        training.backward()
        training.queue.tasks()[0].kernel = wgrad.WGradKernel(launch, run_many)
        training.queue.run()
        device.finish()
    assert seen == [{"max_tiles": 1}]  # on the current stream nothing else waits for multiprocessors
    assert training.weight.grad.tolist() == [110.0, 110.0]
