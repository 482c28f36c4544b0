"""F, B and W of a chunk in CUDA graphs: one launch by the host for each, where a pass has hundreds.

A chunk has a slot for every microbatch that it holds at once, from its F to the end of its W. The graphs of a slot's F
and B read and write memory of the slot: what comes is copied in, and what goes is copied out. The W that a B leaves in
the queue read that memory, too; those of a microbatch, or of several that are merged, are one more graph, as long as
the gradients stay where they are. The loss, and what cannot be captured, run as they are written.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from zbkern import wgrad
from zbkern.pipeline.runtime.data_parallel import is_collective
from zbkern.pipeline.runtime.stage import Stage
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.wgrad import WGradQueue, accumulation

logger = logging.getLogger("zbkern")

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_users = torch._C._storage_Use_Count
_anchor = torch.empty(0, requires_grad=True)  # outputs have a graph also where no input has


class _NotCaptured(Exception):
    """Says why something runs as it is written."""


class CudaGraphs:
    """Captures what functions launch, all on one stream: memory of a pool is used again within a stream only."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def new_pool(self) -> Any:
        """Memory for graphs that are replayed in the order of their capture."""
        return torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
        """What function() has returned, whose values are still to come, and what runs its kernels.

        Not by torch.cuda.graph, which waits for the device: a message there may wait for what this rank sends next. For
        the same reason other threads may do what they like meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool, capture_error_mode="thread_local")
                result = function()
                graph.capture_end()
            except BaseException:
                self._end_failed(graph, pool)
                raise
        return result, graph.replay

    def _end_failed(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """If capture_end raises, torch's allocator and its random numbers believe that the capture goes on: the first
        is told, and the latter learn it as another capture ends."""
        with suppress(Exception):
            return graph.capture_end()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._stream.device.index, pool)
        after = torch.cuda.CUDAGraph()
        after.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=self._stream.device)
        return after.capture_end()


class GraphedStage(Stage):
    """A Stage whose passes are captured once values are no longer compared, from the third step on, and replayed.

    gradients: by parameter, what graphs of W add to; of all stages, which may share a parameter. Why something is not
    captured is logged, each reason once. What has failed is not tried again.
    """

    backend: ClassVar[Any] = CudaGraphs

    def __init__(self, *arguments: Any, device: torch.device, gradients: dict[Tensor, Tensor]) -> None:
        super().__init__(*arguments)
        self.device = device
        self._told: set[str] = set()
        self._captures = self._captures_w = device.type == self.backend.device_type
        if not self._captures:
            self._tell("F, B and W run", _NotCaptured(f"it is on {device}, not on a CUDA device"))
        self.graphs: Any = self.backend(device) if self._captures else None
        self.arrive: set[int] = set()  # the outputs of which gradients come back
        self._begun: set[int] = set()  # microbatches of this step
        self._unfit: _NotCaptured | None = None
        self._state: Mapping[str, Any] = {}
        self._form: Any = None  # of the inputs of all slots
        self._slots: list[_Slot] = []
        self._slot_of: dict[int, _Slot] = {}  # by microbatch, until its next F
        self._w_graphs: dict[tuple[_Slot, ...], Callable[[], None]] = {}
        self._gradients = gradients

    def backward_input(self, microbatch: int, gradients: Any, *, fused: bool = False) -> Any:
        return super().backward_input(microbatch, gradients, fused=fused and microbatch not in self._slot_of)

    def weight(self, *microbatches: int) -> None:
        try:
            self._replay_weight(microbatches)
        except Exception as why:
            self._tell("W run", why)
        super().weight(*microbatches)  # what is left of it

    def _call(self, inputs: Any, side: Mapping[str, Any]) -> Any:
        scope: Any = wgrad.current()
        if scope is None or not torch.is_grad_enabled():
            return super()._call(inputs, side)
        microbatch, arguments, slot = scope[1][1], (inputs, {**side}), None
        self._slot_of.pop(microbatch, None)
        try:
            slot = None if self.queue.check_values else self._free_slot(microbatch, arguments)
        except Exception as why:
            self._tell("F, B and W run", why)
        if slot is None:
            return self._watched(super()._call(inputs, side))
        self._slot_of[microbatch] = slot
        outputs = iter(_Replayed.apply(slot, _anchor, *tensors_in(arguments)))
        return pytree.tree_map(lambda leaf: next(outputs) if leaf is Tensor else leaf, slot.tree)

    def _tell(self, what: str, why: Exception) -> None:
        reason = str(why) if isinstance(why, _NotCaptured) else f"{type(why).__name__}: {why}".splitlines()[0]
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("chunk %d: its %s without CUDA graphs, because %s", self.chunk, what, reason)

    def _watched(self, outputs: Any) -> Any:
        """The outputs. Which of them get a gradient must be known when B is captured, before any has come."""
        for index, leaf in enumerate(tensors_in(outputs)):
            if leaf.requires_grad and self.queue.check_values:
                leaf.register_hook(lambda _, index=index: self.arrive.add(index))
        return outputs

    def _free_slot(self, microbatch: int, arguments: Any) -> _Slot | None:
        """One that holds no microbatch, captured if need be; None where that has failed. Raises _NotCaptured."""
        if not self._slots and not self._captures:
            return None
        if microbatch in self._begun or not self._begun:  # between steps a module may be changed
            self._begun.clear()
            self._unfit = self._why_not()
        self._begun.add(microbatch)
        if self._unfit is not None:
            raise self._unfit
        form = _form_of(arguments, self.device)
        if self._form not in (None, form):
            raise _NotCaptured("shapes, types or numbers among its inputs are others than those captured")
        held = {*self._saved, *(key[1] for key in [*self.queue.keys()] if key[0] == self.chunk)}
        taken = [self._slot_of[each] for each in held if each in self._slot_of]
        free = next((slot for slot in self._slots if slot not in taken), None)
        if free is not None or not self._captures:
            return free
        if not self._saved.keys() <= self._slot_of.keys():  # whose graph has nodes of another stream
            raise _NotCaptured("it holds one microbatch more than captured, and runs another as it is written")
        self._captures = False  # until it has worked
        self._slots.append(self._captured(arguments))
        self._captures, self._form = True, form
        return self._slots[-1]

    def _captured(self, arguments: Any) -> _Slot:
        """A new slot. Raises _NotCaptured where a replay would not do all that the forward does."""
        python, torchs, contents = random.getstate(), torch.get_rng_state(), _contents_of(self.module)
        torch.clear_autocast_cache()  # each graph casts weights as they are then, for itself
        try:
            slot = _Slot(self, super()._call, arguments)
            if random.getstate() != python or not torch.equal(torch.get_rng_state(), torchs):
                raise _NotCaptured("its forward draws random numbers on the host")
            if changed := _changed(self._state, _state_of(self.module, self.device)):
                raise _NotCaptured(f"its forward sets {changed}, which a replay would not")
        except BaseException:
            for held, was in contents:
                held.clear()
                (held.extend if isinstance(held, list) else held.update)(was)
            random.setstate(python)
            torch.set_rng_state(torchs)
            raise
        finally:
            torch.clear_autocast_cache()
        return slot

    def _why_not(self) -> _NotCaptured | None:
        """Why the module as it is now has no graphs; forgets those of what it is no more."""
        if self.queue.listeners or self.queue.stream is not None or is_collective(self.module):
            return _NotCaptured("its passes go with those of other ranks or streams: parallel data, tensors or W")
        try:
            before, self._state = self._state, _state_of(self.module, self.device)
        except _NotCaptured as why:
            return why
        if self._slots and (changed := _changed(before, self._state)):
            logger.warning("chunk %d: is captured anew, because %s has changed between steps", self.chunk, changed)
            self._slots, self._form = [], None
            self._slot_of.clear()
            self._w_graphs.clear()
        return None

    def _replay_weight(self, microbatches: Sequence[int]) -> None:
        """Runs W of these microbatches as a graph, if it can; they stay in the queue if not. Raises _NotCaptured."""
        keys: list[Any] = [(self.chunk, microbatch) for microbatch in microbatches]
        slots = tuple(self._slot_of[microbatch] for microbatch in microbatches if microbatch in self._slot_of)
        tasks = [task for slot in slots for task in slot.tasks]
        if not self._captures_w or len(slots) < len(keys) or not tasks:
            return
        if self.queue.pending(keys) != len(tasks):
            raise _NotCaptured("not all W that wait are those of its graphs: the loss has left some, or some have run")
        parameters = {p: None for task in tasks for p in task.parameters if p is not None}
        if not all(map(self._stays, parameters)) or not all(task.is_unchanged() for task in tasks):
            return  # there are no gradients to add to yet; or it is an error, which the queue raises
        if slots not in self._w_graphs:
            self._captures_w = False  # until it has worked
            try:
                self._w_graphs[slots] = self.graphs.capture(lambda: self.queue.run(keys), slots[0].pool)[1]
            finally:  # none has run yet
                self.queue.discard(keys)
                for task in tasks:
                    self.queue.add(task, task.key)
            self._captures_w = True
        if self.queue.pending(keys) != len(tasks):
            return  # of those that came back some have run, under a limit
        self._w_graphs[slots]()
        self.queue.discard(keys)
        for task in tasks:
            if any(p is not None and accumulation.has_main_grad_flags(p) for p in task.parameters):
                accumulation.Target(task).commit()

    def _stays(self, parameter: Tensor) -> bool:
        """Whether there is a gradient to which graphs can add. Raises _NotCaptured where it is not the one captured."""
        memory, gradient = self._gradients.get(parameter), accumulation.gradient_of(parameter)
        # zero_grad lets go of gradients whose memory graphs still add to: it is taken again where nobody else has it
        if memory is not None and gradient is None and _users(memory.untyped_storage()._cdata) == 2:  # one that asks
            gradient = parameter.grad = memory.detach().zero_()
        if gradient is None or gradient.is_sparse or accumulation.overwrites(parameter):
            return False
        if not gradient.is_set_to(self._gradients.setdefault(parameter, gradient.detach())):
            raise _NotCaptured("a gradient is another tensor than the one captured, which somebody may still have")
        return True


class _Slot:
    """Graphs of F and B for one microbatch at a time, and the memory that they read and write."""

    def __init__(self, stage: GraphedStage, call: Callable[..., Any], arguments: Any) -> None:
        capture, self.pool, queue = stage.graphs.capture, stage.graphs.new_pool(), WGradQueue()
        copies = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), arguments)
        self.inputs = tensors_in(copies)
        try:
            with queue.defer():
                outputs, self.forward = capture(lambda: call(*copies), self.pool)
                _form_of(outputs, stage.device)
                roots, self.tree = tensors_in(outputs), pytree.tree_map_only(Tensor, lambda _: Tensor, outputs)
                self.outputs = [(root.detach(), root.requires_grad) for root in roots]
                gets = [index for index, root in enumerate(roots) if root.requires_grad and index in stage.arrive]
                self.arriving = {index: torch.zeros_like(self.outputs[index][0]) for index in gets}
                pairs = [(roots[index], gradient) for index, gradient in self.arriving.items()]
                if not pairs:
                    raise _NotCaptured("no gradient came of what it returned in the first two steps")
                found, self.backward = capture(partial(_backward, pairs, self.inputs, stage.module), self.pool)
                self.leaving, self.added = found
        finally:
            self.tasks = queue.tasks()
            queue.discard()


class _Replayed(torch.autograd.Function):
    """The graphs of a slot in the place of its module's forward and backward. What comes out is copied: the next
    microbatch writes there."""

    @staticmethod
    def forward(ctx: Any, slot: _Slot, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        for memory, given in zip(slot.inputs, inputs, strict=True):
            memory.copy_(given)
        slot.forward()
        outputs = [(memory.clone(), requires_grad) for memory, requires_grad in slot.outputs]
        ctx.mark_non_differentiable(*(output for output, requires_grad in outputs if not requires_grad))
        return tuple(output for output, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        slot, scope = ctx.slot, wgrad.current()
        assert scope is not None  # as in the F
        for index, gradient in enumerate(gradients):
            if (memory := slot.arriving.get(index)) is not None:
                memory.zero_() if gradient is None else memory.copy_(gradient)
            elif gradient is not None:
                raise RuntimeError(
                    "StepOptions: graphs must be False where an output first gets a gradient after step 2"
                )
        slot.backward()
        for parameter, gradient in slot.added:
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
        for task in slot.tasks:
            task.version = task.current_version()
            scope[0].add(task, scope[1])
        return (None, None, *(None if memory is None else memory.clone() for memory in slot.leaving))


def _form_of(arguments: Any, device: torch.device) -> Any:
    """Equal for what one graph can be replayed with. Raises _NotCaptured for what none can be."""
    leaves, tree = pytree.tree_flatten(arguments)
    for leaf in leaves:
        if type(leaf) not in (Tensor, *_PLAIN) or (type(leaf) is Tensor and leaf.device.type != device.type):
            what = f"a tensor on {leaf.device}" if type(leaf) is Tensor else f"a {type(leaf).__name__}"
            raise _NotCaptured(f"what it takes or returns is not only numbers and tensors on its device: {what}")
    tensors = [(leaf.layout, leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in tensors_in(leaves)]
    return tree, tensors, [(type(leaf), leaf) for leaf in leaves if type(leaf) is not Tensor]


def _backward(pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor], module: torch.nn.Module) -> Any:
    """A backward from outputs and their gradients: the gradients of the inputs, and those that parameters have got,
    whose own stay as they are. Raises _NotCaptured where a `main_grad` was written."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [buffer for parameter, _ in before if (buffer := accumulation.main_grad_of(parameter)) is not None]
    versions = [buffer._version for buffer in buffers]
    try:
        for parameter, _ in before:
            parameter.grad = None
        torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        added = [(parameter, parameter.grad) for parameter, _ in before if parameter.grad is not None]
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
    if versions != [buffer._version for buffer in buffers]:
        raise _NotCaptured("its B itself writes a main_grad")
    leaving = [leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    return leaving, added


def _state_of(module: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    """What a forward depends on, as Python sees it, or may change, by name. Raises _NotCaptured for hooks."""
    kind = device.type
    state: dict[str, Any] = {"autocast": f"{torch.is_autocast_enabled(kind)}, {torch.get_autocast_dtype(kind)}"}
    for name, part in module.named_modules(prefix="module"):
        named = (*vars(part).items(), *part._parameters.items(), *part._buffers.items())
        values = {f"{name}.{key}": value for key, value in named}
        tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        called = (hook for kind in _HOOKS for hook in getattr(part, kind).values())
        hooked = any(getattr(hook, "needed_in_replays", True) for hook in called)
        if hooked or any(map(accumulation.has_hooks, tensors.values())) or _has_any_global_hook():
            raise _NotCaptured(f"a replay would not run the hooks of {name}")
        if away := [key for key, tensor in tensors.items() if tensor.device.type != device.type]:
            raise _NotCaptured(f"{away[0]} is not on its device")
        state |= values
        state |= {f"the length of {key}": len(v) for key, v in values.items() if isinstance(v, (list, dict, set))}
        state |= {f"the kind of {key}": f"{t.data_ptr()}, {t.requires_grad}" for key, t in tensors.items()}
    return state


def _contents_of(module: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Attributes, buffers and the like of all modules, and what is in them now."""
    held = [each for part in module.modules() for each in (vars(part), *vars(part).values())]
    return [(each, each.copy()) for each in held if type(each) in (dict, list, set)]


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The name of something that is not what it was."""
    for name in {**after, **before}:
        a, b = before.get(name), after.get(name)
        if a is not b and not (type(a) is type(b) and type(a) in _PLAIN and a == b):
            return name
    return None
