"""What autograd saves in a forward that an R runs again: all of it, or named parts, such as norms and whole layers.

Of what runs again only what it was given is kept, by whoever saves it anyway in most cases. What it saves itself, and
what a part returns, wherever that is saved later, is there again after the R.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.data_parallel import is_sharded
from zbkern.pipeline.runtime.forward_state import ForwardState
from zbkern.pipeline.runtime.memory.saved_tensors import Saved, SavedTensors
from zbkern.pipeline.runtime.memory.storages import Storages, keys, parts
from zbkern.pipeline.runtime.replicas.data_parallel import gathered
from zbkern.pipeline.transport.tensors import tensors_in, wait_for
from zbkern.wgrad.checksums import are_same, sums_of
from zbkern.wgrad.storages import storage_key


def parts_of(module: torch.nn.Module, named: Sequence[str | type], name: str = "") -> dict[torch.nn.Module, Any]:
    """The outermost modules in a module that one of `named` names: patterns of their names, or classes; each with the
    module of FSDP2 that gathers its weights for it, or None.

    name: of the module itself, which is then one of them. Stand-ins for layers of other ranks, which `cut` leaves in a
    chunk, are none.
    """
    found: dict[str, torch.nn.Module] = {}
    sharded: list[tuple[str, torch.nn.Module]] = []  # parents first
    for path, part in module.named_modules(prefix=name):
        within = any(path.startswith(f"{outer}.") for outer in found)
        here = path and not within and not getattr(type(part), "held_elsewhere", False)
        if here and any(fnmatchcase(path, each) if isinstance(each, str) else isinstance(part, each) for each in named):
            found[path] = part
        if is_sharded(part):
            sharded.append((path, part))
    above = {path: [owner for outer, owner in sharded if not outer or path.startswith(f"{outer}.")] for path in found}
    return {part: above[path][-1] if above[path] and not is_sharded(part) else None for path, part in found.items()}


class _Later(NamedTuple):
    """A tensor that is saved after a part, in the memory of one of its outputs: which, and where there."""

    saved: Saved
    output: int
    dtype: torch.dtype
    place: tuple[Any, ...]  # offset, shape, strides

    def fill(self, outputs: Sequence[Any]) -> Tensor:
        """The tensor in the memory of the outputs that were computed again; fills its place."""
        memory = outputs[self.output].untyped_storage()
        return self.saved.fill(torch.empty(0, dtype=self.dtype, device=memory.device).set_(memory, *self.place))


class _Input:
    """A tensor that a forward was given, in its arguments."""

    def __init__(self, saved: Saved, requires_grad: bool) -> None:
        self._saved, self._requires_grad = saved, requires_grad

    @property
    def tensor(self) -> Tensor:
        return self._saved.get().detach().requires_grad_(self._requires_grad)


class _Run:
    """A forward that is to run again, of a part or of everything: `call` with what it was `given`, where an `_Input` is
    in the place of every tensor; and what an R fills."""

    def __init__(self, call: Callable[..., Any], given: Any, module: torch.nn.Module, device: torch.device) -> None:
        self.call, self.given, self.module = call, given, module
        self.before = ForwardState([module], device)
        self.autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.sums: list[Tensor] | None = None  # of its outputs, to be compared
        self.inside: list[Saved] = []
        self.later: list[_Later] = []


class RecomputedTensors(SavedTensors):
    """The same of a forward of which an R runs parts again, or everything: `recompute` fills in what these save.

    parts: these, each with the module of FSDP2 that gathers its weights, or None. compares: what they return, the first
    and the second time.
    """

    def __init__(self, storages: Storages, parts: Mapping[torch.nn.Module, Any], compares: bool) -> None:
        super().__init__(storages)
        self._parts, self._compares = parts, compares
        self._runs: list[_Run] = []
        self._within: torch.nn.Module | None = None  # what runs, of that which runs again
        self._given: list[tuple[Tensor, int]] = []  # to it, with their versions
        self._outputs: dict[int, tuple[weakref.ref[Any], int, _Run, int]] = {}  # by key: version, run, and which

    @contextmanager
    def saving(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(part.register_forward_hook(self._leave).remove)
            stack.enter_context(super().saving())
            yield
        self._outputs.clear()

    def begin(self, module: torch.nn.Module, call: Callable[..., Any], arguments: Any, keywords: Any) -> None:
        """What comes, until `end`, is call(*arguments, **keywords), in which `module` runs: all of it again."""
        self._given = [(tensor, tensor._version) for tensor in tensors_in((arguments, keywords))]
        given = pytree.tree_map_only(Tensor, lambda t: _Input(self._pack(t), t.requires_grad), (arguments, keywords))
        self._runs.append(_Run(call, given, module, self.storages.device))
        self._within = module

    def end(self, outputs: Any) -> None:
        """What `begin` began has given these outputs."""
        if self._within is not None:
            self._runs[-1].before.keep_written()
            self._runs[-1].sums = _sums(outputs) if self._compares else None
            self._within = None

    def computed_again(self, outputs: Any) -> int:
        """Bytes of the tensors among these that are outputs of parts, for inside `saving`."""
        again = [tensor for tensor in tensors_in(outputs) if self._output(tensor) is not None]
        return sum({storage_key(each): each.untyped_storage().nbytes() for each in again}.values())

    def recompute(self, defer: Callable[[], AbstractContextManager[Any]]) -> None:
        """Runs what is to run again, in the order in which it ran; defer: what a forward of the chunk runs in."""
        runs, self._runs = self._runs, []
        for run in runs:
            arguments, keywords = pytree.tree_map_only(_Input, lambda given: given.tensor, run.given)
            run.before.restore()
            filled = itertools.count()
            fill = partial(self._fill, run.inside, filled)
            enabled, dtype = run.autocast
            autocast = torch.autocast(self.storages.device.type, dtype, enabled)
            hooks = torch.autograd.graph.saved_tensors_hooks(fill, Saved.get)
            with defer(), gathered(self._parts.get(run.module)), autocast, hooks:
                outputs = pytree.tree_leaves(run.call(*arguments, **keywords))
            _check_repeated(run, next(filled), outputs)
            for later in run.later:
                self.storages.add(later.fill(outputs))

    def _fill(self, places: Sequence[Saved], filled: Iterator[int], tensor: Tensor) -> Saved:
        """Fills the places that the first forward has left, in their order."""
        index = next(filled)
        saved = places[index] if index < len(places) else Saved()
        self.storages.add(saved.fill(tensor))
        return saved

    def _enter(self, part: torch.nn.Module, arguments: Any, keywords: Any) -> None:
        if self._within is None and self._saves():
            self.begin(part, part, arguments, keywords)

    def _saves(self) -> bool:
        """Whether what is saved now comes here: not within a checkpoint, which runs its layers again by itself, nor
        where gradients are off."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return torch.is_grad_enabled() and hooks is not None and hooks[0] == self._pack

    def _leave(self, part: torch.nn.Module, arguments: Any, output: Any) -> None:
        if self._within is not part:
            return
        given, self._given, run = self._given, [], self._runs[-1]
        self.end(output)
        if any(tensor._version != version for tensor, version in given):
            raise RuntimeError(
                f"{type(part).__name__} modifies what it is given in place, so that it cannot run again alone; name "
                "what contains it in StepOptions(recompute=...), or have it return another tensor"
            )
        passed_on = keys(tensor for tensor, _ in given)
        for index, leaf in enumerate(pytree.tree_leaves(output)):
            if type(leaf) is Tensor and leaf.layout is torch.strided and storage_key(leaf) not in passed_on:
                self._outputs[storage_key(leaf)] = weakref.ref(leaf.untyped_storage()), leaf._version, run, index

    def _pack(self, tensor: Tensor) -> Saved:
        if self._within is not None:
            self._runs[-1].inside.append(Saved())
            return self._runs[-1].inside[-1]
        if (output := self._output(tensor)) is not None:
            run, index = output
            place = int(tensor.storage_offset()), tensor.shape, tensor.stride()
            run.later.append(_Later(Saved(), index, tensor.dtype, place))
            return run.later[-1].saved
        return super()._pack(tensor)

    def _output(self, tensor: Tensor) -> tuple[_Run, int] | None:
        """The run of a part, and which of its outputs this tensor is, or a view of it."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or storage_key(tensor) not in self._outputs:
            return None
        storage, version, run, index = self._outputs[storage_key(tensor)]
        # else another storage has its key, or it changed
        return (run, index) if storage() is not None and version == tensor._version else None


_ROUNDING = 1e-2  # of sums in no fixed order, to the usual one


def _check_repeated(run: _Run, saved: int, outputs: Sequence[Any]) -> None:
    """Raises RuntimeError where the second forward has saved other tensors than the first, or given other outputs."""
    if saved != len(run.inside):
        difference = f"saved {len(run.inside)} tensors for backward, and {saved}"
    elif run.sums is not None and not are_same(run.sums, _sums(outputs), rounding=_ROUNDING):
        difference = "gave one result, and another"
    else:
        return
    raise RuntimeError(
        f"{type(run.module).__name__} {difference} when it ran again: a module whose forward depends on anything but "
        "its inputs, parameters, buffers and the random numbers of torch and Python cannot be recomputed (a generator "
        "of its own, NumPy's, a counter; docs/offload.md)"
    )


def _sums(outputs: Any) -> list[Tensor]:
    """Those of every tensor."""
    return sums_of(part for tensor in tensors_in(outputs) for part in parts(wait_for(tensor.detach())))
