"""What a first call inside a CUDA graph capture says, before anything is compiled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zbkern.kernels.spec import AttentionOptions
from zbkern.kernels.triton import attention_tiles as triton_attention_tiles
from zbkern.kernels.triton import linear as triton_linear


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_variant_that_is_not_compiled(capturing: None) -> None:
    with pytest.raises(RuntimeError, match=r"product: its first call .* run it once before capture"):
        triton_linear._product._launch(0, (1, 1, 1), (), ("never compiled",), 4, 1)


def test_a_table_is_kept_once_for_all_graphs(capturing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict = {}
    monkeypatch.setattr(triton_attention_tiles, "_CAPTURED", kept)
    for address in (1, 2, 1, 2):
        table = SimpleNamespace(data_ptr=lambda address=address: address, to=lambda *_, **__: "on the device")
        assert triton_attention_tiles._on_device(table, torch.device("cuda")) == "on the device"
    assert list(kept) == [1, 2]


def test_a_table_that_is_not_pinned(capturing: None) -> None:
    options = AttentionOptions(1.0, True, None, (0, 3, 10), (0, 3, 10))
    with pytest.raises(RuntimeError, match=r"attention .* run it once before capture"):
        triton_attention_tiles._table(options, "queries", 16, True)
    assert triton_attention_tiles._table(options, "queries", 16, False).shape[1] == 6
