"""The checks of launches that the GPU's tests use, tried on the reference itself: they pass, and can fail."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch

from tests.support import launch_checks, row_checks
from zbkern.kernels import reference, spec

FP32 = torch.float32
GATE = spec.GateOptions(interleaved=True, limit=1.0, alpha=1.702, offset=1.0)
PLAIN, FULL = spec.CrossEntropyOptions(), spec.CrossEntropyOptions(3, 0.1, 1e-3, 5)


def random(kind: str = "normal", dtype: torch.dtype = FP32) -> launch_checks.Random:
    return launch_checks.Random(dtype, "cpu", kind=kind)


CHECKS = {
    "linear_fwd": lambda launches: launch_checks.linear_fwd(launches, random(), 9, 8, 7, bias=True, activation="silu"),
    "linear_dgrad": lambda launches: launch_checks.linear_dgrad(launches, random(), 9, 8, 7),
    "linear_dgrad_sum": lambda launches: launch_checks.linear_dgrad_sum(launches, random(), 9, [8, 3], 7),
    "linear_wgrad": lambda launches: launch_checks.linear_wgrad(launches, random(), [3, 0, 9], 8, 7),
    "linear_wgrads": lambda launches: launch_checks.linear_wgrads(launches, random(), [(8, 7, [3, 4]), (6, 1, [0])]),
    "gated_linear_fwd": lambda launches: launch_checks.gated_linear(launches, random(), 9, 8, 7, 5, bias=True),
    "gated_linear_dgrad": lambda launches: launch_checks.gated_linear(launches, random(), 9, 8, 7, 5),
    "grouped_linear_fwd": lambda launches: launch_checks.grouped_linear(launches, random(), [[3, 0, 5]], 8, 7),
    "grouped_linear_dgrad": lambda launches: launch_checks.grouped_linear(launches, random(), [[3, 0, 5]], 8, 7),
    "grouped_linear_wgrad": lambda launches: launch_checks.grouped_linear(launches, random(), [[3, 0], [1, 2]], 8, 7),
    "grouped_gated_fwd": lambda launches: launch_checks.grouped_gated(launches, random(), [3, 0, 5], 8, 7, 4, GATE),
    "grouped_gated_dgrad": lambda launches: launch_checks.grouped_gated(launches, random(), [3, 0, 5], 8, 7, 4, GATE),
    "norm_fwd": lambda launches: row_checks.norm(launches, random(), 5, 40, False, layout="odd", added=True),
    "norm_dgrad": lambda launches: row_checks.norm(launches, random(), 5, 40, True, added=True),
    "norm_wgrad": lambda launches: row_checks.norm(launches, random(), 5, 40, True),
    **{
        name: lambda launches, name=name: row_checks.elementwise(launches, random(), name, "gelu", 5, 40, "odd")
        for name in row_checks.ELEMENTWISE
    },
    "rotary_fwd": lambda launches: row_checks.rotary(launches, random(), (2, 3, 5, 8), 3, False),
    "rotary_dgrad": lambda launches: row_checks.rotary(launches, random(), (2, 3, 5, 8), 4, True, layout="odd"),
    "embedding_fwd": lambda launches: row_checks.embedding(launches, random(), [30], 9, 8),
    "embedding_wgrad": lambda launches: row_checks.embedding(launches, random(), [30, 4], 9, 8, True, 2),
    "cross_entropy_fwd": lambda launches: row_checks.cross_entropy(launches, random(), [12, 3], 30, 8, PLAIN, True),
    "cross_entropy_wgrad": lambda launches: row_checks.cross_entropy(
        launches, random(), [12, 3], 30, 8, FULL, True, True
    ),
    "float8_amax": lambda launches: row_checks.float8(launches, random(), 5, 40, torch.float8_e5m2, parts=3),
    "float8_cast": lambda launches: row_checks.float8(launches, random(), 5, 40, torch.float8_e4m3fn, True),
}


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Those in nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


def wrong(name: str) -> types.SimpleNamespace:
    """The reference, but one element of the last output of that launch is off."""
    launches = types.SimpleNamespace(**{launch: getattr(reference, launch) for launch in (*CHECKS, "norm_partials")})
    right = getattr(reference, name)

    def broken(*arguments, **options) -> None:  # type: ignore[no-untyped-def]
        right(*arguments, **options)
        last = [tensor for tensor in tensors(arguments) if tensor.is_floating_point()][-1]
        last[(0,) * last.dim()] += 100.0

    setattr(launches, name, broken)
    return launches


@pytest.mark.parametrize("name", CHECKS)
def test_the_reference_passes(name: str) -> None:
    CHECKS[name](reference)


@pytest.mark.parametrize("name", CHECKS)
def test_one_wrong_element_fails(name: str) -> None:
    with pytest.raises(AssertionError):
        CHECKS[name](wrong(name))


def test_every_launch_has_a_check() -> None:
    elsewhere = {"attention_fwd", "attention_dgrad", "norm_partials"}  # attention_checks.py
    assert set(spec.KERNELS) - elsewhere <= CHECKS.keys()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", launch_checks.KINDS)
def test_hostile_values_are_what_they_say(kind: str, dtype: torch.dtype) -> None:
    make = random(kind, dtype)
    first, second = make(64, 64), make(64, 64)
    finite = first.isfinite().all()
    assert bool(finite) == (kind != "special")
    if kind == "denormal":
        smallest = torch.finfo(dtype).smallest_normal
        assert first.abs().max() < smallest
        assert first.abs().max() > 0
        assert second.abs().max() > 100
        assert (first.double() @ second.double()).abs().max() > 1e-12
    if kind == "large":
        assert (first.float() @ second.float()).isfinite().all()
        assert first.double().abs().amax(1).max() / first.double().abs().amax(1).min() > 50
