"""What autograd saves in a forward of which an R runs named parts again: norms, activation functions, whole layers.

Of such a part only what it was given is kept, by whoever saves it anyway in most cases. What it saves itself, and what
it returns, wherever that is saved later, is there again after the R.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zbkern.pipeline.runtime.data_parallel import gathered, is_sharded
from zbkern.pipeline.runtime.forward_state import ForwardState
from zbkern.pipeline.runtime.saved_tensors import Filling, Saved, SavedTensors, unpack
from zbkern.pipeline.runtime.storages import Storages, key, keys


def names_of_parts(module: torch.nn.Module, named: Sequence[str | type]) -> dict[str, torch.nn.Module]:
    """The outermost modules in a module that one of `named` names: patterns of their names, or classes.

    Stand-ins for layers of other ranks, which `cut` leaves in a chunk, are none.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, part in module.named_modules():
        within = any(name.startswith(f"{outer}.") for outer in found)
        here = name and not within and not getattr(type(part), "held_elsewhere", False)
        if here and any(_is_named(name, part, each) for each in named):
            found[name] = part
    return found


def parts_of(module: torch.nn.Module, chunk: int, named: Sequence[str | type]) -> dict[torch.nn.Module, Any]:
    """The parts of a chunk, each with the module of FSDP2 that gathers its weights for it, or None.

    Raises ValueError where there are none.
    """
    found = names_of_parts(module, named)
    if not found:
        names = [name for name, _ in module.named_modules()][1:9]
        raise ValueError(
            f"StepOptions: recompute must name a part of every chunk that has an R in the schedule; chunk {chunk} has "
            f"none for {tuple(named)}; its modules are {names} and so on"
        )
    sharded = [(name, part) for name, part in module.named_modules() if is_sharded(part)]  # parents first
    above = {name: [owner for outer, owner in sharded if not outer or name.startswith(f"{outer}.")] for name in found}
    return {part: above[name][-1] if above[name] and not is_sharded(part) else None for name, part in found.items()}


def _is_named(name: str, part: torch.nn.Module, pattern: str | type) -> bool:
    return fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(part, pattern)


class _Later:
    """A tensor that is saved after a part, in the memory of one of its outputs."""

    def __init__(self, saved: Saved, output: int, tensor: Tensor) -> None:
        self.saved, self._output = saved, output
        self._dtype, self._offset = tensor.dtype, int(tensor.storage_offset())
        self._shape, self._stride = tensor.shape, tensor.stride()

    def fill(self, outputs: Sequence[Any]) -> Tensor:
        """The tensor in the memory of the outputs that were computed again; fills its place."""
        memory = outputs[self._output].untyped_storage()
        found = torch.empty(0, dtype=self._dtype, device=memory.device)
        found.set_(memory, self._offset, self._shape, self._stride)
        self.saved.fill(found, None)
        return found


class _Input:
    """A tensor that a part was given, in its arguments."""

    def __init__(self, saved: Saved, requires_grad: bool) -> None:
        self._saved, self._requires_grad = saved, requires_grad

    @property
    def tensor(self) -> Tensor:
        return unpack(self._saved).detach().requires_grad_(self._requires_grad)


class _Run:
    """One run of a part: what it was given, with an `_Input` in the place of every tensor, and what an R fills."""

    def __init__(self, part: torch.nn.Module, given: Any, device: torch.device) -> None:
        self.part, self.given = part, given
        self.before = ForwardState([part], device)
        self.autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        self.inside: list[Saved] = []
        self.later: list[_Later] = []


class RecomputedParts(SavedTensors):
    """Inside `saving`, what autograd saves outside of `parts`; `recompute` fills in the rest."""

    def __init__(self, storages: Storages, parts: Mapping[torch.nn.Module, Any], device: torch.device) -> None:
        super().__init__(storages)
        self._parts, self._device = parts, device
        self._runs: list[_Run] = []
        self._within: torch.nn.Module | None = None  # the part that runs
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

    def computed_again(self, outputs: Any) -> int:
        """Bytes of the tensors among these that are outputs of parts, for inside `saving`."""
        tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        again = {key(each): each.untyped_storage().nbytes() for each in tensors if self._output(each) is not None}
        return sum(again.values())

    def recompute(self, defer: Callable[[], AbstractContextManager[Any]]) -> None:
        """Runs the parts again, in the order in which they ran; defer: what a forward of the chunk runs in."""
        runs, self._runs = self._runs, []
        for run in runs:
            arguments, keywords = pytree.tree_map_only(_Input, lambda given: given.tensor, run.given)
            run.before.restore()
            filling = Filling(run.inside, self.storages)
            enabled, dtype = run.autocast
            autocast = torch.autocast(self._device.type, dtype, enabled)
            with defer(), gathered(self._parts[run.part]), autocast, filling.filling():
                outputs = pytree.tree_leaves(run.part(*arguments, **keywords))
            filling.check(type(run.part).__name__)
            for later in run.later:
                self.storages.place(later.fill(outputs))

    def _enter(self, part: torch.nn.Module, arguments: Any, keywords: Any) -> None:
        if self._within is not None or not self._saves():
            return
        tensors = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        self._given = [(tensor, tensor._version) for tensor in tensors]
        given = pytree.tree_map_only(Tensor, lambda t: _Input(self._pack(t), t.requires_grad), (arguments, keywords))
        self._runs.append(_Run(part, given, self._device))
        self._within = part

    def _saves(self) -> bool:
        """Whether what is saved now comes here: not within a checkpoint, which runs its layers again by itself, nor
        where gradients are off."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return torch.is_grad_enabled() and hooks is not None and hooks[0] == self._pack

    def _leave(self, part: torch.nn.Module, arguments: Any, output: Any) -> None:
        if self._within is not part:
            return
        given, self._given, self._within = self._given, [], None
        self._runs[-1].before.keep_written()
        if any(tensor._version != version for tensor, version in given):
            raise RuntimeError(
                f"{type(part).__name__} modifies what it is given in place, so that it cannot run again alone; name "
                "what contains it in StepOptions(recompute=...), or have it return another tensor"
            )
        passed_on = keys(tensor for tensor, _ in given)
        for index, leaf in enumerate(pytree.tree_leaves(output)):
            if type(leaf) is Tensor and leaf.layout is torch.strided and key(leaf) not in passed_on:
                self._outputs[key(leaf)] = weakref.ref(leaf.untyped_storage()), leaf._version, self._runs[-1], index

    def _pack(self, tensor: Tensor) -> Saved:
        if self._within is not None:
            self._runs[-1].inside.append(Saved(None, None))
            return self._runs[-1].inside[-1]
        if (output := self._output(tensor)) is not None:
            run, index = output
            run.later.append(_Later(Saved(None, None), index, tensor))
            return run.later[-1].saved
        return super()._pack(tensor)

    def _output(self, tensor: Tensor) -> tuple[_Run, int] | None:
        """The run of a part, and which of its outputs this tensor is, or a view of it."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or key(tensor) not in self._outputs:
            return None
        storage, version, run, index = self._outputs[key(tensor)]
        # else another storage has its key, or it changed
        return (run, index) if storage() is not None and version == tensor._version else None
