"""What autograd saves in a forward that an R runs again: all of it, or named parts, such as norms and whole layers.

Of what runs again only what it was given is kept, by whoever saves it anyway in most cases. What it saves itself, and
what a part returns, wherever that is saved later, is there again after the R.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from zbkern.data_parallel import is_sharded
from zbkern.pipeline.runtime.forward_state import ForwardState
from zbkern.pipeline.runtime.memory.storages import Saved, Storages, keys, parts
from zbkern.pipeline.runtime.replicas.data_parallel import gathered
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.wgrad.checksums import are_same, sums_of
from zbkern.wgrad.storages import storage_key

Parts = Mapping[nn.Module, Any]  # what runs again, each with the module of FSDP2 that gathers its weights, or None


def parts_of(module: nn.Module, named: Sequence[str | type], name: str = "") -> dict[nn.Module, Any]:
    """The outermost modules in a module that one of `named` names: patterns of their names, or classes.

    name: of the module itself, which is then one of them. Stand-ins for layers of other ranks, which `cut` leaves in a
    chunk, are none.
    """
    parts: dict[str, nn.Module] = {}
    sharded: list[tuple[str, nn.Module]] = []  # parents first
    for path, part in module.named_modules(prefix=name):
        within = any(path.startswith(f"{outer}.") for outer in parts)
        here = path and not within and not getattr(type(part), "held_elsewhere", False)
        if here and any(fnmatchcase(path, each) if isinstance(each, str) else isinstance(part, each) for each in named):
            parts[path] = part
        if is_sharded(part):
            sharded.append((path, part))
    above = {path: [owner for outer, owner in sharded if not outer or path.startswith(f"{outer}.")] for path in parts}
    return {part: above[path][-1] if above[path] and not is_sharded(part) else None for path, part in parts.items()}


def named_parts(module: nn.Module, chunk: int, named: Sequence[str | type]) -> Parts:
    """`parts_of` a chunk that has an R. Raises ValueError where it has none of them."""
    parts = parts_of(module, named)
    if named and not parts:
        names = [name for name, _ in module.named_modules()][1:9]
        raise ValueError(
            f"StepOptions: recompute must name a part of every chunk that has an R in the schedule; chunk {chunk} has "
            f"none for {tuple(named)}; its modules are {names} and so on"
        )
    return parts


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


@dataclass(frozen=True)  # no tuple: pytree would look into it
class _Input:
    """A tensor that a forward was given, in its arguments."""

    saved: Saved
    requires_grad: bool

    def tensor(self) -> Tensor:
        return self.saved.get().detach().requires_grad_(self.requires_grad)


class _Run:
    """A forward that is to run again, of a part or of everything: `call` with its `arguments`, where an `_Input` is
    in the place of every tensor; and what an R fills."""

    def __init__(self, call: Callable[..., Any], arguments: Any, module: nn.Module, device: torch.device) -> None:
        self.call, self.arguments, self.module = call, arguments, module
        self.before = ForwardState([module], device)
        self.autocast = torch.autocast(
            device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        )
        self.sums: list[Tensor] | None = None  # of its outputs, to be compared
        self.inside: list[Saved] = []
        self.later: list[_Later] = []


class Recomputation:
    """A forward of which an R runs parts again, or everything: `run` fills in what these have saved.

    storages: where all is counted. parts: these, each with the module of FSDP2 that gathers its weights, or None.
    compares: what they return, the first and the second time.
    """

    def __init__(self, storages: Storages, parts: Parts, compares: bool) -> None:
        self._storages, self._parts, self._compares = storages, parts, compares
        self._runs: list[_Run] = []
        self._within: nn.Module | None = None  # what runs, of that which runs again
        self._inputs: list[tuple[Tensor, int]] = []  # of that, with their versions
        self._outputs: dict[int, tuple[weakref.ref[Any], int, _Run, int]] = {}  # by key: version, run, and which
        self.output_bytes = 0  # of the outputs, what the R computes again

    def forward(self, module: nn.Module, call: Callable[..., Any], *arguments: Any) -> Any:
        """The first one: what call(*arguments) returns, in which the module runs."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(part.register_forward_hook(self._leave).remove)
            stack.enter_context(saved_tensors_hooks(self._pack, Saved.get))
            if not self._parts:
                self._begin(module, call, arguments, {})
            outputs = call(*arguments)
            if not self._parts:
                self._end(outputs)
        again = [tensor for tensor in tensors_in(outputs) if self._output(tensor) is not None]
        self.output_bytes = sum({storage_key(each): each.untyped_storage().nbytes() for each in again}.values())
        self._outputs.clear()
        return outputs

    def run(self, defer: Callable[[], AbstractContextManager[Any]]) -> None:
        """Runs what is to run again, in the order in which it ran; defer: what a forward of the chunk runs in."""
        for run in self._runs:
            arguments, keywords = pytree.tree_map_only(_Input, _Input.tensor, run.arguments)
            run.before.restore()
            filled = itertools.count()
            hooks = saved_tensors_hooks(partial(self._fill, run.inside, filled), Saved.get)
            with defer(), gathered(self._parts.get(run.module)), run.autocast, hooks:
                outputs = pytree.tree_leaves(run.call(*arguments, **keywords))
            _check_repeated(run, next(filled), outputs)
            for later in run.later:
                self._storages.add(later.fill(outputs))

    def _begin(self, module: nn.Module, call: Callable[..., Any], arguments: Any, keywords: Any) -> None:
        """Begins what an R runs again: call(*arguments, **keywords), in which `module` runs, until `_end`."""
        self._inputs = [(tensor, tensor._version) for tensor in tensors_in((arguments, keywords))]
        inputs = pytree.tree_map_only(Tensor, lambda t: _Input(self._pack(t), t.requires_grad), (arguments, keywords))
        self._runs.append(_Run(call, inputs, module, self._storages.lanes.device))
        self._within = module

    def _end(self, outputs: Any) -> None:
        """Ends what `_begin` began, which has given these outputs."""
        self._runs[-1].before.keep_written()
        self._runs[-1].sums = _sums(outputs) if self._compares else None
        self._within = None

    def _enter(self, part: nn.Module, arguments: Any, keywords: Any) -> None:
        if self._within is None and self._saves():
            self._begin(part, part, arguments, keywords)

    def _saves(self) -> bool:
        """Whether what is saved now comes here: not within a checkpoint, which runs its layers again by itself, nor
        where gradients are off."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return torch.is_grad_enabled() and hooks is not None and hooks[0] == self._pack

    def _leave(self, part: nn.Module, arguments: Any, output: Any) -> None:
        if self._within is not part:
            return
        inputs, self._inputs, run = self._inputs, [], self._runs[-1]
        self._end(output)
        if any(tensor._version != version for tensor, version in inputs):
            raise RuntimeError(
                f"{type(part).__name__} modifies what it is given in place, so that it cannot run again alone; name "
                "what contains it in StepOptions(recompute=...), or have it return another tensor"
            )
        passed_on = keys(tensor for tensor, _ in inputs)
        for index, leaf in enumerate(pytree.tree_leaves(output)):
            if type(leaf) is Tensor and leaf.layout is torch.strided and storage_key(leaf) not in passed_on:
                self._outputs[storage_key(leaf)] = weakref.ref(leaf.untyped_storage()), leaf._version, run, index

    def _pack(self, tensor: Tensor) -> Saved:
        if self._within is not None:
            saved = Saved()
            self._runs[-1].inside.append(saved)
        elif (output := self._output(tensor)) is not None:
            run, index = output
            saved = Saved()
            run.later.append(
                _Later(saved, index, tensor.dtype, (int(tensor.storage_offset()), tensor.shape, tensor.stride()))
            )
        else:
            saved = self._storages.save(tensor)
        return saved

    def _output(self, tensor: Tensor) -> tuple[_Run, int] | None:
        """The run of a part, and which of its outputs this tensor is, or a view of it."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or storage_key(tensor) not in self._outputs:
            return None
        storage, version, run, index = self._outputs[storage_key(tensor)]
        # else another storage has its key, or it changed
        return (run, index) if storage() is not None and version == tensor._version else None

    def _fill(self, places: Sequence[Saved], filled: Iterator[int], tensor: Tensor) -> Saved:
        """Fills the places that the first forward has left, in their order."""
        index = next(filled)
        saved = places[index] if index < len(places) else Saved()
        self._storages.add(saved.fill(tensor))
        return saved


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
    """The sums by which outputs are compared, of every tensor."""
    return sums_of(part for tensor in tensors_in(outputs) for part in parts(tensor.detach()))
