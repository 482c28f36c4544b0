"""What is chosen where all tokens are chosen alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zbkern.pipeline.runtime.slices.alike import Alike

CHOICES: dict[str, tuple[Callable[[Tensor], Any], list[list[int]]]] = {
    "topk": (lambda x: x.topk(2).indices, [[0, 2], [1, 2]]),
    "topk along a dimension": (lambda x: torch.topk(x, 1, 0)[1], [[0, 1, 0]]),
    "topk with names": (lambda x: torch.topk(input=x, k=1, dim=-1).indices, [[0], [1]]),
    "argmax": (lambda x: x.argmax(-1, keepdim=True), [[0], [1]]),
    "argmin": (lambda x: torch.argmin(x, dim=0)[None], [[0, 1, 0]]),
    "max": (lambda x: x.max(1).indices[:, None], [[0], [1]]),
    "min": (lambda x: torch.min(x, dim=1, keepdim=True).indices, [[0], [1]]),
    "of all numbers": (lambda x: x.argmax(keepdim=True), [[2]]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_first_that_no_mask_has_taken_out(name: str) -> None:
    choose, expected = CHOICES[name]
    x = torch.tensor([[1.0, -torch.inf, 3.0], [torch.finfo(torch.float32).min, 1.0, 2.0]])
    alike = Alike(None, 2)
    alike.begin((0, 2), [x], [])
    with alike:
        found = choose(x)
    assert found.tolist() == expected


def test_what_has_only_the_shape_of_data_is_compared_as_it_is() -> None:
    """A mask of tokens that are chosen begins with zeros of their shape."""
    x = torch.tensor([[1.0, 2.0, 3.0]])
    alike = Alike(3, 3)
    alike.begin((0, 3), [x], [])
    with alike:
        chosen = torch.zeros_like(x).scatter(-1, x.topk(2).indices, 1.0)
        assert (chosen == 0).tolist() == [[False, False, True]]
        assert (x == 0).tolist() == [[True, True, True]]
