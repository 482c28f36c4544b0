"""Whether the tests of Triton kernels on a GPU can run here, and the marks that say so."""

from __future__ import annotations

import pytest
import torch

from zbkern.kernels import dispatch


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    reason = dispatch.why_not("linear", "triton", "cuda", torch.bfloat16)
    if reason is None:
        from zbkern.kernels.triton.common import INTERPRETED

        if INTERPRETED:
            reason = "this process interprets Triton kernels; `make test-gpu` compiles them"
    return reason


MARKS = [pytest.mark.gpu, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
