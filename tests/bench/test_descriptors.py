"""What the driver would refuse is found without one."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from bench import descriptors
from zbkern.kernels.triton import matmul_tile as triton_matmul_tile


def described(**changes: object) -> TensorDescriptor:
    memory = torch.empty(64 * 64 + 1, dtype=torch.bfloat16)
    start = 1 if changes.pop("unaligned", False) else 0
    values = {"shape": [60, 64], "strides": [64, 1], "block": [32, 64], **changes}
    return triton_matmul_tile.described(memory[start:], **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"unaligned": True}, "begins at 2 bytes after"),
        ({"strides": [60, 1]}, r"steps of \[120\] bytes"),
        ({"strides": [2**40, 1]}, "steps of"),
        ({"strides": [0, 1]}, "steps of"),
        ({"strides": [64, 2]}, "neighbours 2 apart"),
        ({"shape": [0, 64]}, "lengths"),
        ({"block": [32, 4]}, "blocks of 8 bytes"),
        ({"block": [64]}, "different lengths"),
    ],
)
def test_descriptors(changes: dict, fault: str | None) -> None:
    found = descriptors.faults([3, described(**changes), None])
    assert bool(found) == (fault is not None)
    if fault is not None:
        assert len(found) == 1
        assert re.search(fault, found[0])


def test_too_many_arguments() -> None:
    assert descriptors.faults([1] * 5000) == ["40000 bytes of arguments, more than 32764"]
