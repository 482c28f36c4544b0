"""What the products of all kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from zbkern.kernels.triton.matmul_tile import precision


@pytest.fixture
def matmul(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Torch's settings, as they were afterwards."""
    # torch's own tests, which opcheck imports, forbid to set them, for good
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"


SETTINGS: dict[str, tuple[Callable[[object], None], str]] = {
    "nothing set": (lambda matmul: None, "tf32x3"),
    "highest": (lambda matmul: torch.set_float32_matmul_precision("highest"), "tf32x3"),
    "high": (lambda matmul: torch.set_float32_matmul_precision("high"), "tf32"),
    "medium": (lambda matmul: torch.set_float32_matmul_precision("medium"), "tf32"),
    "allow_tf32": (lambda matmul: setattr(matmul, "allow_tf32", True), "tf32"),
    "fp32_precision": (lambda matmul: setattr(matmul, "fp32_precision", "tf32"), "tf32"),
    "fp32_precision of everything": (lambda matmul: setattr(torch.backends, "fp32_precision", "tf32"), "tf32"),
    "fp32_precision ieee": (lambda matmul: setattr(matmul, "fp32_precision", "ieee"), "tf32x3"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_float32_is_multiplied_as_torch_may(matmul: object, setting: str) -> None:
    if setting.startswith("fp32_precision") and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    change, expected = SETTINGS[setting]
    change(matmul)
    assert precision(torch.float32) == expected
    assert precision(torch.bfloat16) == "ieee"
