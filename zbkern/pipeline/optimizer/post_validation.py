"""Optimizer: steps before the norm over all stages is known, and validates the step afterwards.

The norm of all gradients and the check for non-finite values need every stage, and an all-reduce before the step would
make every stage wait for the slowest. Instead each rank receives the squared norms of the ranks before it, and
sends them on with its own (norm_chain.py); if their sum requires neither clipping nor skipping, it steps at once. The
last rank knows the total and sends it to all while the forwards of the next step begin. If the total requires
clipping or skipping, the ranks that have stepped roll the step back, and step again with scaled gradients, or not at
all. The result is that of a synchronous step.

Post-validation: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 4. A sum of squares only grows
from rank to rank, so a rank whose partial sum requires clipping is right; only one whose partial sum does not may have
to roll back.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zbkern.pipeline.optimizer.clipping import scale_gradients_
from zbkern.pipeline.optimizer.norm_chain import NormChain
from zbkern.pipeline.optimizer.own_settings import COMPARED, settings_of_step
from zbkern.pipeline.optimizer.params import hyperparameters, is_view, move_, parameters
from zbkern.pipeline.optimizer.parts import Pairs, check_unique, parts_of, prepare_undo
from zbkern.pipeline.optimizer.pending_step import PendingStep
from zbkern.pipeline.optimizer.step_boundary import StepBoundary
from zbkern.pipeline.optimizer.step_norms import StepNorms
from zbkern.pipeline.transport.base import Transport, check_timeout
from zbkern.pipeline.transport.connect import closing_on_error, connect, telling_on_error
from zbkern.pipeline.transport.tensors import tensors_in
from zbkern.pipeline.transport.tied_names import check_tied, tied_names
from zbkern.schedules.warmup import rank_order
from zbkern.wgrad.accumulation import main_grad_of

logger = logging.getLogger("zbkern")


_CHECKED = 2  # steps, the first ones, after which values are compared until they are validated
_REGISTER = tuple(
    f"register_{what}_{when}_hook" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)


class _Pipeline(Protocol):
    """A Pipeline, which knows of its optimizer's steps, and whose module imports this folder therefore."""

    tied: dict[str, Tensor]
    _calls: Any


class Optimizer(torch.optim.Optimizer):
    """Drives torch optimizers of this rank's parameters as one with those of all other ranks of a pipeline.

    >>> optimizer = Optimizer(torch.optim.AdamW(chunk.parameters()), pipe, max_norm=1.0)    # doctest: +SKIP
    >>> optimizer.zero_grad()
    >>> loss = pipe.step(inputs, targets)
    >>> optimizer.step()
    >>> optimizer = Optimizer([(muon, None), (adamw, 1.0)], pipe)                           # doctest: +SKIP

    It is a torch.optim.Optimizer itself, with the groups, state and hooks of the ones it drives: learning-rate
    schedules take it, and a step that is done late or again uses the hyperparameters and gradients it was called with.
    Hooks on the step run once per step that counts (docs/pipeline.md).

    Args:
        optimizer: any torch optimizer whose `step()` needs no closure; or several, in one order on all ranks: pairs
            (torch optimizer, its max_norm), each clipped by the norm of its own gradients, or a list with one norm.
        pipe: the Pipeline; or its ranks in the order of the model, as a process group, a Transport, or None for all
            ranks: then call `validate()` before weights are read.
        max_norm: gradients are scaled down to this 2-norm over all ranks; None for never. A step with gradients that
            are not finite (or of a norm beyond fp32) is skipped, by all torch optimizers.
        master_weights: parameters below fp32 get fp32 copies, which the torch optimizer updates in their place;
            gradients are read from `main_grad` where a parameter has one.
        undo: how a step is rolled back: "snapshot" (exact, any optimizer, memory of parameters and state once more),
            "inverse" (AdamW and SGD; no memory, equal up to rounding), or None: never step before validation, also
            where one of several optimizers has no such inverse. A `main_grad` is copied until the step is validated
            where the step may be done again with it.
        adaptive: after a step that was clipped or skipped, validate the next one before stepping, as norms of
            consecutive steps are alike.
        tied: {name: parameter} of weights that several ranks hold with equal gradients, which count once; by default
            those of which a Pipeline has made this the case.
        timeout: seconds to wait for a message; a Pipeline's by default.

    Raises TypeError or ValueError for arguments out of range, for an undo that does not fit a single optimizer, for a
    parameter that comes twice, and where ranks differ in max_norm or in which optimizer has a tied weight. All ranks
    construct theirs together.

    Attributes: `last_norm`, the norm of all gradients of the last validated step, before clipping (None at first);
    `last_norms`: those of pairs, in their order; `undone`, how often this rank took a step back; `clipped`, `skipped`:
    how many validated steps were; `optimizers`: the torch optimizers; `optimizer`: the only one; `masters`: (parameter,
    its fp32 copy) pairs.
    """

    _step_supports_amp_scaling = True  # has GradScaler.step call `step` on every rank, also where it found infinity

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer | tuple[torch.optim.Optimizer, float | None]],
        pipe: _Pipeline | Transport | dist.ProcessGroup | None = None,
        *,
        max_norm: float | None = None,
        master_weights: bool = False,
        undo: str | None = "snapshot",
        adaptive: bool = True,
        tied: Mapping[str, Tensor] | None = None,
        timeout: float | None = None,
    ) -> None:
        # torch.optim.Optimizer.__init__ is left out: it would make groups and state of its own
        calls = getattr(pipe, "_calls", None)  # those of a Pipeline
        if calls is not None and calls.boundary.optimizer is not None:
            raise ValueError(
                "Optimizer: this Pipeline has an Optimizer already, and gradients have one norm: give it all "
                "torch optimizers in a list; call pipe.detach() on every rank to replace it"
            )
        with telling_on_error(pipe if calls is None else calls.transport):
            check_tied("Optimizer", tied)
            if timeout is not None:
                check_timeout("Optimizer", timeout)
            self._parts, limits = parts_of(optimizer, max_norm, master_weights, undo)
            self.optimizers = [part.optimizer for part in self._parts]
            if len(self.optimizers) == 1:
                self.optimizer = self.optimizers[0]
            for name in _REGISTER:
                setattr(self, name, getattr(self.optimizers[0 if "_pre_" in name else -1], name))
            self.adaptive = adaptive
            self._timeout = timeout if timeout is not None else 1800.0 if calls is None else calls.timeout
            self.last_norm: float | None = None
            self.last_norms: list[float] = []
            self._away: list[tuple[Tensor, torch.device]] = []  # with the device where each belongs
            self.undone = self.clipped = self.skipped = 0
            self._device = next((p.device for p in parameters(self)), torch.device("cpu"))
            candidates = [*self._model_parameters(), *getattr(pipe, "tied", {}).values()]
            shared = tied_names(candidates, tied)
            self._has_masters, self._undo = master_weights, undo
        transport = connect(pipe, self._device) if calls is None else calls.transport
        self._owned = transport if calls is None and transport is not pipe else None
        self._cautious = False
        self._writes_gradients: bool | None = None  # whether a torch optimizer does, once a step has shown it
        with closing_on_error(transport, self._owned is not None, "its Optimizer"):
            ranks = [*range(transport.size)] if calls is None else rank_order(calls.loop.schedule)
            cut = any(isinstance(p, DTensor) and p.requires_grad for p in self._model_parameters())
            places = {id(p): place for place, part in enumerate(self._parts) for p in part.model_parameters()}
            copies = {name: places.get(key) for key, name in shared.items()}
            clipping: Any = [[p.name, limits[p.norm]] for p in self._parts] if len(limits) > 1 else limits[0]
            chain = NormChain(transport, ranks, cut, copies, clipping, self._timeout)
            self._norms = StepNorms(chain, self._parts, limits, shared, self._device)
            self._boundary = StepBoundary(joint=False) if calls is None else calls.boundary
            self._boundary.take(self, chain, self._model_parameters())
            if calls is not None:
                self._warn_of_missing(calls.modules.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the torch optimizers, whose lists a load replaces; schedules may change them right after `step`."""
        groups = [optimizer.param_groups for optimizer in self.optimizers]
        return groups[0] if len(groups) == 1 else [*itertools.chain(*groups)]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Settings of groups that name none of their own; none where there are several torch optimizers."""
        return self.optimizers[0].defaults if len(self.optimizers) == 1 else {}

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the torch optimizer, of several a dict with the states of all. Validates a step, as weights do."""
        states = [optimizer.state for optimizer in self.optimizers]
        return states[0] if len(states) == 1 else {key: state for each in states for key, state in each.items()}

    @property
    def _holders(self) -> list[Any]:
        """The torch optimizers that have the states: of wrapped ones, those inside."""
        return [part.holder for part in self._parts]

    @property
    def masters(self) -> Pairs:
        """(parameter, its fp32 copy) of every parameter that has one."""
        return [pair for part in self._parts for pair in part.masters]

    def __getstate__(self) -> Any:
        raise TypeError("Optimizer: is tied to the other ranks and cannot be copied or pickled; keep its state_dict()")

    # ---- what a training loop calls

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters, a `main_grad` always in place.

        A step that is not validated yet keeps what it needs of them.
        """
        with torch._C.DisableTorchFunction():  # a gradient is no weight, and thousands are looked at
            if not set_to_none:
                gradients = [p.grad for p in self._model_parameters() if p.grad is not None]
                if self._boundary.pending is not None:
                    with self._boundary.failing_together():
                        self._boundary.pending.copy_gradients(gradients)
                for gradient in gradients:
                    gradient.zero_()
            for parameter in self._model_parameters():
                if set_to_none:
                    parameter.grad = None
                if (main_grad := main_grad_of(parameter)) is not None:
                    main_grad.zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps at once if the norm of this rank and those before it allows that; `validate` corrects it if needed.

        closure: computes the gradients (a step of the Pipeline, say) and returns the loss, which is returned. Until the
        step is validated weights must not be changed: an error says so where the step is done, or done again, then.
        """
        if self.__dict__.pop("found_inf", None) is not None:
            raise TypeError(
                "Optimizer.step: was called by a GradScaler, which sees the gradients of this rank only; train in "
                "bfloat16, which needs no loss scale, with master_weights=True or torch.autocast, and call "
                "optimizer.step()"
            )
        if closure is not None and not callable(closure):
            raise TypeError(f"Optimizer.step: closure must be callable, or None; got {closure!r}")
        self._boundary.check_open()
        self.validate()
        self.reload_states()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        boundary = self._boundary
        for optimizer in self.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn of a late step
        with boundary.failing_together():
            number = boundary.begin()
            gradients = [part.collect() for part in self._parts]
            total = self._norms.pass_on(gradients, number)
            step = PendingStep([*itertools.chain(*gradients)], hyperparameters(self))
            if self._norms.chain.ends_here:
                boundary.hold(step, total)
                return loss
            if self._may_step(total):
                may_write = self._writes_gradients is not False or number <= COMPARED  # RAdam's do from the 6th on
                spares = step.copies() if may_write and any(self._norms.limits) else None
                with step.in_place(self):
                    for part in self._parts:
                        part.undo.save(part.optimizer)
                        part.update()
                self._writes_gradients = step.take_copies(spares) or bool(self._writes_gradients)
                step.has_stepped, step.after = True, hyperparameters(self)
            if step.has_stepped and not (
                any(self._norms.limits) or any(part.undo.needs_gradients for part in self._parts)
            ):
                step.set_gradients([])  # it will be kept or skipped, never done again
            else:
                main_grads = map(main_grad_of, self._model_parameters())
                step.copy_gradients(main_grad for main_grad in main_grads if main_grad is not None)
            step.record_weights([*parameters(self), *self._model_parameters()], number <= _CHECKED)
            boundary.hold(step, total)
        boundary.watch_reads()
        return loss

    def validate(self) -> None:
        """Waits for the norm over all ranks and clips or skips the last step accordingly. No-op if that is done.

        Pipelines of these parameters call this in time; so do the next `step`, `weights`, and what reads weights in the
        thread of `step`. A rank may do so alone, once all have called `step`.
        """
        self._boundary.validate()

    def weights(self) -> list[Tensor]:
        """This rank's parameters of the model, as the last step leaves them for good, in the torch optimizers' order.

        For an average, a copy, an inference engine, in any thread. Validates the last step; on all ranks.
        """
        self.validate()
        return [*self._model_parameters()]

    def offload_states(self, device: torch.device | str = "cpu") -> None:
        """Moves gradients, masters and the torch optimizers' states to this device, and frees snapshots; on all ranks.

        For a phase without steps, while another engine generates, say: weights stay where they are, and `evaluate` and
        `forward` go on. States and `main_grad` that are views of a larger buffer stay, too. Validates the last step
        first, and gives CUDA's memory back to others. Everything comes back with `reload_states`, or the next step.
        """
        self.validate()
        if self._away:
            return
        for part in self._parts:
            part.forget_undo()
        parameters = [*self._model_parameters()]
        for parameter in parameters:
            if parameter.grad is not None and is_view(parameter.grad):  # FSDP2's of a group are of one buffer
                parameter.grad = parameter.grad.clone()
        states = [state for each in self.optimizers for state in each.state.values()]
        held = tensors_in([states, [master for _, master in self.masters], [*map(main_grad_of, parameters)]])
        held = [tensor for tensor in held if not is_view(tensor)] + tensors_in([p.grad for p in parameters])
        self._away = move_({id(tensor): tensor for tensor in held}.values(), torch.device(device))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reload_states(self) -> None:
        """Moves back what `offload_states` has moved; no-op where nothing is away."""
        for tensor, device in self._away:
            move_([tensor], device)
        self._away = []

    def add_param_group(self, param_group: dict[str, Any], place: int | None = None) -> None:
        """As the torch optimizer's; validates the last step first. Other ranks call this or `validate`.

        place: the number of the torch optimizer that takes it, where there are several.
        """
        self.validate()
        if place is None and len(self._parts) > 1:
            raise TypeError(
                "Optimizer.add_param_group: place must be the number of the torch optimizer that takes the group; got "
                f"None, with {len(self._parts)} of them"
            )
        optimizer = self.optimizers[place or 0]
        optimizer.add_param_group(param_group)
        try:
            check_unique(self._parts)
        except ValueError:
            optimizer.param_groups.pop()
            raise
        if self._has_masters:
            self._parts[place or 0].install_masters()
            self._norms.leave_out_masters()
        prepare_undo(self._parts, self._undo)

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizers' states and master weights; validates the last step first.

        As with torch, tensors are those that later steps change: copy what is to stay.
        """
        self.validate()
        states = [part.state_dict() for part in self._parts]
        return states[0] if len(states) == 1 else {"parts": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, with the same parameters on this rank; on all ranks.

        Raises ValueError, with nothing changed, for other states and for those of other kinds of optimizers.
        """
        states = state["parts"] if isinstance(state, Mapping) and "parts" in state else [state]
        if len(states) != len(self._parts):
            raise ValueError(
                f"Optimizer.load_state_dict: state must be that of {len(self._parts)} torch optimizers; got that of "
                f"{len(states)}; load it into those that saved it"
            )
        pairs = [*zip(self._parts, states, strict=True)]
        for part, each in pairs:
            part.check_state(each)
        if self._boundary.state == "broken":  # everything is loaded after a failure
            self._boundary.forget()
        self.validate()
        for part, each in pairs:
            part.load_state_dict(each)

    def close(self) -> None:
        """Ends the connections that were made for a process group; call it on every rank."""
        if self._owned is not None:
            self._owned.close()

    # ---- the protocol

    def _warn_of_missing(self, chunks: Iterable[nn.Module]) -> None:
        """Warns where the torch optimizer lacks parameters of the chunks, which only a loss would show.

        It may have those of one chunk of two, say, or those from before `fully_shard`.
        """
        known = set(map(id, self._model_parameters()))
        named = [each for module in chunks for each in module.named_parameters()]
        missing = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in known]
        if missing:
            logger.warning(
                f"Optimizer: {len(missing)} of {len(named)} parameters of this rank's chunks are not in the torch "
                f"optimizer, {missing[0]} for one: it will not train them, or count them in the norm. Give it those of "
                "all chunks as they are now, as in torch.nn.ModuleList(chunks).parameters(), or freeze the others"
            )

    def _may_step(self, total: Tensor) -> bool:
        """Whether to step before validation, given the sums of squares of this rank and those before it.

        A hook on the step may change gradients or weights, which could not be rolled back, and sees each step once. A
        rank that hears of the total after the one before it must not begin forwards, whose inputs that one might not
        send.
        """
        cautious = self.adaptive and self._cautious
        waits = any(part.undo is None or part.has_hooks for part in self._parts)
        if cautious or waits or self._norms.chain.is_after_end:
            return False
        norms, factors = self._norms.of(total)
        return all(map(math.isfinite, norms)) and min(factors) == 1

    def _conclude(self, step: PendingStep, total: Tensor) -> bool:
        """Keeps, clips or skips a step, given the sums of squares of all ranks; whether forwards before it are void."""
        self.last_norms, factors = self._norms.of(total)
        self.last_norm = math.sqrt(total.sum().item())
        finite = all(map(math.isfinite, self.last_norms))
        good = finite and min(factors) == 1
        self._cautious = not good
        after = step.after
        if not (good and step.has_stepped):
            step.check_weights()
            with step.in_place(self):
                for part in self._parts if step.has_stepped else ():
                    part.restore()
                self.undone += step.has_stepped
                for part in self._parts if finite else ():
                    gradients = [p.grad for p in parameters(part.optimizer) if p.grad is not None]
                    scale_gradients_(gradients, factors[part.norm])
                    part.update()
                after = hyperparameters(self)
        names = (part.name for part in self._parts for _ in part.optimizer.param_groups)
        is_compared = self._boundary.steps < COMPARED
        self._norms.settings = settings_of_step(names, step.before, after) if is_compared else {}
        self.skipped += not finite
        self.clipped += finite and not good
        return not good

    def _model_parameters(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(part.model_parameters() for part in self._parts)
