"""What impl="auto" runs attention through: the order, the reasons, and the arguments that other packages get."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from zbkern import info, testing
from zbkern.kernels import dispatch, reference
from zbkern.kernels.spec import AttentionOptions
from zbkern.ops.functions import attention_backends as paths
from zbkern.ops.functions.attention import attention_with_torch

USUAL = paths.Case((9, 0), torch.bfloat16, 128, True, False, False, True, False)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(paths, "_why_not_installed", lambda name: "not installed")
    caches = paths._announce, dispatch.why_not, dispatch.resolve
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def chosen(case: paths.Case, why_not_ours: str | None = None) -> str:
    return next(name for name, reason in paths.explain(case, why_not_ours) if reason is None)


def test_the_order_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(USUAL) == "torch cudnn"
    assert chosen(replace(USUAL, capability=(8, 6))) == "torch flash"
    assert chosen(replace(USUAL, capability=(12, 0))) == "torch cudnn"
    for change in ({"window": True}, {"packed": True}, {"square": False}, {"deterministic": True}, {"empty": True}):
        assert chosen(replace(USUAL, **change)) == "triton"
    assert chosen(replace(USUAL, window=True), "no kernels") == "torch"
    assert chosen(replace(USUAL, size=512, packed=True)) == "torch"
    assert chosen(replace(USUAL, dtype=torch.float32)) == "torch"
    assert chosen(replace(USUAL, dtype=torch.float32, packed=True)) == "triton"
    assert chosen(replace(USUAL, dtype=torch.float32, packed=True, size=256)) == "triton"
    assert chosen(replace(USUAL, dtype=torch.float32, packed=True, size=257)) == "torch"
    monkeypatch.setattr(paths, "_why_not_installed", lambda name: None)
    assert chosen(USUAL) == "flash_attn 3"
    assert chosen(replace(USUAL, capability=(8, 0), window=True, packed=True)) == "flash_attn 2"
    assert chosen(replace(USUAL, size=100, packed=True)) == "triton"


def test_info_says_which_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    lines = paths.lines("cuda", "it has no compiler")
    assert lines[0] == "  bf16, causal, heads of 128: through torch cudnn (not measured by us yet)"
    assert "  not triton: it has no compiler" in lines
    assert "  not flash_attn 3: not installed" in lines
    assert "  float32 with a window: through torch" in lines
    assert paths.lines("cuda", None)[-1] == "  float32 with a window: through triton"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert any("attention\n  impl='auto' on cuda\n  bf16, causal" in text for text in info._ops())


def attend(monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...] | None, window: int | None, **given: object) -> None:
    """fastest() on the CPU, as if it were an H100, gives what attention in torch gives."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    torch.manual_seed(0)
    shape = (2, 6) if ends is None else (ends[-1],)
    q, k, v = (torch.randn(*shape, heads, 8).to(torch.bfloat16) for heads in (4, 2, 2))
    options = AttentionOptions(0.3, True, window, ends or (0, 6, 12), ends or (0, 6, 12))
    y = paths.fastest(q, k, v, options, **given)
    testing.assert_close(y, attention_with_torch(q.double(), k.double(), v.double(), options))


class FlashAttention(types.ModuleType):
    """Stands in for the package: attention by its arguments, one sequence at a time."""

    def flash_attn_func(self, q, k, v, *, softmax_scale, causal, window_size, deterministic):
        self.deterministic = deterministic
        self.window_size = window_size
        starts = [tuple(range(0, (t.shape[0] + 1) * t.shape[1], t.shape[1])) for t in (q, k)]
        window = None if window_size == (-1, -1) else window_size[0] + 1
        assert window_size[1] == (-1 if window is None else 0)
        return attention_with_torch(q, k, v, AttentionOptions(softmax_scale, causal, window, *starts))

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
    monkeypatch.setattr(paths, "_why_not_installed", lambda name: None)
    attend(monkeypatch, ends, window, ours=reference, why_not_ours=None)
    assert package.window_size == ((-1, -1) if window is None else (2, 0))
    assert package.deterministic is False


def test_ours_and_torchs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls = []
    ours = types.ModuleType("ours")
    ours.attention_fwd = lambda *a: (calls.append("fwd"), reference.attention_fwd(*a))
    ours.attention_dgrad = reference.attention_dgrad
    with caplog.at_level(logging.INFO, "zbkern"):
        attend(monkeypatch, (0, 5, 12), None, ours=ours, why_not_ours=None)
        attend(monkeypatch, (0, 5, 12), None, ours=ours, why_not_ours=None)
    assert calls == ["fwd", "fwd"]
    assert len(caplog.records) == 1  # once per case
    assert "through triton; not flash_attn 3: not installed; not torch cudnn: it would run" in caplog.text
    attend(monkeypatch, (0, 5, 12), None, ours=None, why_not_ours="no")
    assert len(calls) == 2
    # what torch's core declines, the next in order runs; torch is not asked: some of its builds need a GPU to answer
    asked = []
    monkeypatch.setattr(
        torch.backends.cuda, "can_use_cudnn_attention", lambda parameters: bool(asked.append(parameters))
    )
    attend(monkeypatch, None, None, ours=ours, why_not_ours=None)
    assert len(calls) == 3
    (parameters,) = asked
    assert parameters.query.shape == (2, 4, 6, 8)
    assert parameters.key.shape == (2, 2, 6, 8)
    assert parameters.is_causal
    assert parameters.enable_gqa
