"""Runs of a case: forwards and backwards of the whole sequence, and of its parts one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zbkern.pipeline.auxiliary_losses import AuxiliaryLosses, Share
from zbkern.pipeline.runtime.slices.carry import Carries, carries_of
from zbkern.pipeline.runtime.slices.case import Found, Unable, is_of
from zbkern.pipeline.runtime.slices.differences import are_close
from zbkern.pipeline.runtime.slices.sliced_batch import cut
from zbkern.pipeline.runtime.slices.traces import Traces, take_gradients
from zbkern.pipeline.runtime.slices.undrawn import Undrawn
from zbkern.pipeline.runtime.slices.watching import Watching
from zbkern.pipeline.runtime.slices.what_differs import named
from zbkern.pipeline.transport.tensors import local_part, tensors_in
from zbkern.schedules import gpipe
from zbkern.wgrad import WGradQueue


class Runs:
    """Of the case that is watched. module, call: it, and how it is called."""

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        traces: Traces,
        watching: Watching,
        undrawn: Undrawn | None,
    ) -> None:
        self._module, self._call, self._traces, self._undrawn = module, call, traces, undrawn
        self._watching, self._case = watching, watching.case
        self.places: Sequence[tuple[int, int]] = []  # of parts, once these run

    def whole(self) -> Found:
        """With the first of its side inputs that it runs with."""
        for number, side in enumerate(self._case.wholes):
            self._watching.begin_whole()
            self._traces.restore()
            try:
                if side.get("carry") is not None:
                    side = {**side, "carry": carries_of([self._case.tokens])[0]}  # one of before has noted its calls
                return self._run([(0, self._case.tokens)], [side], None)
            except Exception as error:
                self._watching.end()
                torch.clear_autocast_cache()
                if number + 1 == len(self._case.wholes):
                    raise Unable(f"{type(error).__name__}: {error}") from error
        raise AssertionError("a case has side inputs of the whole")

    def parts(self, lengths: Sequence[int]) -> Found:
        self._traces.restore()
        self._watching.begin_parts()
        self.places = [*pairwise(accumulate(lengths, initial=0))]
        sides = self._case.parts or [{}] * len(self.places)
        try:
            return self._run(self.places, sides, None if self._case.keeps_attributes else self._traces)
        except Exception as error:
            running = self._watching.running
            where = f" in {named(self._module, running[-1])}" if self._watching.is_on and running else ""
            raise Unable(f"{type(error).__name__}{where}: {error}", in_parts=True) from error
        finally:
            self._watching.end()

    def _run(
        self, places: Sequence[tuple[int, int]], sides: Sequence[Mapping[str, Any]], traces: Traces | None
    ) -> Found:
        """Forwards of the tokens of these places, from the first to the last, and their backwards from the last on.

        traces: by which attributes are put back between forwards.
        """
        queue, losses = WGradQueue(), AuxiliaryLosses()
        lengths = [end - start for start, end in places]
        in_slices = bool(self.places) and self._case.parts is None
        carries = Carries(gpipe(1, 1, slices=lengths) if in_slices else gpipe(1, len(places)))
        outputs: list[Any] = []
        given = []
        while (number := len(outputs)) < len(places):
            if traces is not None and number:
                traces.restore_attributes()
            may_raise = in_slices and number == 1 and lengths[1] == 1 and len(lengths) > 2
            before = Traces(self._module, self._traces.device) if may_raise else None
            inputs, keywords = self._arguments(places[number], sides[number])
            carried = carries.begin(number, lengths[number], inputs, sum(lengths))
            share = self._share(lengths[number], carried.get("carry"))
            self._watching.begin(places[number])
            alike = self._watching.alike
            if alike is not None:
                alike.begin(places[number], tensors_in(inputs), self._watching.running)
            with (
                torch.set_grad_enabled(self._watching.trains),
                queue.defer(number),
                losses.during(number, share),
                nullcontext() if alike is None else alike,
                self._calm(number),
            ):
                queue._in_slice = in_slices
                try:
                    output = self._call(inputs, {**keywords, **carried})
                except Exception:
                    if before is None:
                        raise
                    # layers that go on from a state may not do so for a single token: its slice raises in any step
                    before.restore()
                    lengths = [lengths[0], sum(lengths[1:])]
                    places = self.places = [places[0], (places[1][0], places[-1][1])]
                    carries.cut_again(number, lengths)
                    continue
                queue._in_slice = False
                self._watching.end()
                carries.end_forward(number, carried)
            outputs.append(output)
            given.append([leaf for leaf in tensors_in(inputs) if leaf.requires_grad])
        leaves = [*map(tensors_in, outputs)]
        if not self._watching.trains:
            queue.discard()  # W of losses that compute their gradients in a forward
            return Found(_detached(leaves), [], {}, self._traces.buffers())
        cotangents = self._cotangents(leaves)
        try:
            for number in reversed(range(len(places))):
                ends = [
                    (leaf, cotangent)
                    for leaf, cotangent in zip(leaves[number], cotangents[number], strict=True)
                    if cotangent is not None and leaf.requires_grad
                ]
                ends += carries.gradients(number)
                if ends:
                    roots, arrived = zip(*ends, strict=True)
                    with queue.defer(number), losses.during(number), self._calm(number):
                        torch.autograd.backward(roots, arrived)
                carries.end_backward(number)
        except Exception:
            queue.discard()
            raise
        queue.run([*range(len(places))])  # those of one weight at once: its gradient is read and written once
        of_inputs = [self._together(parts) for parts in zip(*given, strict=True)]
        parameters = take_gradients(self._module)
        return Found(_detached(leaves), of_inputs, parameters, self._traces.buffers())

    def _calm(self, number: int) -> AbstractContextManager[Any]:
        """What a pass of a part runs in, so that it draws no random numbers."""
        if self._undrawn is None:
            return nullcontext()
        self._undrawn.begin(number if self.places else None)
        return self._undrawn

    def _together(self, leaves: Sequence[Tensor]) -> Tensor:
        """The gradient of an input, of which every part was given its own leaf."""
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else local_part(leaf.grad) for leaf in leaves]
        by_token = all(is_of(each, place) for each, place in zip(gradients, self._placed(len(leaves)), strict=True))
        return torch.cat(gradients, 1) if by_token else sum(gradients[1:], gradients[0])

    def _arguments(self, place: tuple[int, int], others: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What the module is given for these tokens; inputs that take a gradient take one of their own."""
        inputs, side, more = cut((self._case.inputs, dict(self._case.side), dict(others)), self._case.tokens, place)
        if isinstance(inputs, dict):
            inputs = {name: more.pop(name, value) for name, value in inputs.items()}

        shares = len(self.places) if self.places and self._case.divides else 1
        whole = {id(leaf) for leaf in tensors_in(self._case.inputs) if self._case.is_sum(leaf)}

        def own(leaf: Tensor) -> Tensor:
            values = leaf.detach() / shares if id(leaf) in whole else leaf.detach().clone()
            return values.requires_grad_(leaf.requires_grad and self._watching.trains)

        keywords = {**side, **more}  # copies, which the module may write into
        return pytree.tree_map_only(Tensor, own, inputs), pytree.tree_map_only(Tensor, Tensor.clone, keywords)

    def _share(self, length: int, carry: Any) -> Share:
        if self._case.parts is not None:
            return Share(0.0)  # a loss that is added is that of a row, whatever is packed into it
        return Share(1.0, *(() if carry is None else carry._place))

    def _cotangents(self, outputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor | None]]:
        """The gradients that begin the backwards: random ones of tokens that count; of what all tokens share the same
        one wherever it is a sum over them, and one alone where all have the same."""
        generator = torch.Generator().manual_seed(7)
        found: list[list[Tensor | None]] = [[] for _ in outputs]
        for parts in zip(*outputs, strict=True):
            first = parts[0]
            if not first.is_floating_point() or type(first) is not Tensor:
                given: list[Tensor | None] = [
                    torch.ones_like(part) if part.is_floating_point() else None for part in parts
                ]
            elif all(is_of(part, place) for part, place in zip(parts, self._placed(len(parts)), strict=True)):
                whole = torch.randn(first.shape[0], self._case.tokens, *first.shape[2:], generator=generator)
                whole = whole.to(first)
                counted = self._case.counted
                if counted is not None and counted.shape == whole.shape[:2]:
                    whole = whole.masked_fill(~counted.view(*counted.shape, *[1] * (whole.dim() - 2)), 0)
                given = [whole[:, slice(*place)] for place in self._placed(len(parts))]
            else:
                one = torch.randn(first.shape, generator=generator).to(first)
                shared = len(parts) > 1 and all(part.shape == first.shape and are_close(part, first) for part in parts)
                given = [one if part.shape == one.shape else None for part in parts]
                given = [*[None] * (len(parts) - 1), given[-1]] if shared else given
            for each, cotangent in zip(found, given, strict=True):
                each.append(cotangent)
        return found

    def _placed(self, count: int) -> Sequence[tuple[int, int]]:
        return self.places if count == len(self.places) else [(0, self._case.tokens)]


def _detached(outputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[local_part(leaf.detach()) for leaf in each] for each in outputs]
