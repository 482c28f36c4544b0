"""Carry: what the slices of a sequence leave to each other within a chunk, and the gradients that come back for it.

Keys and values of earlier slices stand in one buffer of the whole sequence, which each slice reads from its beginning.
B runs from the last slice to the first: it adds gradients of what a slice has read to those of the slices before, so
that the gradients of a slice's own keys are complete when its B comes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.slices.sliced_batch import length_of
from zbkern.schedules.schedule import Schedule
from zbkern.wgrad.storages import storage_key


class _Sequence:
    """What the slices of one sequence share."""

    def __init__(self, slices: Sequence[int], length: int | None) -> None:
        self.slices, self.length = slices, length
        self.starts = [0]  # tokens before each slice
        self.ends: dict[Hashable, list[int]] = {}  # of what slices have appended, by key
        self.buffers: dict[Hashable, Tensor] = {}
        self.gradients: dict[Hashable, Tensor] = {}  # of the buffers, from the slices that have had their B
        self.awaited: set[tuple[Hashable, int]] = set()  # key and slice: a gradient is to come in B
        self.states: dict[tuple[Hashable, int], tuple[Tensor, Tensor]] = {}  # with its graph, and for the next

    @property
    def nbytes(self) -> int:
        kept = [*self.buffers.values(), *self.gradients.values(), *(leaf for _, leaf in self.states.values())]
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)


class Carry:
    """What one slice of a sequence has of those before it, and leaves to those after it: the keyword argument `carry`
    of a module in a schedule with slices.

    A module calls `append` with what later slices read beside their own, keys and values say, and `keep` with what they
    go on from, a recurrent state. Each key, any hashable value, is one tensor of one layer: `(self, "keys")` will do.
    Run again, as in a checkpoint, the same calls give the same.
    """

    def __init__(self, sequence: _Sequence, index: int) -> None:
        self._sequence, self._index = sequence, index
        self._calls: set[tuple[str, Hashable]] | None = set()  # in its forward; None when that may run again

    @property
    def start(self) -> int:
        """The place of the slice's first token in the sequence."""
        return self._sequence.starts[self._index]

    @property
    def end(self) -> int:
        """The place behind the slice's last token in the sequence, as in a Python slice."""
        return self._sequence.starts[self._index + 1]

    @property
    def length(self) -> int | None:
        """The tokens of the whole sequence, where this rank was given any of the batch."""
        return self._sequence.length

    @property
    def is_last(self) -> bool:
        """Whether it is the carry of the sequence's last slice."""
        return self._index + 1 == len(self._sequence.slices)

    @property
    def _total(self) -> int:
        """The tokens of the sequence in proportion to the first slice, once that has begun; a few less than it has."""
        slices, starts = self._sequence.slices, self._sequence.starts
        return starts[1] * sum(slices) // slices[0]

    @property
    def _place(self) -> tuple[Sequence[int], int]:
        """The first tokens of the slices that have begun, with the end of the last, and which of them this one is."""
        return self._sequence.starts, self._index

    def __contains__(self, storage: object) -> bool:
        """Whether a storage, by its key, is a buffer of the sequence."""
        return any(storage_key(buffer) == storage for buffer in self._sequence.buffers.values())

    @torch.compiler.disable
    def append(self, key: Hashable, tensor: Tensor, dim: int, window: int | None = None) -> Tensor:
        """What the slices before have appended under this key, followed by `tensor` along `dim`.

        window: how many tokens each of this slice's sees, its own included; those that none sees are left out. The
        result is to be read only. Raises RuntimeError where a slice before has not called it, ValueError where this one
        has.
        """
        if has_torch_function_unary(tensor):  # as torch's own functions: modes see it
            return handle_torch_function(Carry.append, (tensor,), self, key, tensor, dim, window)
        self._note_call("append", key)
        sequence, index = self._sequence, self._index
        ends = sequence.ends.setdefault(key, [0])
        if len(ends) <= index:
            raise RuntimeError(f"Carry.append: every slice must append to {key!r}; slice {len(ends) - 1} has not")
        start = ends[index]
        end = start + tensor.shape[dim]
        if len(ends) == index + 1:
            ends.append(end)
        begin = 0 if window is None else max(0, start - window + 1)
        return _Append.apply(tensor, self, key, dim, (begin, start, end))

    def state(self, key: Hashable) -> Tensor | None:
        """What the slice before has kept under this key; None in the first slice. Raises RuntimeError where it has
        kept nothing."""
        if self._index == 0:
            return None
        if (key, self._index - 1) not in self._sequence.states:
            raise RuntimeError(f"Carry.state: every slice must keep {key!r}; slice {self._index - 1} has not")
        return self._sequence.states[key, self._index - 1][1]

    @torch.compiler.disable
    def keep(self, key: Hashable, tensor: Tensor) -> None:
        """Gives the next slice this tensor under this key; its gradient comes back before this slice's B. Raises
        ValueError where this slice has called it already."""
        self._note_call("keep", key)
        if (key, self._index) not in self._sequence.states:  # else this is the forward run again
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            self._sequence.states[key, self._index] = tensor, leaf

    def _end_forward(self) -> None:
        """Marks the end of the slice's forward: later calls are those of a forward that runs again."""
        self._calls = None

    def _note_call(self, call: str, key: Hashable) -> None:
        if self._calls is None:
            return
        if (call, key) in self._calls:
            raise ValueError(
                f"Carry.{call}: key must be another one for every tensor of every layer, such as (self, 'keys'); got "
                f"{key!r} twice in a slice"
            )
        self._calls.add((call, key))

    def _write(self, key: Hashable, tensor: Tensor, dim: int, start: int, end: int) -> Tensor:
        """The buffer of this key with the tensor in its place, past autograd's sight: graphs keep other parts of it."""
        sequence = self._sequence
        buffer = sequence.buffers.get(key)
        if buffer is None or buffer.shape[dim] < end:
            shape = list(tensor.shape)  # in the first slice that of the whole sequence, if in proportion
            shape[dim] = end if self._index else -(-(end + 1) * sum(sequence.slices) // sequence.slices[0])
            larger = tensor.new_empty(shape)
            if buffer is not None:
                larger.narrow(dim, 0, start).copy_(buffer.narrow(dim, 0, start))
            buffer = sequence.buffers[key] = larger
        buffer.data.narrow(dim, start, end - start).copy_(tensor)
        return buffer.data

    def _add_gradient(self, key: Hashable, gradient: Tensor, dim: int, place: tuple[int, int, int]) -> Tensor:
        """Adds the gradient of all that a slice has read; returns what the slice's own then has from all."""
        sequence, (begin, start, end) = self._sequence, place
        total = sequence.gradients.get(key)
        if total is None:
            shape = list(gradient.shape)
            shape[dim] = end
            wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else gradient.dtype
            total = sequence.gradients[key] = gradient.new_zeros(shape, dtype=wide)
        total.narrow(dim, begin, end - begin).add_(gradient)
        sequence.awaited.discard((key, self._index))
        return total.narrow(dim, start, end - start).to(gradient.dtype, copy=True)


class _Append(torch.autograd.Function):
    """All that a buffer has from `begin` on, once the tensor is written from `start` to `end`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, carry: Carry, key: Hashable, dim: int, place: tuple[int, int, int]) -> Tensor:
        begin, start, end = ctx.place = place
        ctx.carry, ctx.key, ctx.dim = carry, key, dim
        if ctx.needs_input_grad[0]:
            carry._sequence.awaited.add((key, carry._index))
        return carry._write(key, tensor, dim, start, end).narrow(dim, begin, end - begin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.carry._add_gradient(ctx.key, gradient, ctx.dim, ctx.place), None, None, None, None)


def carries_of(slices: Sequence[int]) -> list[Carry]:
    """The carries of one sequence's slices, which have so many tokens each."""
    sequence = _Sequence(slices, sum(slices))
    sequence.starts = [*accumulate(slices, initial=0)]
    return [Carry(sequence, index) for index in range(len(slices))]


class Carries:
    """The carries of a chunk's sequences, each from the F of its first slice to the B of that slice.

    schedule: what says which slice a unit is. One that is a whole sequence needs no carry.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._units = schedule, schedule.units
        self._sequences: dict[int, _Sequence] = {}
        self.nbytes_of_one = 0  # of a sequence in forwards, as the last slice began
        self.gradient_nbytes_of_one = 0  # and of its gradients, as its last B ended

    @property
    def nbytes(self) -> int:
        """Bytes of what is carried, and of its gradients."""
        return sum(sequence.nbytes for sequence in self._sequences.values())

    def begin(self, unit: int, tokens: int | None, inputs: Any, length: int | None = None) -> Mapping[str, Carry]:
        """The keyword argument of a slice's forward; none for a whole sequence.

        tokens: of the slice, None where its inputs tell. length: of the sequence, where it is known. Raises TypeError
        for inputs without a sequence.
        """
        number, index, slices = self._units[unit]
        if slices == 1:
            return {}
        tokens = tokens or length_of(inputs)
        if tokens is None:
            raise TypeError(
                "Pipeline: a chunk must get a tensor with the sequence as dimension 1 to take it in slices; got "
                f"{pytree.tree_map_only(Tensor, lambda tensor: list(tensor.shape), inputs)}"
            )
        if index == 0:
            self._sequences[number] = _Sequence(self._schedule.slices_of(number), length)
        sequence = self._sequences[number]
        sequence.starts.append(sequence.starts[index] + tokens)
        self.nbytes_of_one = sequence.nbytes
        return {"carry": Carry(sequence, index)}

    def cut_again(self, unit: int, slices: Sequence[int]) -> None:
        """Forgets the forward of a slice that has raised: from it on the sequence is in slices of these lengths."""
        number, index, _ = self._units[unit]
        sequence = self._sequences[number]
        sequence.slices = slices
        del sequence.starts[index + 1 :]
        for ends in sequence.ends.values():
            del ends[index + 1 :]
        sequence.states = {place: state for place, state in sequence.states.items() if place[1] < index}
        sequence.awaited = {place for place in sequence.awaited if place[1] < index}

    def end_forward(self, unit: int, side: Mapping[str, Any]) -> None:
        """After the forward of a slice. Without gradients to come the sequence is over with its last one."""
        if "carry" in side:
            side["carry"]._end_forward()
        if not torch.is_grad_enabled() and self._units[unit].is_last:
            self._sequences.pop(self._units[unit].microbatch, None)

    def gradients(self, unit: int) -> list[tuple[Tensor, Tensor]]:
        """What a slice has kept for the next one, with the gradients that came back for it."""
        number, index, _ = self._units[unit]
        if number not in self._sequences:
            return []
        states = self._sequences[number].states
        kept = [states[place] for place in states if place[1] == index]
        return [(tensor, leaf.grad) for tensor, leaf in kept if tensor.requires_grad and leaf.grad is not None]

    def end_backward(self, unit: int) -> None:
        """After the B of a slice. Raises RuntimeError where gradients of later slices have not arrived, and where what
        was kept for it took no part in it."""
        number, index, _ = self._units[unit]
        if number not in self._sequences:
            return
        sequence = self._sequences[number]
        lost = {key for key, place in sequence.awaited if place == index and key in sequence.gradients}
        if lost:
            raise RuntimeError(
                f"Carry: what slice {index} has appended under {min(map(str, lost))} got no gradient in its B, and "
                "those of later slices would be lost: the output of a slice must depend on what it appends"
            )
        sequence.states = {key: state for key, state in sequence.states.items() if key[1] != index}
        for key, place in sequence.states:
            leaf = sequence.states[key, place][1]
            if place == index - 1 and leaf.requires_grad and leaf.grad is None:
                raise RuntimeError(
                    f"Carry: slice {index} does not use what slice {place} has kept under {key!r}: its layer needs "
                    "whole sequences; use a schedule without slices"
                )
        if index == 0:
            self.gradient_nbytes_of_one = sum(gradient.nbytes for gradient in sequence.gradients.values())
            del self._sequences[number]

    def reset(self) -> None:
        self._sequences.clear()
