"""Compiled kernels against the reference in float64, without a race, an access beside memory, or a deadlock.

The cases that matter most run always, every launch for each target as a slow test, all of cases.py by
`make emulate`.
"""

from __future__ import annotations

import itertools

import pytest

from tests.emulator.cases import DTYPES, cases, faults

MATTER = {
    (90, "bf16"): (
        *("linear_fwd act 200x136x264 plain", "linear_fwd z without activation", "linear_wgrads 3 seg add"),
        *("linear_dgrad 200x136x264 transposed", "linear_wgrad 1 seg 200x136x264 odd"),
        "linear_wgrad 4 seg 260x520x328 plain to float32 add bias large tiles",
        *("linear_dgrad_sum 200x136x264 plain", "gated_linear silu", "grouped_linear 136x264", "grouped_gated 256"),
        *("attention 128 causal", "attention 64 device ends", "attention 64 short window softcap sinks"),
        *("attention 128 one key", "attention 256 one key", "cross_entropy [130, 0, 29] 500x72 smoothing 0.1"),
        *("norm layer 3x63 plain weighted added", "rotary 3x65x7x80 20 odd"),
        *("float8 40x700 float8_e4m3fn transposed", "float8 77x1030 float8_e5m2 odd 7 parts"),
    ),
    (90, "fp16"): ("attention 64 short window softcap sinks", "attention 128 one key", "attention 256 one key"),
    (90, "fp32"): ("linear_wgrad 1 seg 200x136x264 transposed to float32 add bias", "float8 edges float8_e4m3fn"),
    (80, "bf16"): (
        *("linear_fwd act 200x136x264 plain", "linear_wgrad 4 seg 200x136x264 plain to float32 add bias"),
        *("grouped_linear 256x128", "attention 64 packed heads"),
    ),
    (100, "bf16"): (
        *("linear_fwd 63x129x65", "linear_wgrad 4 seg 200x136x264 plain to bfloat16 add bias"),
    ),
}  # fmt: skip

PRODUCTS = (
    *("linear_fwd act 260x520x328 mixed", "linear_dgrad 260x520x328 plain", "linear_dgrad_sum 260x520x328 plain"),
    *("linear_wgrad 4 seg 260x520x328 mixed to float32 add", "linear_wgrads 2x4 aligned bias", "linear_wgrads 8"),
    *("gated_linear plain bias", "grouped_linear 264x264 add", "grouped_gated 136 interleaved"),
    *("cross_entropy [57] 8001x64 smoothing 0.0 bias", "attention 128 packed heads", "attention 256 window"),
    *("attention 64 softcap sinks", "adversarial special"),
)  # fmt: skip
"""A launch each at least, by their names' beginnings."""

ROWS = (
    *("activation_fwd silu odd", "activation_bwd gelu odd", "gated_fwd silu odd"),
    *("gated_bwd silu odd", "norm rms 41x4096 plain weighted", "norm layer 5x20000 odd weighted added"),
    *("rotary 2x50x4x128 64 plain interleaved", "embedding [400, 100, 400] 100 768 add 0"),
    *("repeats float8_amax", "repeats float8_cast"),
)  # fmt: skip
"""Launches without products: their code for sm_120 is that for sm_100."""

ALSO_IN_BF16 = {"fp16 attention 128 one key", "fp16 attention 256 one key"}  # which sees the same faults
CASES = [
    pytest.param(
        *(*key, name),
        id=f"sm_{key[0]} {key[1]} {name}",
        marks=[pytest.mark.slow] if f"{key[1]} {name}" in ALSO_IN_BF16 else [],
    )
    for key, names in MATTER.items()
    for name in names
]


@pytest.mark.parametrize(("capability", "dtype", "name"), CASES)
def test_what_matters(capability: int, dtype: str, name: str) -> None:
    (case, *_) = (case for case in cases(capability, DTYPES[dtype]) if case.name.startswith(name))
    found, launched, _ = faults(case, capability, [0])
    assert not found
    assert launched


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "name"),
    [*itertools.product((80, 90, 100, 120), PRODUCTS), *itertools.product((80, 90, 100), ROWS)],
)
def test_every_launch(capability: int, name: str) -> None:
    matching = [case for case in cases(capability, DTYPES["bf16"]) if case.name.startswith(name)]
    if not matching:
        pytest.skip(f"sm_{capability} has no {name}")
    found, launched, _ = faults(matching[0], capability, [1])
    assert not found
    assert launched
