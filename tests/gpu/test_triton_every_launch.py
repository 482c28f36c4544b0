"""Every Triton launch on a GPU: the same bits in every run, and from a CUDA graph whose inputs have changed since."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.support import every_launch, needs
from tests.support.launch_checks import Random
from zbkern.kernels import dispatch, spec

pytestmark = needs.GPU

NAMES = sorted({name for op, names in spec.OPS.items() for name in names} - {"norm_partials"})
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def case_of(launches: ModuleType, name: str, dtype: torch.dtype) -> every_launch.Case:
    reason = dispatch.why_not("float8", "triton", "cuda")
    if reason is not None and name in spec.OPS["float8"]:
        pytest.skip(reason)
    return every_launch.cases(launches, Random(dtype, "cuda", scale=0.3))[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_in_every_run(launches: ModuleType, name: str, dtype: torch.dtype) -> None:
    case_of(launches, name, dtype).check_repeats()


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_replays_on_new_inputs(launches: ModuleType, name: str) -> None:
    case_of(launches, name, torch.bfloat16).check_graph()
