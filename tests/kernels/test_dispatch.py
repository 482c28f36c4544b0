"""Who runs what: named implementations run or say why not, and "auto" takes the first that can."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from zbkern.kernels import dispatch, reference, spec

TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture
def fresh():
    """The answers are remembered; these tests change what they depend on."""
    dispatch.why_not.cache_clear()
    dispatch.resolve.cache_clear()
    yield
    dispatch.why_not.cache_clear()
    dispatch.resolve.cache_clear()


@pytest.mark.parametrize("op", spec.OPS)
def test_resolution(op: str) -> None:
    for device in ("cpu", torch.device("cpu")):
        assert dispatch.resolve(op, "torch", device) is reference
        assert dispatch.resolve(op, "auto", device, torch.bfloat16) is reference
    with pytest.raises(dispatch.UnavailableError, match=rf"{op}: impl='cuda' cannot run on cpu: "):
        dispatch.resolve(op, "cuda", "cpu")
    with pytest.raises(dispatch.UnavailableError, match="choose from cuda, triton, torch"):
        dispatch.resolve(op, "fastest", "cpu")


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
def test_triton_says_why_not(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(device: str, dtype: torch.dtype = torch.bfloat16) -> str | None:
        dispatch.why_not.cache_clear()
        return dispatch.why_not("linear", "triton", device, dtype)

    assert "need a CUDA device" in reason("cpu")
    with monkeypatch.context() as interpreted:
        interpreted.setenv("TRITON_INTERPRET", "1")
        assert "unset TRITON_INTERPRET" in reason("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0 or later; this GPU has 7.5" in reason("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "8 bits need compute capability 8.9" in dispatch.why_not("float8", "triton", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert reason("cuda") is None or "lacks" in reason("cuda")
    assert "not float64" in reason("cuda", torch.float64)
    assert dispatch.resolve("linear", "auto", "cuda", torch.float64) is reference
    monkeypatch.setattr("triton.__version__", "3.5.1")
    assert "need Triton 3.6 or later, which comes with torch 2.10; this is 3.5.1" in reason("cuda")
    assert dispatch.resolve("attention", "auto", "cuda", torch.float16) is reference
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in reason("cuda")
    assert dispatch.resolve("linear", "auto", "cuda", torch.float16) is reference


def test_the_cuda_extension_borrows_the_kernels_that_it_lacks(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from zbkern.kernels.cuda import wgrad as cuda_wgrad

    dispatch._backend.cache_clear()
    monkeypatch.setitem(dispatch._FALLBACK_BACKEND, "cuda", "torch")  # which runs here
    monkeypatch.setattr(cuda_wgrad, "why_not", lambda device: None)
    backend = dispatch.resolve("linear", "cuda", "cuda", torch.bfloat16)
    assert backend.linear_wgrad is cuda_wgrad.linear_wgrad
    assert backend.linear_fwd is reference.linear_fwd
    assert dispatch.resolve("gated_mlp", "cuda", "cuda", torch.float16) is backend
    assert "nothing of its own for this" in dispatch.why_not("attention", "cuda", "cuda", torch.bfloat16)
    assert "not float32" in dispatch.why_not("linear", "cuda", "cuda", torch.float32)
    assert "need a CUDA device, not cpu" in dispatch.why_not("linear", "cuda", "cpu", torch.bfloat16)
    assert dispatch.resolve("linear", "auto", "cpu", torch.bfloat16) is reference
    dispatch._backend.cache_clear()


@pytest.fixture
def gpu(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A GPU on which each kernel only adds its name to a list."""
    ran: list[str] = []
    for name in ("cuda", "triton", "torch"):
        kernels = {
            kernel: lambda *some, label=f"{name} {kernel}", **__: ran.extend([label] if some[0] else [])
            for kernel in ("linear_fwd", "linear_dgrad", "linear_wgrad", "linear_wgrads")
        }
        monkeypatch.setitem(dispatch._MODULES, name, SimpleNamespace(**kernels))
    monkeypatch.setattr(dispatch, "_backend", lambda impl: dispatch._MODULES[impl])
    monkeypatch.setattr(dispatch, "why_not", lambda op, impl, device, dtype: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    dispatch._auto_backend.cache_clear()
    yield ran
    dispatch._auto_backend.cache_clear()


def test_auto_takes_matmuls_with_nothing_to_fuse_from_the_library(gpu: list[str]) -> None:
    backend = dispatch.resolve("linear", "auto", "cuda", torch.bfloat16)
    backend.linear_fwd("x", "weight", None, "y")
    backend.linear_fwd("x", "weight", None, "y", "gelu", "z")
    backend.linear_dgrad("dy", "weight", "dx")
    backend.linear_wgrad([("x", "dy")], (None, None), True)
    backend.linear_wgrads([([("x", "dy")], (None, None))], True)
    expected = ["torch linear_fwd", "triton linear_fwd", "torch linear_dgrad"]
    assert gpu == [*expected, "triton linear_wgrad", "triton linear_wgrads"]
    assert dispatch.resolve("linear", "triton", "cuda", torch.bfloat16) is dispatch._MODULES["triton"]


def test_on_10_auto_takes_w_over_one_segment_from_the_library(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until ours has been measured there: not what is merged, nor what leaves room for other streams."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    backend = dispatch.resolve("linear", "auto", "cuda", torch.bfloat16)
    one, two = [([("x", "dy")] * count, (None, None)) for count in (1, 2)]
    for layers, options, expected in (
        ([one], {}, ["torch linear_wgrads"]),
        ([one, two], {}, ["torch linear_wgrads", "triton linear_wgrads"]),
        ([one], {"max_tiles": 1}, ["triton linear_wgrads"]),
    ):
        gpu.clear()
        backend.linear_wgrads(layers, True, **options)
        assert gpu == expected
    gpu.clear()
    backend.linear_wgrad(*one, True), backend.linear_wgrad(*two, True)
    assert gpu == ["torch linear_wgrads", "triton linear_wgrads"]
