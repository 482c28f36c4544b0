"""Replicas: stages under DistributedDataParallel or FSDP2 inside of a Pipeline, reduced once a step, under W.

The units of a step add up on each replica. After the last B of a chunk its gradients wait for nothing but W,
and what is reduced together (a parameter for DDP, which makes buckets of them; a group for FSDP2) starts as soon as its
last W has run, while the others run. All replicas start their reductions in one order, that of the model from its
end, whatever order their W take: communicators are not matched in any other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbkern.data_parallel import end_backward, is_sharded, parameter_groups, unsharded
from zbkern.pipeline.runtime.replicas.agreement import Agreement
from zbkern.pipeline.transport.base import Transport
from zbkern.schedules.actions import Beside
from zbkern.schedules.program import Program
from zbkern.wgrad import WGradQueue, WGradTask, accumulation

PendingWGrads = Mapping[int, int]  # id of a parameter -> how many of its W are still to run


class Replicas:
    """The data-parallel side of this rank's chunks. Without such chunks every method does nothing."""

    def __init__(self, modules: Mapping[int, nn.Module], queue: WGradQueue) -> None:
        reducers = {chunk: _reducer_of(chunk, modules[chunk]) for chunk in sorted(modules, reverse=True)}
        # the last chunk first
        self._reducers = {chunk: reducer for chunk, reducer in reducers.items() if reducer is not None}
        # What the stages call: inside of DDP, so that its hooks and a reduction per backward are out of the way.
        self.modules = {c: self._reducers[c].module if c in self._reducers else m for c, m in modules.items()}
        taken: set[int] = set()
        for reducer in reversed(self._reducers.values()):
            if isinstance(reducer, DDPReducer):
                reducer.claim(taken)
        self._queue = queue
        roots = [root for reducer in self._reducers.values() for root in reducer.roots]
        self.agreement = Agreement(modules.values(), roots)
        self._backwards_left: dict[int, int] = {}
        self._pending_wgrads: Counter[int] = Counter()
        if self._reducers:
            queue.listeners.append(self._accumulated)

    def __bool__(self) -> bool:
        return bool(self._reducers)

    def check_beside(self, program: Program) -> None:
        """Raises ValueError where a chunk of FSDP2 would run its F beside a backward of its own: each gathers and frees
        the weights by itself."""
        for beside in (group[0] for group in program if isinstance(group[0], Beside)):
            chunks = Counter(action.chunk for action in beside.passes if action.kind != "W")
            chunk, passes = chunks.most_common(1)[0] if chunks else (0, 0)
            if passes > 1 and isinstance(self._reducers.get(chunk), FSDPReducer):
                raise ValueError(
                    f"Pipeline: chunk {chunk} is in fully_shard, and {beside} would use its weights at once; use a "
                    "schedule in which passes of different chunks run beside each other, such as dualpipe_v, or "
                    "plan(..., options=PlanOptions(fully_shard=True)), plan_batch(..., fully_shard=True)"
                )

    def begin(self, units: int) -> None:
        """Before the first forward of a step: from here on gradients stay on this replica."""
        self._pending_wgrads.clear()
        self._backwards_left = dict.fromkeys(self._reducers, units)
        for reducer in self._reducers.values():
            reducer.begin()

    def backward_done(self, chunk: int) -> None:
        """After each B; the last one of a chunk lets its reductions start."""
        if chunk not in self._backwards_left:
            return
        self._backwards_left[chunk] -= 1
        if self._backwards_left[chunk]:
            return
        self._reducers[chunk].last_backward_done()
        for task in self._queue.tasks():
            if task.key[0] == chunk:
                self._pending_wgrads.update(id(parameter) for parameter in task.parameters if parameter is not None)
        self._launch_ready()

    def finish(self) -> None:
        """After the last W of a step: reduces what is left, and waits for all."""
        for reducer in self._reducers.values():
            reducer.finish()

    def discard(self) -> None:
        """After forwards whose backward will not run: weights are gathered anew, for they may have changed."""
        for reducer in self._reducers.values():
            sharded: list[Any] = [part for part in reducer.module.modules() if is_sharded(part)]
            for part in sharded:
                part.reshard()

    def _accumulated(self, tasks: Sequence[WGradTask]) -> None:
        if not self._pending_wgrads:
            return
        # what comes to zero, or was not counted, is not kept
        self._pending_wgrads -= Counter(id(parameter) for task in tasks for parameter in task.parameters)
        self._launch_ready()

    def _launch_ready(self) -> None:
        """Starts what is ready, in the one order that all replicas keep."""
        passes_come = any(self._backwards_left.values())
        for chunk, reducer in self._reducers.items():
            # W run as time has it, and what another chunk's B gathers or exchanges must not come before them here and
            # after there
            if passes_come and (self.agreement.exchanges or reducer.gathers_in_backward):
                return
            if self._backwards_left[chunk] or not reducer.launch_ready(self._pending_wgrads):
                return


def check_apart(modules: Mapping[int, nn.Module], group: Any) -> None:
    """Raises ValueError where ranks of this pipeline, which hold other chunks, share the weights of one: they would
    average gradients of different layers, or wait for each other."""
    if isinstance(group, Transport):
        return
    others = {*dist.get_process_group_ranks(group or dist.group.WORLD)} - {dist.get_rank()}
    for chunk, module in modules.items():
        for ranks in _ranks_that_share(module):
            if others & {*ranks}:
                raise ValueError(
                    f"Pipeline: the weights of chunk {chunk} are shared with ranks {sorted(others & {*ranks})}, which "
                    "hold other chunks of this pipeline; wrap it over the ranks that hold the same chunk alone: "
                    "DistributedDataParallel with process_group=, fully_shard and others with mesh= "
                    "(docs/data_parallel.md)"
                )


def _ranks_that_share(module: nn.Module) -> Iterator[Sequence[int]]:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        yield dist.get_process_group_ranks(module.process_group)
    for mesh in {parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)}:
        yield mesh.mesh.flatten().tolist()


class DDPReducer:
    """A stage in DistributedDataParallel. Its reducer waits for the accumulation of every parameter, once: `_announce`.

    When it has seen all parameters it waits for its reductions, so the last one is kept for `finish`. A weight that a
    later reducer of this rank has, too (an embedding that is the head), is that one's to reduce: here it counts as
    zeros, and this reducer is through before the other begins, because both listen to the same accumulation.
    """

    gathers_in_backward = False  # whether B is collective
    roots: Sequence[Any] = ()

    def __init__(self, chunk: int, ddp: nn.parallel.DistributedDataParallel) -> None:
        for option in ("find_unused_parameters", "static_graph"):
            if getattr(ddp, option):
                raise ValueError(
                    f"Pipeline: the module of chunk {chunk} is in DistributedDataParallel with {option}=True, which is "
                    "of no use here: every parameter is reduced once a step, used or not; leave it out"
                )
        if ddp.mixed_precision is not None:
            raise ValueError(
                f"Pipeline: the module of chunk {chunk} is in DistributedDataParallel with mixed_precision, which "
                "works by hooks on its forward; convert the module's dtype, or use autocast in it"
            )
        self.module = ddp.module
        self._chunk = chunk
        self._ddp = ddp
        named = ddp.module.named_parameters()
        self._parameters = [p for name, p in named if p.requires_grad and name not in ddp.parameters_to_ignore][::-1]
        reduced = ddp._get_ddp_logging_data()["num_parameter_tensors"]
        if reduced != len(self._parameters):  # its reducer would wait for others, or leave some out
            raise ValueError(
                f"Pipeline: the module of chunk {chunk} has {len(self._parameters)} parameters that take gradients and "
                f"its DistributedDataParallel reduces {reduced}: some were frozen, or no longer, after it was wrapped; "
                "freeze before wrapping"
            )
        self._claimed_later: list[Tensor] = []
        self._next = len(self._parameters)

    def claim(self, taken: set[int]) -> None:
        """Takes note of the parameters that later reducers have, by id in `taken`; adds its own. (fully_shard makes
        parameters of their own for every chunk.)"""
        self._claimed_later = [parameter for parameter in self._parameters if id(parameter) in taken]
        taken.update(map(id, self._parameters))

    def begin(self) -> None:
        """Before the first forward of a step."""
        self._next = len(self._parameters)
        self._ddp.reducer.prepare_for_forward()
        self._ddp.reducer._rebuild_buckets()

    def last_backward_done(self) -> None:
        """No more B: gradients may be reduced as soon as their last W has run."""
        if not self._ddp.require_backward_grad_sync:  # the user's no_sync(): gradients add up to a later step
            return
        mine = self._parameters
        wrong = next((p for p in mine if not p.requires_grad or accumulation.main_grad_of(p) is not None), None)
        if wrong is not None:
            raise ValueError(
                f"Pipeline: DistributedDataParallel cannot reduce a parameter of shape {list(wrong.shape)} in chunk "
                f"{self._chunk} that was frozen after it was wrapped, or has a main_grad; freeze before wrapping"
            )
        self._next = 0

    def launch_ready(self, waiting: PendingWGrads) -> bool:
        """Starts the reductions up to the first that waits; True when no other is held up."""
        others = set(map(id, self._claimed_later))
        start, end = self._next, len(self._parameters) - (0 if others else 1)
        for parameter in self._parameters[start:end]:
            if id(parameter) in waiting and id(parameter) not in others:
                break
            self._next += 1
        self._announce(start, self._next)
        return self._next >= end

    def finish(self) -> None:
        """After the last W of a step: reduces what is left, and waits for all; buffers are then those of the first
        replica, so that one replica may evaluate alone."""
        start, self._next = self._next, len(self._parameters)
        self._announce(start, self._next)
        if self._ddp._check_sync_bufs_pre_fwd():
            self._ddp._sync_buffers()

    def _announce(self, start: int, end: int) -> None:
        if start == end:
            return
        if start == 0:
            self._ddp.reducer.prepare_for_backward([])
        aside = [(parameter, parameter.grad) for parameter in self._claimed_later]
        for parameter in self._claimed_later:
            parameter.grad = None
        _announce(self._parameters[start:end])
        for parameter, gradient in aside:
            parameter.grad = gradient


def _announce(parameters: Sequence[Tensor]) -> None:
    """Accumulates once more, what is there already or zeros: this is what the reducer listens to."""
    arrivals: list[tuple[Tensor, Tensor]] = []
    for parameter in parameters:
        if parameter.grad is None or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            arrivals.append((parameter, torch.zeros_like(parameter, requires_grad=False)))
        else:
            arrivals.append((parameter, parameter.grad))
            parameter.grad = None  # so that autograd takes the tensor instead of adding to it
    if arrivals:
        accumulation.accumulate_via_autograd(arrivals)


class FSDPReducer:
    """A stage that is, or holds, modules of FSDP2; with the methods of a DDPReducer.

    After a backward weights stay gathered for the next unit. With reshard_after_forward=False they are gathered
    once a step.
    """

    def __init__(self, module: nn.Module, roots: Sequence[Any]) -> None:
        self.module = module
        self.roots = roots
        self._groups: list[Any] = []

    @property
    def gathers_in_backward(self) -> bool:
        return any(group._reshard_after_forward for root in self.roots for group in parameter_groups(root))

    def begin(self) -> None:
        self._synchronise(False)

    def last_backward_done(self) -> None:
        self._synchronise(True)
        self._groups = [group for root in reversed(self.roots) for group in reversed(parameter_groups(root))]

    def launch_ready(self, waiting: PendingWGrads) -> bool:
        while self._groups:
            if any(id(parameter) in waiting for parameter in unsharded(self._groups[0])):
                return False
            self._groups.pop(0).post_backward()
        return True

    def finish(self) -> None:
        self.launch_ready({})
        for root in self.roots:
            end_backward(root)

    def _synchronise(self, last: bool) -> None:
        for root in self.roots:
            root.set_is_last_backward(last)
            root.set_reshard_after_backward(last)
            root.set_requires_gradient_sync(last)


def _reducer_of(chunk: int, module: nn.Module) -> DDPReducer | FSDPReducer | None:
    if not torch.distributed.is_available():
        return None
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return DDPReducer(chunk, module)
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            f"Pipeline: the module of chunk {chunk} has DistributedDataParallel inside; wrap the whole module in it"
        )
    roots = list(sharded_roots(module))
    return FSDPReducer(module, roots) if roots else None


def sharded_roots(module: nn.Module) -> Iterator[nn.Module]:
    """The roots of FSDP2 in a module: those that no other holds."""
    if is_sharded(module):
        yield module
        return
    for child in module.children():
        yield from sharded_roots(child)


@contextmanager
def gathered(module: Any) -> Iterator[None]:
    """Inside, a module of FSDP2 has its weights, for a part of it that runs alone; None for no such module."""
    if module is None:
        yield
        return
    module.unshard()
    yield
    module.reshard()
