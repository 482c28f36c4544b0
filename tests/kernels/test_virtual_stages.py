"""What a session compiles ahead for the stages on one GPU is what they launch."""

from __future__ import annotations

from collections.abc import Iterable
from unittest import mock

import pytest
import torch

from bench import virtual_stages
from build_tools.kernels import jobs
from tests.emulator.gpu import gpu
from zbkern.kernels import dispatch
from zbkern.kernels.triton import kernels
from zbkern.pipeline import schedules

WIDTH, TOKENS, MICROBATCHES = 64, 32, 8


def variants(found: Iterable[jobs.CompileJob]) -> set[str]:
    return {repr(job) for job in found}


def test_what_is_prepared_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = [virtual_stages.Block(WIDTH).bfloat16() for _ in range(2 * virtual_stages.STAGES)]
    x, target = torch.randn(2, MICROBATCHES * TOKENS, WIDTH, dtype=torch.bfloat16)
    monkeypatch.setattr(virtual_stages.Runner, "_check", lambda *arguments: None)  # nothing is computed
    candidates = {
        "ZB-H1": (schedules.zb_h1(virtual_stages.STAGES, MICROBATCHES), "planned"),
        "ZB-H1, eager": (schedules.zb_h1(virtual_stages.STAGES, MICROBATCHES), "eager"),
        "ZB-V": (schedules.zb_v(virtual_stages.STAGES, MICROBATCHES), "planned"),
    }
    with gpu(90, runs=False), mock.patch.object(dispatch, "resolve", return_value=kernels):
        prepared = variants(jobs.jobs(virtual_stages.launches(kernels, WIDTH, TOKENS)))
        with virtual_stages._of_a_stage(), jobs.recorded() as launched:
            virtual_stages.Runner(model, x, target, []).run(candidates, 1)
    ours = [job for job in launched if job.kernel[1] != "_product"]  # of F and B, which cuBLAS has on a GPU
    assert len({job.kernel[1] for job in ours}) == 4
    assert variants(ours) <= prepared
