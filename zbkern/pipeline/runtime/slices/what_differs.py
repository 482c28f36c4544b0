"""What differs between a sequence and its parts: where it was first seen, or in what the module has returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbkern.pipeline.runtime.slices.case import Case, Found, is_of
from zbkern.pipeline.runtime.slices.differences import (
    EXACT,
    are_close,
    by_how_much,
    error_of,
    largest,
    median,
    relative_error,
)
from zbkern.pipeline.runtime.slices.watching import Watching
from zbkern.pipeline.transport.tensors import local_part, tensors_in


class WhatDiffers(NamedTuple):
    """Of a case that was watched, whose parts were these places. exact: how much rounding may leave."""

    module: nn.Module
    places: Sequence[tuple[int, int]]
    watching: Watching
    exact: float

    @property
    def case(self) -> Case:
        return self.watching.case

    def first(self, whole: Found, found: Found) -> str | None:
        """Where they first differ, and by how much; None where nothing does."""
        return (
            self.in_a_part()
            or self._other_numbers_compared()
            or self._other_outputs(whole, found)
            or self._other_gradients(whole, found)
        )

    def in_a_part(self) -> str | None:
        """The part that first returned something else, or was given another gradient, and by how much."""
        exact = self.exact
        wrong = [(key, error) for key, error in self.watching.errors if not error <= exact]
        for key, error in wrong:
            if not key.is_input:
                # its inputs are something else, so that it is not the one: that was computed around it
                before = any(other[:2] == key[:2] and other.is_input for other, _ in wrong)
                name = self._around(key.part) if before else key.part
                return f"{named(self.module, name)} computes something else, {by_how_much(error)},"
        gradients = {id(each): each.gradient for each in self.watching.whole.values() if each.gradient is not None}
        sizes = {number: float(largest(gradient)) for number, gradient in gradients.items()}
        usual = median(sizes.values())
        for whole, off in self.watching.off:
            if not (error := relative_error(off, sizes[id(whole)], usual)) <= exact:
                name = self._around(whole.key.part) if whole.taker is None else whole.taker
                return f"{named(self.module, name)} gives another gradient for what it is given, {by_how_much(error)},"
        return None

    def _other_numbers_compared(self) -> str | None:
        """What is compared with a threshold, or is one, that is another number for a part."""
        alike = self.watching.alike
        compared = {} if alike is None else alike.compared
        expected = compared.get((0, self.case.tokens), [])
        for place in self.places:
            for (name, one), (_, other) in zip(expected, compared.get(place, []), strict=False):
                one = one[:, slice(*place)] if is_of(one, (0, self.case.tokens)) else one
                if one.shape == other.shape and not (error := error_of(other, one, 0.0)) <= self.exact:
                    return f"{named(self.module, name)} compares something else, {by_how_much(error)},"
        return None

    def _other_outputs(self, whole: Found, found: Found) -> str | None:
        """Outputs of the module that are not of single tokens: the same in all parts, or sums over them."""
        if self.case.parts is not None:
            return None
        exact = self.exact
        for one, parts in zip(whole.outputs[0], zip(*found.outputs, strict=True), strict=True):
            plain = type(one) is Tensor and one.is_floating_point()
            if not plain or all(is_of(part, place) for part, place in zip(parts, self.places, strict=True)):
                continue
            if not all(part.shape == one.shape for part in parts) or not self._is_sum_or_same(one, parts, exact):
                return (
                    f"{named(self.module, '')} returns a tensor {list(one.shape)} of no tokens that is something else,"
                )
        # each forward may bring one a little nearer to where it ends: more of them in slices
        exact = exact / 100 if exact <= EXACT else exact
        for name, buffer in whole.buffers.items():
            after = found.buffers.get(name)  # a table that grows with what it is asked for has another shape
            if after is not None and after.shape == buffer.shape and not are_close(after, buffer, exact):
                return f"{named(self.module, name.rpartition('.')[0])} leaves something else in its buffer {name}"
        return None

    def _is_sum_or_same(self, one: Tensor, parts: Sequence[Tensor], exact: float) -> bool:
        """Whether an output is the same in all parts, or a sum over them: to which each adds what it has been given."""
        total = sum(parts[1:], parts[0])
        given = [each for each in tensors_in(self.case.inputs) if each.shape == one.shape]
        sums = [total, *(total - (len(parts) - 1) * local_part(each.detach()) for each in given)]
        return all(are_close(part, one, exact) for part in parts) or any(are_close(each, one, exact) for each in sums)

    def _other_gradients(self, whole: Found, found: Found) -> str | None:
        """Gradients of inputs and weights; of zero, but for rounding, is what is far below the usual size."""
        exact = self.exact
        for one, other in zip(whole.of_inputs, found.of_inputs, strict=True):
            error = error_of(self._of_counted(other), self._of_counted(one), 0.0)
            if not is_of(one, (0, self.case.tokens)):  # of all tokens, or of a sum that goes from chunk to chunk
                error = min(error, error_of(other / len(self.places), one, 0.0))
            if not error <= exact:
                kind = type(self.module).__name__
                return f"the gradient of what it ({kind}) is given is something else, {by_how_much(error)},"
        sizes = {name: float(largest(gradient)) for name, gradient in whole.parameters.items() if gradient.numel()}
        usual = median(sizes.values())
        for name, like in {**found.parameters, **whole.parameters}.items():
            one, other = (
                each.parameters[name] if name in each.parameters else torch.zeros_like(like) for each in (whole, found)
            )
            if not (error := error_of(other, one, usual, sizes.get(name))) <= exact:
                owner = name.rpartition(".")[0]
                return f"the gradient of {name} ({_kind(self.module, owner)}) is something else, {by_how_much(error)},"
        return None

    def _of_counted(self, tensor: Tensor) -> Tensor:
        counted = self.case.counted
        return tensor if counted is None or tensor.shape[:2] != counted.shape else tensor[counted]

    def _around(self, name: str) -> str:
        """The part whose forward runs another."""
        called = {key.part for key in self.watching.whole}
        while name:
            name = name.rpartition(".")[0]
            if name in called:
                break
        return name


def named(module: nn.Module, name: str) -> str:
    return f"{name or 'it'} ({_kind(module, name)})"


def _kind(module: nn.Module, name: str) -> str:
    try:
        return type(module.get_submodule(name)).__name__
    except AttributeError:  # of a parameter that FSDP2 knows by another name
        return type(module).__name__
