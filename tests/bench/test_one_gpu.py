"""Several processes on one GPU, without a GPU: messages through shared memory. The benchmark over them runs in
test_gpu_session.py."""

from __future__ import annotations

import random
import threading

import pytest
import torch
import torch.distributed as dist

from bench import shared_memory
from bench.shared_memory import SharedMemoryGroup

CPU = torch.device("cpu")


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOTS", 4)
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 1000)


def buffer(number: int) -> torch.Tensor:
    size = random.Random(number).choice([1, 7, 999, 1000, 1001, 2500, 4000, 9000])
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(number)).to(torch.uint8)


@pytest.mark.usefixtures("small_slots")
def test_buffers_of_any_size_arrive_in_order_both_ways() -> None:
    store, wrong = dist.HashStore(), []

    def rank_loop(rank: int) -> None:
        ours, theirs = (SharedMemoryGroup(rank, name, store, CPU) for name in ("ab"[rank], "ba"[rank]))

        def send() -> None:
            for number in range(100):
                ours.send([buffer(number + 1000 * rank)], 1 - rank, 0)

        sender = threading.Thread(target=send)
        sender.start()
        for number in range(100):
            expected = buffer(number + 1000 * (1 - rank))
            found = torch.empty_like(expected)
            theirs.recv([found], 1 - rank, 0).wait()
            if not torch.equal(found, expected):
                wrong.append((rank, number))
        sender.join(60)

    threads = [threading.Thread(target=rank_loop, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.usefixtures("small_slots")
def test_a_receive_ends_with_its_group() -> None:
    group = SharedMemoryGroup(1, "a", dist.HashStore(), CPU)
    group.abort()
    with pytest.raises(RuntimeError, match="will send and receive no more"):
        group.recv([torch.empty(1, dtype=torch.uint8)], 0, 0)
