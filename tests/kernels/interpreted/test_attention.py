"""Triton attention in the interpreter against the reference in float64, in tiles so small that every edge is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.support import attention_checks as checks
from tests.support.examples import examples
from zbkern.kernels import tiles
from zbkern.kernels.spec import AttentionOptions
from zbkern.kernels.triton import attention_forward as triton_attention_forward
from zbkern.kernels.triton import kernels as triton_kernels

DTYPES = [torch.float32, torch.float16]


def in_both(arguments: list[dict], more: Sequence[dict] = ()) -> list:
    """Every case in both dtypes; not slow are the first list's, each in one of the dtypes, by turns."""
    return [
        pytest.param(
            case, dtype, id=f"{case}-{number}", marks=() if quick and index % 2 == number else pytest.mark.slow
        )
        for quick, cases in ((True, arguments), (False, more))
        for index, case in enumerate(cases)
        for number, dtype in enumerate(DTYPES)
    ]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one holds 32 queries the other streams 16, so a line's padding is met; dk and dv apart for large heads."""

    def choose(launch: str, size: int, *_: object) -> tiles.AttentionTile:
        tile = tiles.AttentionTile(32, 16, 4, 1)
        return replace(tile, queries=16, keys=32, split=size > 64) if launch == "dkdv" else tile

    monkeypatch.setattr(tiles, "attention", choose)


@pytest.mark.parametrize(
    ("size", "dtype"), [*((size, dtype) for size in (64, 96, 128) for dtype in DTYPES), (256, torch.float16)]
)
def test_head_sizes(size: int, dtype: torch.dtype) -> None:
    checks.attention(triton_kernels, dtype, [35], heads=(1, 1), size=size)


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    in_both(
        [
            {"queries": [31], "keys": [33], "causal": False},
            {"queries": [33, 33], "keys": [16, 16], "heads": (2, 1)},  # the first queries see nothing
            {"queries": [17, 17], "keys": [50, 50], "heads": (2, 1), "window": 20},
            {"queries": [40], "window": 1},
            {"queries": [1, 0, 33, 16], "heads": (2, 1)},
            {"queries": [1, 0, 33, 16], "keys": [20, 3, 0, 18], "causal": False},
            {"queries": [40, 3], "keys": [20, 17], "window": 7},
            {"queries": [33], "scale": -0.3},
            {"queries": [18], "scale": 0.0},
            {"queries": [20], "size": 1},
        ]
    ),
)
def test_masks_and_sequences(arguments: dict, dtype: torch.dtype) -> None:
    checks.attention(triton_kernels, dtype, **{"size": 16, **arguments})


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    in_both(
        [
            {"queries": [40, 3], "softcap": 0.5},
            {"queries": [33, 33], "keys": [16, 16], "sinks": True},
            {"queries": [35], "size": 24, "value_size": 16},
            {"queries": [17, 17], "keys": [50, 50], "size": 16, "value_size": 40},
            {"queries": [0, 0], "beyond": 5, "sinks": True},
            {"queries": [1, 0, 33, 16, 0], "keys": [20, 3, 0, 18, 2], "causal": False, "beyond": 40},
            {"queries": [40, 3], "keys": [20, 17], "window": 7, "beyond": 1, "softcap": 1.5, "value_size": 8},
        ],
        [
            {"queries": [33], "softcap": 2.0, "scale": -0.7, "causal": False},
            {"queries": [20], "softcap": 1.0, "scale": 0.0, "sinks": True},
            {"queries": [40, 3], "window": 5, "softcap": 3.0, "sinks": True, "value_size": 20},
            {"queries": [1, 0, 33, 16], "beyond": 0},
            {"queries": [33, 33], "beyond": 20, "sinks": True},
        ],
    ),
)
def test_caps_sinks_values_of_another_size_and_lengths_on_the_device(arguments: dict, dtype: torch.dtype) -> None:
    checks.attention(triton_kernels, dtype, **{"size": 16, "heads": (4, 2), **arguments})


@pytest.mark.parametrize(
    "layout", [x if x in ("plain", "odd") else pytest.param(x, marks=pytest.mark.slow) for x in checks.LAYOUTS]
)
def test_layouts(layout: str) -> None:
    """By descriptor where the tensors allow it, by pointers elsewhere."""
    others = checks.LAYOUTS[checks.LAYOUTS.index(layout) - 1], layout
    checks.attention(triton_kernels, torch.float16, [19, 19], heads=(4, 2), size=24, layouts=(layout, *others))
    checks.attention(triton_kernels, torch.float16, [19, 5], heads=(4, 2), size=24, layouts=(layout, layout, "plain"))


lengths = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33])


@examples(6, 40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(lengths, lengths), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    st.sampled_from([8, 16, 40]),
    st.sampled_from([None, 1, 5, 30]),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_any_lengths(
    pairs: list[tuple[int, int]],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    causal: bool,
    dtype: torch.dtype,
) -> None:
    queries, keys = zip(*pairs, strict=True)
    checks.attention(triton_kernels, dtype, queries, keys, heads, size, causal, window if causal else None)


def test_before_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs before 9.0."""
    monkeypatch.setattr(triton_attention_forward, "capability_of", lambda device: 80)
    checks.attention(triton_kernels, torch.float16, [33, 33], heads=(2, 1), size=16, window=20)
    checks.attention(triton_kernels, torch.float16, [33, 7], heads=(2, 1), size=24)


@pytest.mark.parametrize("ends", [(0, 25, 50), (0, 20, 50)], ids=["batched", "packed"])
def test_nan_stays_in_its_sequence(ends: tuple[int, ...]) -> None:
    checks.nan_stays_in_its_sequence(triton_kernels, torch.float32, ends, "cpu")


def test_large_scores_do_not_overflow() -> None:
    checks.large_scores_do_not_overflow(triton_kernels, torch.float32, "cpu")


def test_too_large_heads_are_refused() -> None:
    options = AttentionOptions(1.0, True, None, (0, 2), (0, 2))
    for most, dtype in ((256, torch.float16), (128, torch.float32)):
        q = torch.empty(2, 1, most + 1, dtype=dtype)
        with pytest.raises(ValueError, match=f"heads of up to {most} in {dtype}; got {most + 1}; use impl='torch'"):
            triton_kernels.attention_fwd(q, q, q, options, q, torch.empty(1, 2))
