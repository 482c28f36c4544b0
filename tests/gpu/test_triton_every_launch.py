"""Every Triton launch on a GPU: the same bits in every run, and from a CUDA graph whose inputs have changed since."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.support import every_launch, needs_gpu
from tests.support.launch_checks import Random
from zbkern.kernels import dispatch, spec

pytestmark = needs_gpu.MARKS

NAMES = sorted({name for op, names in spec.OPS.items() for name in names} - {"norm_partials"})
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    return dispatch.resolve("linear", "triton", "cuda", torch.bfloat16)


def case_of(launches: ModuleType, name: str, dtype: torch.dtype) -> every_launch.Case:
    return every_launch.cases(launches, Random(dtype, "cuda", scale=0.3), 1000, 528, 784)[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_in_every_run(launches: ModuleType, name: str, dtype: torch.dtype) -> None:
    case = case_of(launches, name, dtype)
    first = case.results()
    assert all(result.isfinite().all() for result in first)
    for _ in range(3):
        assert all(torch.equal(one, two) for one, two in zip(case.results(), first, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_replays_on_new_inputs(launches: ModuleType, name: str) -> None:
    case = case_of(launches, name, torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.results()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for factor in (1.0, -0.5):
        for tensor in case.inputs:
            tensor.mul_(factor)
        expected = case.results()
        for output in case.outputs:
            output.fill_(case.start)
        graph.replay()
        assert all(torch.equal(got, wanted) for got, wanted in zip(case.outputs, expected, strict=True))
