"""The other Triton launches on a GPU against float64: norms, elementwise, embedding, cross-entropy, attention."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch

from tests.support import attention_checks, needs_gpu
from tests.support import row_checks as checks
from zbkern.kernels import dispatch, spec

pytestmark = needs_gpu.MARKS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.set_float32_matmul_precision("highest")


def launches_of(op: str, dtype: torch.dtype = torch.bfloat16) -> ModuleType:
    reason = dispatch.why_not(op, "triton", "cuda", dtype)
    if reason is not None:
        pytest.skip(reason)
    return dispatch.resolve(op, "triton", "cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["plain", "odd", "transposed"])
@pytest.mark.parametrize("centered", [False, True])
def test_norms(centered: bool, layout: str, dtype: torch.dtype) -> None:
    launches = launches_of("layer_norm" if centered else "rms_norm", dtype)
    for rows, features in ((1, 1), (3, 63), (777, 1024), (4100, 4096), (5, 20000)):
        for weighted, added in ((True, False), (False, False), (True, True)):
            checks.norm(launches, checks.Random(dtype, "cuda"), rows, features, centered, weighted, layout, added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "special"])
@pytest.mark.parametrize("activation", spec.ACTIVATIONS)
@pytest.mark.parametrize("name", checks.ELEMENTWISE)
def test_elementwise(name: str, activation: str, kind: str, dtype: torch.dtype) -> None:
    launches = launches_of("linear", dtype)
    for layout in ("plain", "odd", "transposed"):
        checks.elementwise(launches, checks.Random(dtype, "cuda", kind=kind), name, activation, 130, 1025, layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["plain", "odd", "transposed"])
def test_rotary(layout: str, interleaved: bool, dtype: torch.dtype) -> None:
    launches = launches_of("rotary", dtype)
    for shape, half in (((2, 500, 32, 128), 64), ((1, 3, 1, 1), 0), ((3, 65, 7, 80), 20), ((1, 9, 40, 256), 32)):
        checks.rotary(launches, checks.Random(dtype, "cuda"), shape, half, interleaved, half != 20, layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_embedding(accumulate: bool, dtype: torch.dtype) -> None:
    launches = launches_of("embedding", dtype)
    for rows, vocabulary, features in (([1], 1, 1), ([0], 5, 64), ([4096, 100, 4096], 1000, 768), ([513], 50257, 130)):
        for padding_idx in (None, 0):
            random = checks.Random(dtype, "cuda")
            checks.embedding(launches, random, rows, vocabulary, features, accumulate, padding_idx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        spec.CrossEntropyOptions(),
        spec.CrossEntropyOptions(ignore_index=3, label_smoothing=0.1, z_loss=1e-3, chunk=100, softcap=5.0),
    ],
    ids=["plain", "all options"],
)
def test_cross_entropy(options: spec.CrossEntropyOptions, dtype: torch.dtype) -> None:
    launches = launches_of("linear_cross_entropy", dtype)
    for rows, vocabulary, features, bias in (
        ([5], 7, 16, True),
        ([300, 0, 129], 1000, 264, False),
        ([257], 32001, 512, True),
    ):
        random = checks.Random(dtype, "cuda", scale=0.2)
        checks.cross_entropy(launches, random, rows, vocabulary, features, options, bias, accumulate=bias)


@pytest.mark.parametrize(
    ("size", "dtype"), [*itertools.product((64, 96, 128), DTYPES), (256, torch.bfloat16), (256, torch.float16)]
)
@pytest.mark.parametrize(
    "arguments",
    [
        {"queries": [1000]},
        {"queries": [333, 1, 0, 640], "heads": (8, 2)},
        {"queries": [200, 65], "keys": [300, 129]},
        {"queries": [129, 400], "keys": [500, 30], "causal": False},
        {"queries": [900], "window": 100},
    ],
    ids=str,
)
def test_attention(arguments: dict, size: int, dtype: torch.dtype) -> None:
    launches = launches_of("attention", dtype)
    attention_checks.attention(launches, dtype, **arguments, size=size, device="cuda")


@pytest.mark.parametrize("layout", attention_checks.LAYOUTS)
def test_attention_layouts(layout: str) -> None:
    launches = launches_of("attention")
    attention_checks.attention(launches, torch.bfloat16, [300], layouts=(layout,) * 3, size=128, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["large", "special"])
def test_hostile_values(kind: str, dtype: torch.dtype) -> None:
    checks.adversarial(launches_of("linear", dtype), dtype, "cuda", kind, 300, 520)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_values_in_attention(dtype: torch.dtype) -> None:
    launches = launches_of("attention", dtype)
    for ends in ((0, 250, 500), (0, 200, 500)):
        attention_checks.nan_stays_in_its_sequence(launches, dtype, ends, "cuda")
    attention_checks.large_scores_do_not_overflow(launches, dtype, "cuda")
