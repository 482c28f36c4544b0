"""W deferred, merged, and inside CUDA graphs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

import zbkern
from tests.support import needs_gpu
from zbkern import functional, testing
from zbkern.kernels import dispatch

pytestmark = [*needs_gpu.MARKS, pytest.mark.alone]

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    return dispatch.resolve("linear", "triton", "cuda", BF16)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def new_weight(n: int = 512, k: int = 256) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(random(n, k))
    weight.main_grad = torch.zeros(n, k, device="cuda")
    return weight


@pytest.mark.parametrize("merge", [True, False])
def test_deferred_layers_equal_float64(merge: bool) -> None:
    """Three microbatches of a two-layer model, W in another order than B, inputs freed in between."""
    torch.manual_seed(0)
    weights = [new_weight(512, 256), new_weight(128, 512)]
    expected = [torch.zeros_like(w.main_grad, dtype=torch.float64) for w in weights]
    queue = zbkern.WGradQueue(merge=merge)
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


def test_f_b_and_w_replay_from_graphs(launches: ModuleType) -> None:
    m, n, k = 512, 384, 256
    x, weight, dy = random(m, k), random(n, k), random(m, n)
    y, dx, dweight = random(m, n), random(m, k), torch.zeros(n, k, device="cuda")
    pieces = {
        "F": lambda: launches.linear_fwd(x, weight, None, y),
        "B": lambda: launches.linear_dgrad(dy, weight, dx),
        "W": lambda: launches.linear_wgrad([(x[:100], dy[:100]), (x[100:], dy[100:])], (dweight, None), True),
    }
    graphs = {}
    for name, piece in pieces.items():
        piece()  # compiles
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            piece()
    dweight.zero_()
    expected = torch.zeros(n, k, device="cuda", dtype=torch.float64)
    for _ in range(3):
        x.copy_(random(m, k)), dy.copy_(random(m, n))
        for result in (y, dx):
            result.fill_(float("nan"))
        for graph in graphs.values():
            graph.replay()
        expected += dy.double().t() @ x.double()
        testing.assert_close(y, x.double() @ weight.double().t(), "y")
        testing.assert_close(dx, dy.double() @ weight.double(), "dx")
    testing.assert_close(dweight, expected, "dweight")


def test_a_layer_with_its_queue_in_one_graph() -> None:
    weight = new_weight()
    x, dy = random(640, 256).requires_grad_(), random(640, 512)
    x.grad = torch.zeros_like(x)
    queue = zbkern.WGradQueue()

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
