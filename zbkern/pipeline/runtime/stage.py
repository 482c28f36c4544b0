"""One chunk of the model on its rank: F, B and W of one unit at a time."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from zbkern.pipeline.auxiliary_losses import AuxiliaryLosses, Share
from zbkern.pipeline.runtime.memory.ledger import Key, Ledger
from zbkern.pipeline.runtime.overlap.reruns import Reruns
from zbkern.pipeline.runtime.replicas.data_parallel import sharded_roots
from zbkern.pipeline.runtime.slices.carry import Carries
from zbkern.pipeline.runtime.slices.probe import Probes
from zbkern.pipeline.runtime.slices.sequence_loss import SequenceLosses, loss_of
from zbkern.pipeline.runtime.slices.sliced_batch import LossFn, Target, adds_up
from zbkern.pipeline.transport.tensors import arrived, remedy_of_dataclass
from zbkern.schedules.schedule import Schedule
from zbkern.wgrad import WGradQueue, in_flight
from zbkern.wgrad.queue import AT_ONCE

logger = logging.getLogger("zbkern")

# In torch 2.8 the edge of a function written in Python, as our layers are, does not keep the graph alive.
_EDGES_OWN = "ownership_token" in GradientEdge._fields
_NOTHING = nullcontext()  # around what needs no other context
# What torch.autograd.backward ends with: its checks of a loss and its gradient take a sixth of a tiny B
_backward = torch.autograd.Variable._execution_engine.run_backward
_OF_BACKWARD = (False, False, ())  # retain_graph, create_graph, inputs


class Stage:
    """Runs one chunk. What a unit needs between its F and its B is kept here, between its B and its W in `queue`.

    module: called with a tensor, a tuple (positional arguments) or a dict (keyword arguments). loss_fn: of the last
    chunk alone, loss_fn(output, target) of one unit, a scalar. `use` comes before the first pass.
    """

    def __init__(self, module: nn.Module, chunk: int, queue: WGradQueue, loss_fn: LossFn | None = None) -> None:
        self.module = module
        self.chunk = chunk
        self.queue = queue
        self.loss_fn = loss_fn
        self.ledger: Ledger | None = None  # which holds what a unit needs, where R, O and L change that
        self.losses = AuxiliaryLosses()
        self.probes = Probes(chunk, module)
        self.splits: bool | None = None  # whether its first B left any W behind
        self.reruns: Reruns | None = None  # of a chunk with an F beside a B
        self._returns_outputs = False  # of the last chunk, whatever the loss
        self._followed = False  # whether a first F has shown where gradients enter
        # inputs, where gradients enter, and what a loss counts for
        self._saved: dict[int, tuple[Any, list[Tensor | GradientEdge | None], float | None]] = {}

    def use(self, schedule: Schedule, at_once: Collection[Key] = ()) -> None:
        """Between steps: from now on this schedule, which says which slices units are, if any.

        at_once: (chunk, unit) of those of which no W waits.
        """
        self._at_once = at_once
        self.carries, self._shares = Carries(schedule), _shares(schedule)
        self._unit_loss: LossFn | None = self.loss_fn  # of what an F runs
        self._sequence_losses: SequenceLosses | None = None  # in its place, where it does not add up over slices
        if self.loss_fn is not None and schedule.is_sliced and not adds_up(self.loss_fn):
            self._unit_loss, self._sequence_losses = None, SequenceLosses(self.loss_fn, schedule.units)
        takes_deferred = getattr(self.loss_fn, "takes_deferred_logits", False)
        # FSDP2 would take a backward of the loss of a sequence, which is one of its own, for that of the chunk
        is_apart = self._sequence_losses is not None and any(True for _ in sharded_roots(self.module))
        self._takes_deferred_logits = takes_deferred and not is_apart

    @property
    def adds_up(self) -> bool:
        """Whether each slice of a sequence has a loss."""
        return self._sequence_losses is None

    def begin(self, returns_outputs: bool) -> None:
        """Before a step or evaluation, or forwards that return what the last chunk does, for `loss_fn` to see later."""
        self._returns_outputs = returns_outputs
        self.probes.begin()
        self.losses.begin(reports=not returns_outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of what slices carry."""
        return self.carries.nbytes

    def forward(
        self, unit: int, inputs: Any, target: Target | None = None, side: Mapping[str, Any] | None = None
    ) -> Any:
        """F: the output to send on, detached; on the last chunk this unit's share of the mean loss, or None where
        that is of the whole sequence and comes with a later slice. target: None for the output there, too.

        side: keyword arguments besides the inputs.
        """
        side = side or {}
        carry = side.get("carry")
        key = self.chunk, unit
        run = self._outputs if self.ledger is None else partial(self.ledger.forward, key, self._outputs)
        share = self._shares[unit]
        if carry is not None:
            share = Share(share.whole, *carry._place)
        scope = self._scope(unit)  # layers then know whether their W will wait
        with self.queue.defer(scope), self.losses.during(unit, share):
            self.queue._in_slice = carry is not None
            outputs = run(inputs, target, side)
            self.queue._in_slice = False
        leaves, structure = ([outputs], None) if isinstance(outputs, Tensor) else pytree.tree_flatten(outputs)
        self._check_outputs(leaves)
        weight = None if target is None or not self._gives_loss else target.weight
        if torch.is_grad_enabled():
            roots = [self._root(leaf) for leaf in leaves]
            self._saved[unit] = (inputs, roots, weight)
            if not self._followed:
                self._warn_of_lost_graph(roots)
        self.carries.end_forward(unit, side)
        if weight is not None:  # B begins with it: the product needs no backward
            return outputs.detach() * weight
        if structure is None:
            outputs = _to_send(outputs)
        else:
            outputs = pytree.tree_unflatten([None if leaf is None else _to_send(leaf) for leaf in leaves], structure)
        if self._sequence_losses is None or target is None or self._returns_outputs:
            return outputs
        with self.queue.defer(scope), self.losses.during(None, Share(target.weight)):
            return self._sequence_losses.forward(unit, outputs, carry, target)

    def call(self, inputs: Any, side: Mapping[str, Any]) -> Any:
        """What the module returns. Raises TypeError for a name in inputs and side."""
        arguments: Sequence[Any] = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        keywords = side
        if isinstance(inputs, dict):
            if twice := inputs.keys() & side.keys():
                raise TypeError(f"Pipeline: chunk {self.chunk} gets {sorted(twice)} twice; leave it out of side")
            arguments, keywords = (), {**inputs, **side}
        return self.module(*arguments, **keywords)

    def prepare(self, *units: int) -> None:
        """Waits for what a B or W of these units needs first, where that is being loaded."""
        if self.ledger is not None:
            for unit in units:
                self.ledger.prepare((self.chunk, unit))

    def backward_input(self, unit: int, gradients: Any) -> Any:
        """B: runs the backward with every W deferred under (chunk, unit); returns the gradients of the inputs.

        Of one that `use` has named, each layer's W runs right after its B, and nothing is held for it.

        The gradients come and go as a list of those of the outputs and inputs, None where a tensor takes none, or as
        that of one tensor. Those of the first chunk's inputs, if they ask for any, stay with the caller's tensors.
        """
        inputs, roots, weight = self._saved.pop(unit)
        key, scope = (self.chunk, unit), self._scope(unit)
        if self._sequence_losses is not None:
            with self.queue.defer(scope):
                gradients = self._sequence_losses.gradients(unit)
        if weight is not None:
            leaves: list[Any] = [torch.full_like(loss, weight) for loss in roots if isinstance(loss, Tensor)] or [None]
        else:
            leaves = [gradients] if isinstance(gradients, Tensor) else pytree.tree_leaves(gradients)
        pairs = [pair for pair in zip(roots, leaves, strict=True) if pair[0] is not None and pair[1] is not None]
        pairs += self.carries.gradients(unit)
        with _NOTHING if self.ledger is None else self.ledger.backward(key):
            if pairs:
                watched = _NOTHING if self.reruns is None else self.reruns.around_backward()
                with self.queue.defer(scope), self.losses.during(unit), watched:
                    ends, arrived = zip(*pairs, strict=True)
                    _backward(ends, arrived, *_OF_BACKWARD, allow_unreachable=True, accumulate_grad=True)
                if self.splits is None and scope is not AT_ONCE:
                    may_have_run = self.queue.max_bytes is not None
                    is_trained = any(parameter.requires_grad for parameter in self.module.parameters())
                    self.splits = may_have_run or self.queue.pending(key) > 0 or not is_trained
        self.carries.end_backward(unit)
        if self.chunk == 0:
            return None
        if isinstance(inputs, Tensor):
            return _take_gradient(inputs)
        return [*map(_take_gradient, pytree.tree_leaves(inputs))]  # a node of a class may leave out what is None

    def weight(self, *units: int, in_turns: bool = False) -> None:
        """W of these units, merged into one launch per weight. in_turns: one at a turn, beside other passes."""
        if self.ledger is None and not len(self.queue):
            return
        keys: list[Any] = [(self.chunk, unit) for unit in units]
        with _NOTHING if self.ledger is None else self.ledger.weight(keys):
            while in_turns and self.queue.run_one(keys) and self.queue.pending(keys):
                in_flight()
            self.queue.run(keys)

    def _scope(self, unit: int) -> Any:
        """The key of its passes in the queue."""
        key = self.chunk, unit
        return AT_ONCE if key in self._at_once else key

    def warn_of_fused_backward(self) -> None:
        """Says once that this chunk's B does everything, so that the schedule's W are empty."""
        self.splits = True
        logger.warning(
            "chunk %d: no W waits, its B computes every gradient; call zbkern.convert on it before the Pipeline, else "
            "zbkern.unconverted and zbkern.coverage say why (docs/gradients.md)",
            self.chunk,
        )

    def _warn_of_lost_graph(self, roots: Sequence[Any]) -> None:
        """Says once that this chunk is not trained, where plain torch may have no loss to differentiate."""
        self._followed = True
        if all(root is None for root in roots) and any(p.requires_grad for p in self.module.parameters()):
            logger.warning(
                "chunk %d: its parameters get no gradient, because no output depends on them (torch.no_grad or detach "
                "in its forward, or reentrant checkpointing of an input without gradient); if that is meant, "
                "requires_grad_(False) says so",
                self.chunk,
            )

    def reset(self) -> None:
        """Forgets units that were begun and not finished."""
        self.queue._in_slice = False
        self._saved.clear()
        if self._sequence_losses is not None:
            self._sequence_losses.reset()
        self.carries.reset()
        self.losses.clear()

    @property
    def _gives_loss(self) -> bool:
        """Whether an F that has a target returns a loss of its own."""
        return self._unit_loss is not None and not self._returns_outputs

    def _root(self, output: Any) -> Tensor | GradientEdge | None:
        """Where this output's gradient enters the graph: the output itself need not live on to its B."""
        if not isinstance(output, Tensor) or not output.requires_grad:
            return None
        if self._unit_loss is not None:
            return output
        if not _EDGES_OWN:
            output = output.view_as(output)
        return get_gradient_edge(output)

    def _check_outputs(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise TypeError(
                    f"Pipeline: chunk {self.chunk} must return tensors (or None) for the next chunk, in tuples, lists "
                    f"or dicts; got {reprlib.repr(leaf)} among them: "
                    + (remedy_of_dataclass(leaf) or "make it a tensor, or compute it in the chunk that needs it")
                )
            if leaf is not None and leaf.layout is not torch.strided:
                raise TypeError(
                    f"Pipeline: chunk {self.chunk} must return dense tensors for the next chunk; got {leaf.layout}: "
                    "call .to_dense() on it"
                )
        if all(leaf is None for leaf in leaves):
            raise TypeError(f"Pipeline: chunk {self.chunk} must return at least one tensor; got none{_FORGOTTEN}")

    def _outputs(self, inputs: Any, target: Target | None, side: Mapping[str, Any]) -> Any:
        records = torch.is_grad_enabled()
        takes = target is not None and self._takes_deferred_logits
        defers = getattr(self.module, "deferred_logits", None) if takes else None  # a chunk of `cut`
        with _NOTHING if defers is None else defers():
            outputs = self.call(inputs, side)
        if torch.is_grad_enabled() is not records:
            torch.set_grad_enabled(records)
            raise RuntimeError(
                f"Pipeline: chunk {self.chunk} must leave torch's grad mode as it was: use torch.no_grad() or "
                "set_grad_enabled in a with statement"
            )
        if target is None or not self._gives_loss:
            return outputs
        if outputs is None:
            raise TypeError(f"Pipeline: chunk {self.chunk} must return what loss_fn takes; got None{_FORGOTTEN}")
        assert self._unit_loss is not None
        return loss_of(self._unit_loss, outputs, target)


def _shares(schedule: Schedule) -> list[Share]:
    """The weight of each unit's microbatch in the step's loss: equal for all, or by tokens where these are known."""
    tokens = [sum(lengths) for lengths in schedule.own_slices] or [1] * schedule.microbatches
    return [Share(tokens[number] / sum(tokens)) for number, _, _ in schedule.units]


_FORGOTTEN = ": is there a return at the end of its forward?"


def _to_send(tensor: Tensor) -> Tensor:
    """An output without its graph. One that takes no gradient is copied: it may be a buffer, which the next forward
    overwrites while this is sent."""
    resolved = _resolved(tensor.detach())
    return resolved.requires_grad_() if tensor.requires_grad else resolved.clone()


def _resolved(tensor: Tensor) -> Tensor:
    """A tensor whose memory can be sent.

    A collective must have filled it. A conjugate or negative that torch has only noted on the tensor would be lost.
    """
    return arrived(tensor).resolve_conj().resolve_neg()


def _take_gradient(leaf: Any) -> Tensor | None:
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return None
    gradient, leaf.grad = leaf.grad, None
    return None if gradient is None else _resolved(gradient)
