"""A chunk that counts the bytes that it holds from F to B, and times its layers: what `profile` runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.clock import EventClock
from zbkern.pipeline.runtime.storages import Resident, key, keys, parts


class CountedChunk(torch.nn.Module):
    """A chunk whose first forward counts the bytes that live until its backward, every storage once.

    They are what autograd saves, in the loss, too, and the inputs that came in a message; not what stays anyway:
    parameters, buffers, side inputs, and on the first and last chunk the batch.
    """

    def __init__(self, module: torch.nn.Module, side: Any, clock: EventClock, name: str = "") -> None:
        super().__init__()
        self.name = name
        self._clock = clock
        self._marks: list[Any] = []  # of the forward that runs: it begins, its first layer does, its last one ends
        self._forwards: list[tuple[Any, ...]] = []  # those of all forwards, and their ends
        self.module = module
        self.tied_parameters = getattr(module, "tied_parameters", {})
        self.keeps_inputs = False
        self.output_bytes = 0  # of one microbatch
        self._calls = 0
        self._packed: list[weakref.ref[_Saved]] = []
        self._storages: dict[int, int] = {}
        given = [leaf for leaf in pytree.tree_leaves(side) if isinstance(leaf, Tensor)]  # microbatches are views of it
        self._resident = Resident(module, given)
        self._kept: set[int] = set()

    @property
    def saved_bytes(self) -> int:
        """What one microbatch holds from F to B."""
        return sum(self._saved())

    def static_bytes(self, bytes_per_parameter: float | None) -> float:
        """What stays: of every parameter so much, by default for weight, gradient and two moments; and the buffers."""
        each = bytes_per_parameter
        weights = sum(p.numel() * (4 * p.element_size() if each is None else each) for p in self.parameters())
        return weights + sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def transfer(self, copy_size: int) -> float:
        """Bytes of a transfer to the host that begins once copy_size have been saved: the mean of two neighbours, those
        that are largest."""
        transfers = [0]
        for size in self._saved():
            if transfers[-1] >= copy_size:
                transfers.append(0)
            transfers[-1] += size
        return max([copy_size, *(sum(pair) / 2 for pair in pairwise(transfers))])

    def _saved(self) -> list[int]:
        """Bytes of every storage, in the order in which they were saved."""
        return [size for storage, size in self._storages.items() if storage not in self._kept]

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self._calls += 1
        for leaf in pytree.tree_leaves((inputs, keywords)):
            if isinstance(leaf, Tensor):
                self._keep(leaf) if self.keeps_inputs else self._count(leaf)
        self._marks = [self._clock.now()]
        with self._counting():
            output = self.module(*inputs, **keywords)
        self._mark()
        self._forwards.append(tuple(self._marks))
        self._count_saved()
        if self._calls == 1:
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            self.output_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return output

    def _mark(self, *_: Any) -> None:
        self._marks.append(self._clock.now())

    def times(self) -> tuple[float, float]:
        """Milliseconds of a forward in its layers and besides them, medians; zeros where it has nothing else."""
        four = [[self._clock.seconds(mark) for mark in marks] for marks in self._forwards if len(marks) == 4]
        if not four:
            return 0.0, 0.0
        within = median(left - entered for _, entered, left, _ in four)
        return 1e3 * within, 1e3 * median(end - begin - (left - entered) for begin, entered, left, end in four)

    @contextmanager
    def layers_apart(self) -> Iterator[None]:
        """Marks where the layers of a part of a model begin and end, which computes more than these."""
        hooks = []
        if layers := getattr(self.module, "layer_names", None):
            hooks.append(self.module.get_submodule(layers[0]).register_forward_pre_hook(self._mark))
            hooks.append(self.module.get_submodule(layers[-1]).register_forward_hook(self._mark))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def loss(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any) -> Tensor:
        for leaf in pytree.tree_leaves(target):
            if isinstance(leaf, Tensor):
                self._keep(leaf)
        with self._counting():
            value = loss_fn(output, target)
        self._count_saved()
        return value

    def _counting(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved.tensor)

    def _save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        if self._calls == 1:
            self._packed.append(weakref.ref(saved))
        return saved

    def _count_saved(self) -> None:
        """Counts what the graph still holds: of parts of it that lead to no output, nothing."""
        packed, self._packed = self._packed, []
        for reference in packed:
            if (saved := reference()) is not None:
                self._count(saved.tensor)

    def _count(self, tensor: Tensor) -> None:
        if self._calls == 1:
            for part in parts(tensor):
                if key(part) not in self._resident:
                    self._storages[key(part)] = part.untyped_storage().nbytes()

    def _keep(self, tensor: Tensor) -> None:
        self._kept |= keys([tensor])


class _Saved:
    """A tensor that autograd has saved, and that lives as long as the graph has it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def tied_names(modules: Sequence[torch.nn.Module], rank: int) -> list[str | None]:
    """By module, one name for those that share a parameter: the declared one, on whichever rank the others are."""
    declared = [dict(getattr(module, "tied_parameters", {})) for module in modules]
    owners: dict[int, list[int]] = {}
    for at, module in enumerate(modules):
        for parameter in module.parameters():
            owners.setdefault(id(parameter), []).append(at)
    shared = [found for found in owners.values() if len(found) > 1]
    here = [next((f"rank {rank}: {found[0]}" for found in shared if at in found), None) for at in range(len(modules))]
    return [next(iter(names), own) for names, own in zip(declared, here, strict=True)]
