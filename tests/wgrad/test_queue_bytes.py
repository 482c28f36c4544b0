"""What a queue holds, by its count of bytes; that it stays within its limit is in tests/test_gradients.py."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

import zbkern
from tests.support.queued import make_pair
from zbkern import testing


def test_bytes_are_inputs_and_output_gradients_only() -> None:
    _, twin = make_pair()
    queue = zbkern.WGradQueue()
    x = torch.randn(16, 5, dtype=torch.float64)
    with queue.defer():
        twin(x).square().sum().backward()
    # x, gelu(first), and the two output gradients; 8 bytes each
    assert queue.bytes == 8 * 16 * (5 + 7 + 7 + 3)
    assert queue.bytes == testing.storage_bytes([tensor for task in queue.tasks() for tensor in task.tensors])
    assert all(tensor.grad_fn is None and not tensor.requires_grad for t in queue.tasks() for tensor in t.tensors)
    queue.run()
    assert queue.bytes == 0


def test_held_memory_is_what_the_queue_reports() -> None:
    """Every tensor that B leaves alive is found through the garbage collector, not through the queue."""
    torch.manual_seed(0)
    model = zbkern.convert(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
    queue = zbkern.WGradQueue()
    with queue.defer():
        model(torch.randn(8, 32)).sum().backward()  # warm up: what torch allocates once
    queue.run()

    def tensors() -> dict[int, int]:
        gc.collect()
        found = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}

    x = torch.randn(8, 32)
    before = tensors()
    with queue.defer():
        model(x).square().sum().backward()
    held = {storage: size for storage, size in tensors().items() if storage not in before}
    assert sum(held.values()) + x.nbytes == queue.bytes
    queue.discard()
