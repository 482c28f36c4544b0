"""What the parts of a module compute for a sequence, and how far from it they are for parts of the sequence: what they
return, the gradients of that, and those of inputs and weights.

Every part of the module is compared, and then goes on with what it has returned for the whole, and with the gradient
that came for it: rounding does not add up from part to part, and the part that needs whole sequences is named.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zbkern.pipeline.auxiliary_losses import AuxiliaryLosses, Share
from zbkern.pipeline.runtime.forward_state import evaluation_mode
from zbkern.pipeline.runtime.slices.alike import Alike
from zbkern.pipeline.runtime.slices.carry import Carries, carries_of
from zbkern.pipeline.runtime.slices.differences import (
    are_close,
    by_how_much,
    error_of,
    largest,
    median,
    relative_error,
    sizes_of,
)
from zbkern.pipeline.runtime.slices.sliced_batch import cut
from zbkern.pipeline.runtime.slices.traces import Traces, are_same, take_gradients
from zbkern.pipeline.runtime.slices.undrawn import Undrawn
from zbkern.pipeline.transport.tensors import arrived, local_part, tensors_in
from zbkern.schedules import gpipe
from zbkern.wgrad import WGradQueue
from zbkern.wgrad.queue import thread

_EXACT, _EXACT_TF32, _EXACT_16_BITS, _EXACT_8_BITS = 1e-3, 5e-3, 3e-2, 0.25  # relative
_OTHERS = 2
_OF_8_BITS = {"torchao", "transformer_engine"}
_ATTEMPTS = 8  # until no other thread draws random numbers: a quarter of a second
_one_at_a_time = threading.Lock()  # random numbers, and what torch compiles, are the same for all threads


class Case(NamedTuple):
    """What is compared. Side inputs of the whole are tried one after the other until it runs.

    lengths: of the parts, in tokens. parts: side inputs of each; None for slices, which have their carries alone.
    counted: [rows, tokens], those that are no padding; None for all. trains: gradients are compared, too.
    keeps_attributes: modules keep theirs from slice to slice, and else begin each as they are. divides: slices get
    equal shares of inputs that are of no tokens, as of a sum that goes from chunk to chunk, and else each the same.
    alike: all tokens are chosen alike; passes: and so many, from the first on, pass what they are compared with.
    """

    inputs: Any
    side: Mapping[str, Any]
    lengths: Sequence[int]
    wholes: Sequence[Mapping[str, Any]]
    parts: Sequence[Mapping[str, Any]] | None
    counted: Tensor | None = None
    trains: bool = True
    keeps_attributes: bool = False
    divides: bool = False
    alike: bool = False
    passes: int | None = None

    @property
    def has_sums(self) -> bool:
        """Whether there are inputs of no tokens."""
        return any(self.is_sum(leaf) for leaf in tensors_in(self.inputs)) and self.parts is None

    def is_sum(self, leaf: Tensor) -> bool:
        return leaf.is_floating_point() and not _is_of(leaf, (0, sum(self.lengths)))


class Unable(Exception):
    """Why nothing was compared; in_parts: it was one of these that failed."""

    def __init__(self, why: str, in_parts: bool = False) -> None:
        super().__init__(why)
        self.in_parts = in_parts


class _Draws(Exception):
    """Random numbers of torch's were drawn."""


class _Key(NamedTuple):
    """Names a tensor that a part is given, or returns: by the part's call, and its place among the leaves."""

    part: str
    call: int
    place: int
    is_input: bool


_Seen = dict[int, tuple[Tensor, int, _Key]]  # by identity: tensors that are kept, and their versions


class Comparison:
    """Compares cases, one after the other; `running` is around all. module, call: it, and how it is called with inputs
    and side inputs. Gradients are compared where they are on."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], device: torch.device) -> None:
        self._module, self._call, self._device = module, call, device
        self._in_parts = self._watches = False
        self._draws = 0  # random numbers: none, those that `Undrawn` knows, or others
        self.compares = False  # whether the last case that chose tokens alike has compared numbers
        self._bytes = min((each.element_size() for each in module.parameters() if each.is_floating_point()), default=8)
        kinds = {kind.__module__.partition(".")[0] for part in module.modules() for kind in type(part).__mro__}
        self._of_8_bits = bool(kinds & _OF_8_BITS)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, forwards are watched; at the end all is as it was."""
        with ExitStack() as stack:
            stack.enter_context(_one_at_a_time)
            stack.enter_context(_alone())
            self._traces = Traces(self._module, self._device)
            stack.callback(torch.clear_autocast_cache)  # of casts whose graph is gone
            stack.callback(self._traces.restore)
            for name, part in self._module.named_modules():
                stack.callback(part.register_forward_pre_hook(self._entering(name), prepend=True).remove)
                stack.callback(part.register_forward_hook(self._hook(name)).remove)
            if torch.is_grad_enabled():
                stack.enter_context(self._traces.aside())
            stack.enter_context(_eagerly(self._module))
            yield

    def difference(self, case: Case) -> str | None:
        """What differs, and by how much; None where nothing does.

        Raises Unable where the forwards cannot be compared. Where random numbers are drawn, `Undrawn` makes constants
        of them, and modules are in evaluation mode if they draw yet others.
        """
        while True:
            calm = evaluation_mode([self._module]) if self._draws == _OTHERS else nullcontext()
            try:
                with calm:
                    return self._difference(case)
            except _Draws:
                if self._draws == _OTHERS:
                    raise Unable("its forward, or another thread all the time, draws random numbers") from None
                self._draws += 1  # also for the cases to come

    def _difference(self, case: Case) -> str | None:
        self._case, self._tokens, self._trains = case, sum(case.lengths), case.trains and torch.is_grad_enabled()
        self._undrawn = Undrawn(per_forward=case.parts is None) if self._draws else None
        self._alike = Alike(case.passes, self._tokens) if case.alike else None
        self._whole: dict[_Key, Tensor] = {}
        self._usual: dict[_Key, tuple[Tensor, float]] = {}  # of these: the size of each token, and the usual one
        self._gradients: dict[_Key, Tensor] = {}
        self._returned: _Seen = {}  # by parts
        self._same: dict[_Key, _Key] = {}  # what is given to a part, or returned by it, of what another has returned
        self._forced: _Seen = {}  # what stands in the place of what parts return
        self._followed: set[_Key] = set()  # of which gradients are noted
        self._takers: dict[_Key, str] = {}  # the part that is given what another has returned
        try:
            whole = self._run_whole()
            try:
                found = self._run_parts(case.lengths)
            except Unable:
                # layers that go on from a state may not do so for a single token: its slice raises in any step
                if case.parts is not None or case.lengths[1:2] != [1]:
                    raise
                found = self._run_parts([case.lengths[0], sum(case.lengths[1:])])
            return (
                self._first_that_differs()
                or self._other_numbers_compared()
                or self._other_outputs(whole, found)
                or self._other_gradients(whole, found)
            )
        finally:  # their hooks have this, and a circle of tensors and hooks is not found by garbage collection
            self.compares = self._alike is not None and self._alike.compares
            self._returned.clear()
            self._forced.clear()

    def _run_whole(self) -> _Found:
        found, drawn = self._run_whole_once(), self._traces.drawn()
        for attempt in range(_ATTEMPTS):
            if not drawn:
                break
            time.sleep(0.001 * 2**attempt)
            before, found, drawn = drawn, self._run_whole_once(), self._traces.drawn()
            if are_same(before, drawn):
                break  # the module has drawn, as it does each time; other threads draw on
        if (others := sorted(drawn.keys() - {"torch", "cuda"})) and self._case.parts is None:
            library = {"python": "Python", "numpy": "NumPy"}[others[0]]
            raise Unable(f"its forward draws random numbers of {library}, once for all tokens")
        if drawn:
            raise _Draws
        counted = self._case.counted
        for leaf in found.outputs[0]:
            if leaf.is_floating_point() and leaf.dim() > 1 and leaf.shape[1] == self._tokens and type(leaf) is Tensor:
                flat = leaf.unsqueeze(-1).flatten(2)
                if not bool(torch.isfinite(flat if counted is None else flat[counted]).all()):
                    raise Unable("it gives NaN or infinity")
        return found

    def _run_whole_once(self) -> _Found:
        """With the first of its side inputs that it runs with."""
        for number, side in enumerate(self._case.wholes):
            self._in_parts = False
            for seen in (self._whole, self._returned, self._same, self._takers):
                seen.clear()
            self._traces.restore()
            try:
                if side.get("carry") is not None:
                    side = {**side, "carry": carries_of([self._tokens])[0]}  # one of before has noted its calls
                return self._run([(0, self._tokens)], [side], None)
            except Exception as error:
                self._watches = False
                torch.clear_autocast_cache()
                if number + 1 == len(self._case.wholes):
                    raise Unable(f"{type(error).__name__}: {error}") from error
        raise AssertionError("a case has side inputs of the whole")

    def _run_parts(self, lengths: Sequence[int]) -> _Found:
        self._traces.restore()
        self._in_parts = True
        self._places = [*pairwise(accumulate(lengths, initial=0))]
        self._forced.clear()
        self._errors: list[tuple[_Key, float]] = []  # of what is not exact
        self._off: list[tuple[_Key, Tensor]] = []  # of gradients: by how much
        sides = self._case.parts or [{}] * len(self._places)
        try:
            return self._run(self._places, sides, None if self._case.keeps_attributes else self._traces)
        except Exception as error:
            where = f" in {self._named(self._running[-1])}" if self._watches and self._running else ""
            raise Unable(f"{type(error).__name__}{where}: {error}", in_parts=True) from error
        finally:
            self._watches = False

    def _run(
        self, places: Sequence[tuple[int, int]], sides: Sequence[Mapping[str, Any]], traces: Traces | None
    ) -> _Found:
        """Forwards of the tokens of these places, from the first to the last, and their backwards from the last on.

        traces: by which attributes are put back between forwards.
        """
        queue, losses = WGradQueue(), AuxiliaryLosses()
        lengths = [end - start for start, end in places]
        in_slices = self._in_parts and self._case.parts is None
        carries = Carries(gpipe(1, 1, slices=lengths) if in_slices else gpipe(1, len(places)))
        outputs, given = [], []
        for number, (place, side) in enumerate(zip(places, sides, strict=True)):
            if traces is not None and number:
                traces.restore_attributes()
            inputs, keywords = self._arguments(place, side)
            carried = carries.begin(number, lengths[number], inputs, sum(lengths))
            share = self._share(lengths[number], carried.get("carry"))
            self._place = place
            self._calls: Counter[str] = Counter()
            self._running: list[str] = []  # parts, the innermost last
            self._watches = True
            if self._alike is not None:
                self._alike.begin(place, tensors_in(inputs), self._running)
            with (
                torch.set_grad_enabled(self._trains),
                queue.defer(number),
                losses.during(number, share),
                nullcontext() if self._alike is None else self._alike,
                self._calm(number),
            ):
                queue._in_slice = in_slices
                outputs.append(self._call(inputs, {**keywords, **carried}))
                queue._in_slice = self._watches = False
                carries.end_forward(number, carried)
            given.append([leaf for leaf in tensors_in(inputs) if leaf.requires_grad])
        leaves = [*map(tensors_in, outputs)]
        if not self._trains:
            queue.discard()  # W of losses that compute their gradients in a forward
            return _Found(_detached(leaves), [], {}, self._traces.buffers())
        cotangents = self._cotangents(leaves)
        for number in reversed(range(len(places))):
            ends = [
                (leaf, cotangent)
                for leaf, cotangent in zip(leaves[number], cotangents[number], strict=True)
                if cotangent is not None and leaf.requires_grad
            ]
            ends += carries.gradients(number)
            self._place = places[number]
            if ends:
                roots, arrived = zip(*ends, strict=True)
                with queue.defer(number), losses.during(number), self._calm(number):
                    torch.autograd.backward(roots, arrived)
            carries.end_backward(number)
        queue.run([*range(len(places))])  # those of one weight at once: its gradient is read and written once
        of_inputs = [self._together(parts) for parts in zip(*given, strict=True)]
        parameters = take_gradients(self._module)
        return _Found(_detached(leaves), of_inputs, parameters, self._traces.buffers())

    def _calm(self, number: int) -> AbstractContextManager[Any]:
        """What a pass of a part runs in, so that it draws no random numbers."""
        if self._undrawn is None:
            return nullcontext()
        self._undrawn.begin(number if self._in_parts else None)
        return self._undrawn

    def _together(self, leaves: Sequence[Tensor]) -> Tensor:
        """The gradient of an input, of which every part was given its own leaf."""
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else local_part(leaf.grad) for leaf in leaves]
        by_token = all(_is_of(each, place) for each, place in zip(gradients, self._placed(len(leaves)), strict=True))
        return torch.cat(gradients, 1) if by_token else sum(gradients[1:], gradients[0])

    def _arguments(self, place: tuple[int, int], others: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What the module is given for these tokens; inputs that take a gradient take one of their own."""
        inputs, side, more = cut((self._case.inputs, dict(self._case.side), dict(others)), self._tokens, place)
        if isinstance(inputs, dict):
            inputs = {name: more.pop(name, value) for name, value in inputs.items()}

        shares = len(self._places) if self._in_parts and self._case.divides else 1
        whole = {id(leaf) for leaf in tensors_in(self._case.inputs) if self._case.is_sum(leaf)}

        def own(leaf: Tensor) -> Tensor:
            values = leaf.detach() / shares if id(leaf) in whole else leaf.detach().clone()
            return values.requires_grad_(leaf.requires_grad and self._trains)

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
            elif all(_is_of(part, place) for part, place in zip(parts, self._placed(len(parts)), strict=True)):
                whole = torch.randn(first.shape[0], self._tokens, *first.shape[2:], generator=generator)
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
        return self._places if count == len(self._places) else [(0, self._tokens)]

    # ---- what differs

    def _first_that_differs(self) -> str | None:
        """The part that first returned something else, or was given another gradient, and by how much."""
        exact = self._exact()
        wrong = [(key, error) for key, error in self._errors if not error <= exact]
        for key, error in wrong:
            if not key.is_input:
                # its inputs are something else, so that it is not the one: that was computed around it
                before = any(other[:2] == key[:2] and other.is_input for other, _ in wrong)
                name = self._around(key.part) if before else key.part
                return f"{self._named(name)} computes something else, {by_how_much(error)},"
        sizes = {key: float(largest(gradient)) for key, gradient in self._gradients.items()}
        usual = median(sizes.values())
        for key, off in self._off:
            if not (error := relative_error(off, sizes[key], usual)) <= exact:
                taker = self._takers.get(key)
                name = self._around(key.part) if taker is None else taker
                return f"{self._named(name)} gives another gradient for what it is given, {by_how_much(error)},"
        return None

    def _other_numbers_compared(self) -> str | None:
        """What is compared with a threshold, or is one, that is another number for a part."""
        compared = {} if self._alike is None else self._alike.compared
        expected = compared.get((0, self._tokens), [])
        for place in self._places:
            for (name, one), (_, other) in zip(expected, compared.get(place, []), strict=False):
                one = one[:, slice(*place)] if _is_of(one, (0, self._tokens)) else one
                if one.shape == other.shape and not (error := error_of(other, one, 0.0)) <= self._exact():
                    return f"{self._named(name)} compares something else, {by_how_much(error)},"
        return None

    def _other_outputs(self, whole: _Found, found: _Found) -> str | None:
        """Outputs of the module that are not of single tokens: the same in all parts, or sums over them."""
        if self._case.parts is not None:
            return None
        exact = self._exact()
        for one, parts in zip(whole.outputs[0], zip(*found.outputs, strict=True), strict=True):
            plain = type(one) is Tensor and one.is_floating_point()
            if not plain or all(_is_of(part, place) for part, place in zip(parts, self._places, strict=True)):
                continue
            if not all(part.shape == one.shape for part in parts) or not self._is_sum_or_same(one, parts, exact):
                return f"{self._named('')} returns a tensor {list(one.shape)} of no tokens that is something else,"
        # each forward may bring one a little nearer to where it ends: more of them in slices
        exact = exact / 100 if exact == _EXACT else exact
        for name, buffer in whole.buffers.items():
            after = found.buffers.get(name)  # a table that grows with what it is asked for has another shape
            if after is not None and after.shape == buffer.shape and not are_close(after, buffer, exact):
                return f"{self._named(name.rpartition('.')[0])} leaves something else in its buffer {name}"
        return None

    def _is_sum_or_same(self, one: Tensor, parts: Sequence[Tensor], exact: float) -> bool:
        """Whether an output is the same in all parts, or a sum over them: to which each adds what it has been given."""
        total = sum(parts[1:], parts[0])
        given = [each for each in tensors_in(self._case.inputs) if each.shape == one.shape]
        sums = [total, *(total - (len(parts) - 1) * local_part(each.detach()) for each in given)]
        return all(are_close(part, one, exact) for part in parts) or any(are_close(each, one, exact) for each in sums)

    def _other_gradients(self, whole: _Found, found: _Found) -> str | None:
        """Gradients of inputs and weights; of zero, but for rounding, is what is far below the usual size."""
        exact = self._exact()
        for one, other in zip(whole.of_inputs, found.of_inputs, strict=True):
            error = error_of(self._of_counted(other), self._of_counted(one), 0.0)
            if not _is_of(one, (0, self._tokens)):  # of all tokens, or of a sum that goes from chunk to chunk
                error = min(error, error_of(other / len(self._places), one, 0.0))
            if not error <= exact:
                return f"the gradient of what it ({self._kind('')}) is given is something else, {by_how_much(error)},"
        sizes = {name: float(largest(gradient)) for name, gradient in whole.parameters.items() if gradient.numel()}
        usual = median(sizes.values())
        for name, like in {**found.parameters, **whole.parameters}.items():
            one, other = (
                each.parameters[name] if name in each.parameters else torch.zeros_like(like) for each in (whole, found)
            )
            if not (error := error_of(other, one, usual, sizes.get(name))) <= exact:
                owner = name.rpartition(".")[0]
                return f"the gradient of {name} ({self._kind(owner)}) is something else, {by_how_much(error)},"
        return None

    def _of_counted(self, tensor: Tensor) -> Tensor:
        counted = self._case.counted
        return tensor if counted is None or tensor.shape[:2] != counted.shape else tensor[counted]

    def _around(self, name: str) -> str:
        """The part whose forward runs another."""
        called = {key.part for key in self._whole}
        while name:
            name = name.rpartition(".")[0]
            if name in called:
                break
        return name

    def _named(self, name: str) -> str:
        return f"{name or 'it'} ({self._kind(name)})"

    def _kind(self, name: str) -> str:
        try:
            return type(self._module.get_submodule(name)).__name__
        except AttributeError:  # of a parameter that FSDP2 knows by another name
            return type(self._module).__name__

    def _exact(self) -> float:
        """How much rounding may leave in a part."""
        if self._of_8_bits:
            return _EXACT_8_BITS
        if self._bytes <= 2:
            return _EXACT_16_BITS
        return _EXACT if torch.get_float32_matmul_precision() == "highest" else _EXACT_TF32

    # ---- what is seen

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(part: nn.Module, inputs: Any) -> None:
            if self._watches:
                self._running.append(name)

        return hook

    def _hook(self, name: str) -> Callable[..., Any]:
        def hook(part: nn.Module, inputs: Any, output: Any) -> Any:
            if not self._watches:
                return None  # what a checkpoint runs again in a backward
            while self._running and self._running.pop() != name:
                pass  # parts whose forwards a module has ended by an exception of its own
            with torch._C.DisableTorchFunction():  # no mode sees what is done here
                return watched(inputs, output)

        def watched(inputs: Any, output: Any) -> Any:
            call = self._calls[name]
            self._calls[name] += 1
            plain = all(isinstance(each, Tensor) for each in inputs)
            for at, leaf in enumerate(inputs if plain else pytree.tree_leaves(inputs)):
                self._seen(_Key(name, call, at, True), leaf)
            if isinstance(output, Tensor):  # as most are: a walk takes microseconds
                seen = self._seen(_Key(name, call, 0, False), output)
                return None if seen is output else seen
            leaves, structure = pytree.tree_flatten(output)
            seen = [self._seen(_Key(name, call, at, False), leaf) for at, leaf in enumerate(leaves)]
            changed = any(one is not other for one, other in zip(seen, leaves, strict=True))
            return pytree.tree_unflatten(seen, structure) if changed else None

        return hook

    def _seen(self, key: _Key, leaf: Any) -> Any:
        """Keeps what is returned for the whole, and gives it in the place of what is returned for a part."""
        if self._alike is not None and not key.is_input:
            self._alike.note(leaf)
        tensor = leaf if type(leaf) is Tensor else local_part(arrived(leaf))
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.dim() < 2 or not tensor.numel():
            return leaf
        self._bytes = min(self._bytes, tensor.element_size())
        if not self._in_parts:
            return self._kept(key, leaf, tensor) if tensor.shape[1] == self._tokens else leaf
        if (same := _found_in(self._forced, leaf)) is not None and same == self._same.get(key):
            return leaf  # it was compared where it was returned
        whole, place = self._whole.get(key), slice(*self._place)
        if whole is None or whole[:, place].shape != tensor.shape:
            return leaf
        self._compare(key, whole, tensor.detach(), place)
        if type(leaf) is not Tensor or key.is_input:
            return leaf
        forced = leaf.clone()
        forced.data.copy_(whole[:, place])  # past autograd's sight, which has nothing of a copy
        if key in self._followed and forced.requires_grad:
            forced.register_hook(partial(self._arrived, key, place))
        self._forced[id(forced)] = forced, forced._version, key
        if self._alike is not None:
            self._alike.note(forced)
        return forced

    def _kept(self, key: _Key, leaf: Any, tensor: Tensor) -> Any:
        """Keeps what is seen in the whole; what is returned is a copy, whose gradient is of what becomes of it."""
        if (same := _found_in(self._returned, leaf)) is not None:
            self._same[key], self._whole[key] = same, self._whole[same]
            if key.is_input:
                self._takers.setdefault(same, key.part)
            return leaf
        self._whole[key] = tensor.detach().clone()
        if key.is_input:
            return leaf
        if type(leaf) is not Tensor or not leaf.requires_grad or not self._trains:
            return leaf
        copy = leaf.clone()
        self._returned[id(copy)] = copy, copy._version, key
        self._followed.add(key)
        copy.register_hook(partial(self._note_gradient, key))
        return copy

    def _compare(self, key: _Key, whole: Tensor, tensor: Tensor, place: slice) -> None:
        if key not in self._usual:
            sizes = sizes_of(whole)
            self._usual[key] = sizes, float(sizes.nanmedian())
        sizes, usual = self._usual[key]
        off = whole[:, place] - tensor
        if float(largest(off)) <= self._exact() * usual:
            return
        off = sizes_of(torch.where(whole[:, place] == tensor, 0, off))
        off = off.masked_fill(whole[:, place].isnan().unsqueeze(-1).flatten(2).any(2), 0)
        counted = self._case.counted
        if counted is not None:
            if sizes.shape != counted.shape:
                return
            off = off.masked_fill(~counted[:, place] & ~off.isnan(), 0)  # a gradient of zero times NaN is NaN
        error = off / sizes[:, place].clamp_min(sizes.nanmedian()).clamp_min(torch.finfo(sizes.dtype).tiny)
        self._errors.append((key, float(torch.where(off == 0, 0, error).max())))  # also where both are NaN

    def _note_gradient(self, key: _Key, gradient: Tensor) -> None:
        """Of what a part has returned for the whole."""
        self._gradients[key] = gradient.detach().clone()

    def _arrived(self, key: _Key, place: slice, gradient: Tensor) -> Tensor:
        """Compares the gradient that came for what a part has returned; the whole's goes on in its place."""
        whole = self._gradients.get(key)
        if whole is None:
            whole = self._gradients[key] = torch.zeros_like(self._whole[key])
        wanted = whole[:, place]
        off = torch.where(wanted == gradient, 0, wanted - gradient)
        counted = self._case.counted
        if counted is not None:
            counted = counted[:, place] if off.shape[:2] == counted[:, place].shape else None
        self._off.append((key, largest(off if counted is None else off[counted])))
        return wanted


class _Found(NamedTuple):
    """Of a run: outputs of each part, gradients of inputs and of weights, and buffers."""

    outputs: list[list[Tensor]]
    of_inputs: list[Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _found_in(seen: _Seen, leaf: Any) -> _Key | None:
    """The key of a tensor that was seen, and has not been written since."""
    found = seen.get(id(leaf))
    return None if found is None or found[1] != leaf._version else found[2]


def _detached(outputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[local_part(leaf.detach()) for leaf in each] for each in outputs]


def _is_of(tensor: Tensor, place: tuple[int, int]) -> bool:
    """Whether a tensor is of the tokens of a place, as far as its shape tells."""
    return tensor.dim() > 1 and tensor.shape[1] == place[1] - place[0]


@contextmanager
def _alone() -> Iterator[None]:
    """Inside, no pass beside this one goes on, whose gradients would be taken for those of a probe."""
    give_way, thread.give_way = thread.give_way, None
    try:
        yield
    finally:
        thread.give_way, thread.in_slice = give_way, False


@contextmanager
def _eagerly(module: nn.Module) -> Iterator[None]:
    """Inside, nothing is compiled: hooks of parts run, and no code is made for a few tokens."""
    if all(part._compiled_call_impl is None and "_orig_mod" not in part._modules for part in module.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
