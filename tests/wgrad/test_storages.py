"""HeldStorages: bytes of distinct storages, whatever becomes of the tensors that hold them."""

from __future__ import annotations

import pytest
import torch

from zbkern.wgrad.storages import HeldStorages, storage_key


def test_every_storage_counts_once_until_its_last_tensor_is_removed() -> None:
    held, x, y = HeldStorages(), torch.zeros(8), torch.zeros(3)
    first = held.add([x, x[2:4], y])
    second = held.add([x.view(2, 4)])
    assert held.nbytes == x.nbytes + y.nbytes
    assert list(held.sizes.items()) == [(storage_key(x), x.nbytes), (storage_key(y), y.nbytes)]
    held.remove(first)
    assert held.nbytes == x.nbytes
    assert storage_key(x) in held.sizes
    held.remove(second)
    assert held.nbytes == len(held.sizes) == 0
    with pytest.raises(KeyError):
        held.remove(second)


def test_a_storage_that_is_freed_or_exchanged_is_taken_out_as_it_came() -> None:
    held, x = HeldStorages(), torch.zeros(8)
    keys = held.add([x, x])
    x.untyped_storage().resize_(0)  # as FSDP2 does
    x.data = torch.zeros(2)
    held.remove(keys)
    assert held.nbytes == len(held.sizes) == 0
