"""What a queue holds: its count of bytes, and its limit, which runs W early."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

import zbkern
from tests.support.queued import batches, make_pair
from zbkern import testing


def test_byte_limit_runs_the_oldest_early() -> None:
    model, twin = make_pair()
    xs = batches(6)
    free = zbkern.WGradQueue()
    for x in xs:
        model(x).sum().backward()
        with free.defer():
            twin(x).sum().backward()
    limit = free.peak_bytes // 3
    free.discard()
    queue = zbkern.WGradQueue(max_bytes=limit)
    for x in xs:
        with queue.defer():
            twin(x).sum().backward()
        assert queue.bytes <= limit
    assert queue.peak_bytes <= limit
    assert 0 < queue.pending() < 12
    queue.run()
    testing.assert_same_gradients(twin, model)


def test_byte_limit_keeps_hooks_waiting() -> None:
    """One weight used twice: its hook must see the whole gradient, once, although the limit forces W early."""
    weight = torch.nn.Parameter(torch.eye(4, dtype=torch.float64))
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = torch.arange(8, dtype=torch.float64).view(2, 4)
    expected = torch.autograd.grad(
        torch.nn.functional.linear(torch.nn.functional.linear(x, weight).sin(), weight).sum(), weight
    )[0]
    queue = zbkern.WGradQueue(max_bytes=0)
    with queue.defer():
        y = zbkern.functional.linear(zbkern.functional.linear(x, weight).sin(), weight)
        y.sum().backward()
    assert seen == []
    queue.run()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected, rtol=1e-12, atol=1e-12)


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
