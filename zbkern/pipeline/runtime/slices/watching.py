"""What parts of a module are given and return, and the gradients of that, for a sequence and for parts of it.

What is returned for the whole, and the gradient of that, stand in the place of what is returned for a part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.slices.alike import Alike
from zbkern.pipeline.runtime.slices.case import Case
from zbkern.pipeline.runtime.slices.differences import Rounding, largest, sizes_of
from zbkern.pipeline.transport.tensors import arrived, local_part


class Key(NamedTuple):
    """Names a tensor that a part is given, or returns: by the part's call, and its place among the leaves."""

    part: str
    call: int
    place: int
    is_input: bool


class Whole:
    """A tensor of all tokens that a part was given, or has returned. is_followed: gradients of it are noted."""

    def __init__(self, key: Key, tensor: Tensor, is_followed: bool = False) -> None:
        self.key, self.tensor, self.is_followed = key, tensor, is_followed
        self.gradient: Tensor | None = None  # of what was returned
        self.taker: str | None = None  # the part that is given what was returned
        self._sizes: tuple[Tensor, float] | None = None

    def sizes(self) -> tuple[Tensor, float]:
        """Of each token, and the usual one."""
        if self._sizes is None:
            sizes = sizes_of(self.tensor)
            self._sizes = sizes, float(sizes.nanmedian())
        return self._sizes

    def note_gradient(self, gradient: Tensor) -> None:
        self.gradient = gradient.detach().clone()


class Watching:
    """Of a case: what is seen between `begin` and `end` of each forward, first the whole's and then, after
    `begin_parts`, those of parts."""

    def __init__(self, case: Case, trains: bool, rounding: Rounding, alike: Alike | None) -> None:
        self.case, self.trains, self._rounding, self.alike = case, trains, rounding, alike
        self.running: list[str] = []  # parts, the innermost last
        self.is_on = False
        self.fault: Exception | None = None  # what has failed here; the module, which may catch errors, sees nothing
        self.begin_whole()

    def begin_whole(self) -> None:
        """Before the forward of the whole, and before it is run again."""
        self._in_parts = False
        self.whole: dict[Key, Whole] = {}  # also where another part has returned it
        # by identity: what was returned for the whole, or stands in the place of that for a part, and its version
        self._known: dict[int, tuple[Tensor, int, Whole]] = {}

    def begin_parts(self) -> None:
        """Before the forwards of parts, and before they are run again."""
        self._in_parts = True
        self._known.clear()
        self.errors: list[tuple[Key, float]] = []  # of what is not exact
        self.off: list[tuple[Whole, Tensor]] = []  # of gradients: by how much

    def begin(self, place: tuple[int, int]) -> None:
        """Before a forward of the tokens of this place."""
        self._place, self.is_on = slice(*place), True
        self._calls: Counter[str] = Counter()
        self.running.clear()

    def end(self) -> None:
        """Behind it, also where it has raised."""
        self.is_on = False

    def forget(self) -> None:
        """Tensors have hooks that have these: garbage collection does not find such a circle."""
        self._known.clear()

    def enter(self, name: str) -> None:
        """Before the forward of a part."""
        if self.is_on:
            self.running.append(name)

    def leave(self, name: str, inputs: Any, output: Any) -> Any:
        """Behind it: what it returns instead; None for what it has returned."""
        if not self.is_on:
            return None  # what a checkpoint runs again in a backward
        while self.running and self.running.pop() != name:
            pass  # parts whose forwards a module has ended by an exception of its own
        with torch._C.DisableTorchFunction():  # no mode sees what is done here
            return self._watched(partial(self._returned, name, inputs), output)

    def _watched(self, see: Callable[[Any], Any], seen: Any) -> Any:
        """What see(seen) returns; None, which changes nothing, where it fails."""
        try:
            return see(seen)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.fault = self.fault or error
            return None

    def _returned(self, name: str, inputs: Any, output: Any) -> Any:
        call = self._calls[name]
        self._calls[name] += 1
        plain = all(isinstance(each, Tensor) for each in inputs)
        for at, leaf in enumerate(inputs if plain else pytree.tree_leaves(inputs)):
            self._seen(Key(name, call, at, True), leaf)
        if isinstance(output, Tensor):  # as most are: a walk takes microseconds
            seen = self._seen(Key(name, call, 0, False), output)
            return None if seen is output else seen
        leaves, structure = pytree.tree_flatten(output)
        seen = [self._seen(Key(name, call, at, False), leaf) for at, leaf in enumerate(leaves)]
        changed = any(one is not other for one, other in zip(seen, leaves, strict=True))
        return pytree.tree_unflatten(seen, structure) if changed else None

    def _seen(self, key: Key, leaf: Any) -> Any:
        """Keeps what is returned for the whole, and gives it in the place of what is returned for a part."""
        if self.alike is not None and not key.is_input:
            self.alike.note(leaf)
        tensor = leaf if type(leaf) is Tensor else local_part(arrived(leaf))
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.dim() < 2 or not tensor.numel():
            return leaf
        self._rounding.note(tensor)
        if not self._in_parts:
            return self._kept(key, leaf, tensor) if tensor.shape[1] == self.case.tokens else leaf
        whole, known = self.whole.get(key), self._found(leaf)
        if known is not None and known is whole:
            return leaf  # it was compared where it was returned
        if whole is None or whole.tensor[:, self._place].shape != tensor.shape:
            return leaf
        self._compare(key, whole, tensor.detach())
        if type(leaf) is not Tensor or key.is_input:
            return leaf
        forced = leaf.clone()
        forced.data.copy_(whole.tensor[:, self._place])  # past autograd's sight, which has nothing of a copy
        if whole.is_followed and forced.requires_grad:
            forced.register_hook(partial(self._watched, partial(self._arrived, whole, self._place)))
        self._known[id(forced)] = forced, forced._version, whole
        if self.alike is not None:
            self.alike.note(forced)
        return forced

    def _kept(self, key: Key, leaf: Any, tensor: Tensor) -> Any:
        """Keeps what is seen in the whole; what is returned is a copy, whose gradient is of what becomes of it."""
        if (known := self._found(leaf)) is not None:
            self.whole[key] = known
            if key.is_input and known.taker is None:
                known.taker = key.part
            return leaf
        whole = self.whole[key] = Whole(key, tensor.detach().clone())
        if key.is_input or type(leaf) is not Tensor or not leaf.requires_grad or not self.trains:
            return leaf
        copy = leaf.clone()
        self._known[id(copy)] = copy, copy._version, whole
        whole.is_followed = True
        copy.register_hook(partial(self._watched, whole.note_gradient))
        return copy

    def _found(self, leaf: Any) -> Whole | None:
        """What a tensor is that was seen, and has not been written since."""
        found = self._known.get(id(leaf))
        return None if found is None or found[1] != leaf._version else found[2]

    def _compare(self, key: Key, whole: Whole, tensor: Tensor) -> None:
        place, (sizes, usual) = self._place, whole.sizes()
        expected = whole.tensor[:, place]
        off = expected - tensor
        if float(largest(off)) <= self._rounding.limit * usual:
            return
        off = sizes_of(torch.where(expected == tensor, 0, off))
        off = off.masked_fill(expected.isnan().unsqueeze(-1).flatten(2).any(2), 0)
        counted = self.case.counted
        if counted is not None:
            if sizes.shape != counted.shape:
                return
            off = off.masked_fill(~counted[:, place] & ~off.isnan(), 0)  # a gradient of zero times NaN is NaN
        error = off / sizes[:, place].clamp_min(sizes.nanmedian()).clamp_min(torch.finfo(sizes.dtype).tiny)
        self.errors.append((key, float(torch.where(off == 0, 0, error).max())))  # also where both are NaN

    def _arrived(self, whole: Whole, place: slice, gradient: Tensor) -> Tensor:
        """Compares the gradient that came for what a part has returned; the whole's goes on in its place."""
        if whole.gradient is None:
            whole.gradient = torch.zeros_like(whole.tensor)
        wanted = whole.gradient[:, place]
        off = torch.where(wanted == gradient, 0, wanted - gradient)
        counted = self.case.counted
        if counted is not None:
            counted = counted[:, place] if off.shape[:2] == counted[:, place].shape else None
        self.off.append((whole, largest(off if counted is None else off[counted])))
        return wanted
