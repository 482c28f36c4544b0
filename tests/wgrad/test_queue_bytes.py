"""What a queue holds, by its count of bytes; that it stays within its limit is in tests/test_gradients.py."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

import zbkern
from tests.support.queued import make_pair


def test_inputs_and_output_gradients_are_held_and_nothing_else() -> None:
    """Every tensor that B leaves alive is found through the garbage collector, not through the queue."""
    _, twin = make_pair()
    queue = zbkern.WGradQueue()
    with queue.defer():
        twin(torch.randn(16, 5, dtype=torch.float64)).sum().backward()  # warm up: what torch allocates once
    queue.run()

    def tensors() -> dict[int, int]:
        gc.collect()
        found = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}

    x = torch.randn(16, 5, dtype=torch.float64)
    before = tensors()
    with queue.defer():
        twin(x).square().sum().backward()
    held = {storage: size for storage, size in tensors().items() if storage not in before}
    assert queue.bytes == 8 * 16 * (5 + 7 + 7 + 3)  # x, gelu(first), and the two output gradients
    assert sum(held.values()) + x.nbytes == queue.bytes
    assert all(tensor.grad_fn is None and not tensor.requires_grad for t in queue.tasks() for tensor in t.tensors)
    queue.run()
    assert queue.bytes == 0
