from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from zbkern.pipeline.transport import backend_of


def backends() -> list[str]:
    both, one = (dist.new_group(backend=backend) for backend in ("cpu:gloo,cuda:gloo", "cpu:gloo"))
    with pytest.raises(ValueError, match=r"no backend for cuda tensors \(cpu:gloo\)"):
        backend_of(one, torch.device("cuda"))
    with pytest.raises(ValueError, match="gloo cannot send CUDA tensors"):
        backend_of(both, torch.device("cuda"))
    return [backend_of(group, torch.device("cpu")) for group in (both, one)]


def test_the_backend_is_that_of_the_device(two_ranks: Any) -> None:
    assert two_ranks.run(backends) == [["gloo", "gloo"]] * 2
