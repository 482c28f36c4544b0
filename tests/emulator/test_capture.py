"""What cannot be captured in a CUDA graph says so."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from zbkern.kernels.spec import AttentionOptions
from zbkern.kernels.triton import attention_tiles as triton_attention_tiles
from zbkern.kernels.triton import linear as triton_linear


@pytest.fixture
def capturing(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, ends = torch.empty(10, 2, 16), torch.tensor([0, 3, 10])
    options = AttentionOptions(1.0, True, None, ends, ends)
    triton_attention_tiles.place_tiles(options, "queries", 16, q, q)  # which compiles
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_variant_that_is_not_compiled(capturing: None) -> None:
    with pytest.raises(RuntimeError, match=r"product: its first call .* run it once before capture"):
        triton_linear._product._launch(0, (1, 1, 1), (), ("never compiled",), 4, 1)


def test_lengths_of_the_host_are_refused_and_those_of_the_device_are_not(capturing: None) -> None:
    q = torch.randn(10, 2, 16)
    known = AttentionOptions(1.0, True, None, (0, 3, 10), (0, 3, 10))
    with pytest.raises(RuntimeError, match=r"attention: .* need cu_seqlens that are tensors on q's device"):
        triton_attention_tiles.place_tiles(known, "queries", 16, SimpleNamespace(device=torch.device("cuda")), q)  # type: ignore[arg-type]
    ends = torch.tensor(known.queries)
    _, tiles, _ = triton_attention_tiles.place_tiles(replace(known, queries=ends, keys=ends), "queries", 16, q, q)
    assert tiles == 3
