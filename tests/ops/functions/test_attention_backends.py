"""What impl="auto" runs attention through: the order, the reasons, and the arguments that other packages get."""

from __future__ import annotations

import sys
import types
from itertools import pairwise

import pytest
import torch

from zbkern import info, testing
from zbkern.kernels import reference
from zbkern.kernels.spec import AttentionOptions
from zbkern.ops.functions import attention_backends as paths
from zbkern.ops.functions.attention import attention_with_torch


@pytest.fixture(autouse=True)
def an_h100_with_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(paths, "_why_not_installed", lambda core: "not installed")
    for can_use in ("can_use_cudnn_attention", "can_use_flash_attention"):  # some builds need a GPU to answer
        monkeypatch.setattr(torch.backends.cuda, can_use, lambda parameters: True)


def case(
    ends: tuple[int, ...] | None = None,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    size: int = 8,
    keys: int = 6,
    softcap: float | None = None,
    ours: types.ModuleType | None = reference,
) -> paths.Case:
    torch.manual_seed(0)
    shapes = ((2, 6), (2, keys)) if ends is None else ((ends[-1],), (ends[-1],))
    q, k, v = (torch.randn(*shapes[heads == 2], heads, size).to(dtype) for heads in (4, 2, 2))
    options = AttentionOptions(0.3, causal, window, ends or (0, 6, 12), ends or (0, keys, 2 * keys), softcap)
    return paths.Case(q, k, v[..., :size], options, None, ours)


CHOSEN = [
    ({}, "torch cudnn"),
    ({"window": 3}, "triton"),
    ({"ends": (0, 4, 12)}, "triton"),
    ({"keys": 7}, "triton"),
    ({"keys": 7, "causal": False}, "torch cudnn"),
    ({"keys": 0}, "triton"),
    ({"softcap": 2.0}, "triton"),
    ({"window": 3, "ours": None}, "torch"),
    ({"size": 512, "ends": (0, 4, 12)}, "torch"),
    ({"dtype": torch.float32}, "torch"),
    ({"dtype": torch.float32, "ends": (0, 4, 12)}, "triton"),
    ({"dtype": torch.float32, "ends": (0, 4, 12), "size": 129}, "torch"),
    ({"ends": (0, 4, 12), "size": 129}, "triton"),
]


@pytest.mark.parametrize(("given", "core"), CHOSEN)
def test_the_first_core_that_takes_the_case(given: dict, core: str) -> None:
    assert paths.cores(case(**given))[0] == core


def test_the_order_follows_the_gpu_and_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, core in (((8, 6), "torch flash"), ((12, 0), "torch cudnn")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert paths.cores(case())[0] == core
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert paths.cores(case())[0] == "triton"
    monkeypatch.setattr(paths, "_why_not_installed", lambda core: None)
    assert paths.cores(case(window=3, ends=(0, 4, 12)))[0] == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert paths.cores(case())[0] == "flash_attn 3"
    assert paths.cores(case(size=100, window=3))[0] == "triton"
    assert "  not triton: it has no compiler" in paths.lines("cuda", "it has no compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert any("attention\n  impl='auto' on cuda\n  half precisions" in text for text in info._ops())


def attend(given: paths.Case) -> None:
    """fastest() on the CPU, as if it were an H100, gives what attention in torch gives."""
    wide = attention_with_torch(None, *(t.double() for t in given[:3]), given.options)
    testing.assert_close(paths.fastest(given), wide)


class FlashAttention(types.ModuleType):
    """Stands in for the package: attention by its arguments, one sequence at a time."""

    def flash_attn_func(self, q, k, v, *, softmax_scale, causal, window_size, deterministic):
        self.deterministic = deterministic
        self.window_size = window_size
        starts = [tuple(range(0, (t.shape[0] + 1) * t.shape[1], t.shape[1])) for t in (q, k)]
        window = None if window_size == (-1, -1) else window_size[0] + 1
        assert window_size[1] == (-1 if window is None else 0)
        return attention_with_torch(None, q, k, v, AttentionOptions(softmax_scale, causal, window, *starts))

    def flash_attn_varlen_func(self, q, k, v, cu_q, cu_k, max_q, max_k, **arguments):
        assert cu_q.dtype == cu_k.dtype == torch.int32
        for ends, longest in ((cu_q, max_q), (cu_k, max_k)):
            assert longest == max(b - a for a, b in pairwise(ends.tolist()))
        parts = [
            self.flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **arguments)[0]
            for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
        ]
        return torch.cat(parts), None  # as its versions of 2025, with the log-sum-exp


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("ends", [None, (0, 4, 5, 12)])
def test_an_installed_flash_attention_gets_the_right_arguments(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...] | None, window: int | None
) -> None:
    package = FlashAttention("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setattr(paths, "_why_not_installed", lambda core: None)
    attend(case(ends, window=window))
    assert package.window_size == ((-1, -1) if window is None else (2, 0))
    assert package.deterministic is False


def test_ours_and_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, asked = [], []
    ours = types.ModuleType("ours")
    ours.attention_fwd = lambda *a: (calls.append("fwd"), reference.attention_fwd(*a))
    ours.attention_dgrad = reference.attention_dgrad
    attend(case((0, 5, 12), ours=ours))
    assert calls == ["fwd"]
    attend(case((0, 5, 12), ours=None))
    assert calls == ["fwd"]
    # what torch's core declines, the next in order runs
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda given: bool(asked.append(given)))
    attend(case(ours=ours))
    assert calls == ["fwd", "fwd"]
    assert asked[0].query.shape == (2, 4, 6, 8)
    assert asked[0].key.shape == (2, 2, 6, 8)
    assert asked[0].is_causal
    assert asked[0].enable_gqa
