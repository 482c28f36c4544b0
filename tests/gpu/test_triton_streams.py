"""W deferred, merged, beside other work and inside CUDA graphs. A stream is held up where an event must do its work;
without that event the result is wrong, so each test is also run without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

import zbkern
from tests.support import needs
from zbkern import functional, testing, wgrad
from zbkern.ops.functions import linear as linear_functions
from zbkern.wgrad import side_stream

pytestmark = [*needs.GPU, pytest.mark.alone]

LONG = 200_000_000  # cycles, about a tenth of a second: longer than the host needs for what it does meanwhile
BF16 = torch.bfloat16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def new_weight(n: int = 512, k: int = 256) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(random(n, k))
    weight.main_grad = torch.zeros(n, k, device="cuda")
    return weight


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("merge", [True, False])
def test_deferred_layers_equal_float64(merge: bool, own_stream: bool) -> None:
    """Three microbatches of a two-layer model, W in another order than B, inputs freed in between."""
    torch.manual_seed(0)
    weights = [new_weight(512, 256), new_weight(128, 512)]
    expected = [torch.zeros_like(w.main_grad, dtype=torch.float64) for w in weights]
    queue = zbkern.WGradQueue(merge=merge, stream=torch.cuda.Stream() if own_stream else None)
    for key in range(3):
        x, dy = random(300 + key, 256), random(300 + key, 128)
        with queue.defer(key):
            h = functional.linear(x, weights[0], impl="triton")
            functional.linear(h, weights[1], impl="triton").backward(dy)
        expected[1] += dy.double().t() @ h.detach().double()
        dh = (dy.double() @ weights[1].detach().double()).to(BF16)
        expected[0] += dh.double().t() @ x.double()
        del x, dy, h, dh
    queue.run([2, 0])
    junk = [random(300 + key, 256).fill_(float("nan")) for key in range(3)]  # takes what was freed
    queue.run()
    for weight, wanted in zip(weights, expected, strict=True):
        testing.assert_close(weight.main_grad, wanted, "main_grad", tolerance=1e-2)  # dh is rounded to bf16
    assert len(junk) == 3


@contextlib.contextmanager
def without(what: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    launch = side_stream.SideStream.launch
    with monkeypatch.context() as patch:
        if what == "the event after B":
            patch.setattr(
                side_stream.SideStream, "launch", lambda self, f, ready_events, held: launch(self, f, (), held)
            )
        elif what == "the event after W":
            patch.setattr(side_stream.SideStream, "join", lambda self: self.take_finished())
        elif what == "holding tensors":
            patch.setattr(
                side_stream.SideStream, "launch", lambda self, f, ready_events, held: launch(self, f, ready_events, ())
            )
        yield


def delayed(launches: ModuleType, late: str) -> tuple[Tensor, Tensor, bool]:
    """(gradient as the current stream sees it after join, expected, whether memory of W's was given to another tensor),
    with one stream held up at the wrong moment."""
    queue = zbkern.WGradQueue(stream=torch.cuda.Stream())
    weight = new_weight()
    values = random(1024, 256), random(1024, 512)
    expected = values[1].double().t() @ values[0].double()
    warm(launches, values)
    torch.cuda.empty_cache()
    x, dy = (torch.full_like(value, float("nan")) for value in values)
    torch.cuda.synchronize()
    if late == "main":
        torch.cuda._sleep(LONG)
    x.copy_(values[0])  # what F and B compute
    dy.copy_(values[1])
    queue.add(wgrad.WGradTask(linear_functions.linear_wgrad(launches), (x, dy), (weight, None)), key=0)
    if late == "side":
        with torch.cuda.stream(queue.stream):
            torch.cuda._sleep(LONG)
    queue.run(0)
    given = [extent(x), extent(dy)]
    del x, dy
    junk = [torch.full_like(value, float("nan")) for _ in range(16) for value in values]  # all that is free, and more
    queue.join()
    got = weight.main_grad.clone()
    torch.cuda.synchronize()
    return got, expected, any(a < d and c < b for a, b in given for c, d in map(extent, junk))


def extent(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def warm(launches: ModuleType, values: tuple[Tensor, Tensor]) -> None:
    """Compiles, which takes longer than any stream is held up."""
    queue = zbkern.WGradQueue(stream=torch.cuda.Stream())
    queue.add(wgrad.WGradTask(linear_functions.linear_wgrad(launches), values, (new_weight(), None)), key=0)
    queue.run()
    torch.cuda.synchronize()


@pytest.mark.parametrize("late", ["main", "side"])
def test_events_order_w(launches: ModuleType, late: str) -> None:
    got, expected, reused = delayed(launches, late)
    testing.assert_close(got, expected, "dweight")
    assert not reused


@pytest.mark.parametrize(
    ("missing", "late"), [("the event after B", "main"), ("the event after W", "side"), ("holding tensors", "side")]
)
def test_removing_one_breaks_it(launches: ModuleType, missing: str, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with without(missing, monkeypatch):
        got, expected, reused = delayed(launches, late)
    assert reused == (missing == "holding tensors")
    with pytest.raises(AssertionError):
        testing.assert_close(got, expected, "dweight")


def test_w_runs_beside_the_current_stream(launches: ModuleType) -> None:
    """Its end comes while the current stream is still held up."""
    queue = zbkern.WGradQueue(stream=torch.cuda.Stream())
    weight = new_weight()
    x, dy = random(512, 256), random(512, 512)
    warm(launches, (x, dy))
    queue.add(wgrad.WGradTask(linear_functions.linear_wgrad(launches), (x, dy), (weight, None)), key=0)
    torch.cuda.synchronize()
    torch.cuda._sleep(5 * LONG)
    main = torch.cuda.current_stream().record_event()
    queue.run(0)
    queue.stream.synchronize()
    assert not main.query()
    assert queue.bytes > 0
    torch.cuda.synchronize()
    queue.join()
    assert queue.bytes == 0
    testing.assert_close(weight.main_grad, dy.double().t() @ x.double(), "dweight")


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_layer_with_its_queue_in_one_graph(own_stream: bool) -> None:
    weight = new_weight()
    x, dy = random(640, 256).requires_grad_(), random(640, 512)
    x.grad = torch.zeros_like(x)
    queue = zbkern.WGradQueue(stream=torch.cuda.Stream() if own_stream else None)

    def step() -> None:
        with queue.defer():
            functional.linear(x, weight, impl="triton").backward(dy)
        queue.run()

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    weight.main_grad.zero_(), x.grad.zero_()
    for _ in range(2):
        graph.replay()
    testing.assert_close(weight.main_grad, 2 * (dy.double().t() @ x.detach().double()), "main_grad")
    testing.assert_close(x.grad, 2 * (dy.double() @ weight.detach().double()), "dx")
