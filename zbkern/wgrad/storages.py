"""The bytes of storages that tensors keep alive, each storage once however many tensors share it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class HeldStorages:
    """Counts storages by the tensors that hold them. nbytes: of all storages that are held now.

    >>> held = HeldStorages()
    >>> keys = held.add(task.tensors)     # doctest: +SKIP
    >>> held.remove(keys)                 # doctest: +SKIP
    """

    __slots__ = ("_counts", "nbytes", "sizes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.sizes: dict[int, int] = {}  # by key, in the order in which they came
        self._counts: dict[int, int] = {}  # by key: tensors that hold it

    def add(self, tensors: Iterable[Tensor]) -> list[int]:
        """Counts these tensors' storages. Returns their keys for `remove`: a tensor may have moved by then."""
        keys, counts = [], self._counts
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            keys.append(key)
            if key in counts:
                counts[key] += 1
            else:
                counts[key] = 1
                size = self.sizes[key] = storage.nbytes()
                self.nbytes += size
        return keys

    def remove(self, keys: Iterable[int]) -> None:
        """Takes back what one `add` has counted."""
        counts = self._counts
        for key in keys:
            if counts[key] > 1:
                counts[key] -= 1
            else:
                del counts[key]
                self.nbytes -= self.sizes.pop(key)


def storage_key(tensor: Tensor) -> int:
    """A number that tensors have in common that share a storage, while one of them is alive."""
    return tensor.untyped_storage()._cdata
