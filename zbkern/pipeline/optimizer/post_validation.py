"""Optimizer: steps before the norm over all stages is known, and validates the step afterwards.

The norm of all gradients and the check for non-finite values need every stage, and an all-reduce before the step would
make every stage wait for the slowest. Instead each rank receives the sum of squares of the ranks before it, adds its
own and sends it on (norm_chain.py); if the sum so far requires neither clipping nor skipping, the rank steps at once.
The last rank knows the total and sends it back while the forwards of the next step begin. If the total requires
clipping or skipping, the ranks that have stepped roll the step back, and step again with scaled gradients, or not at
all. The result is that of a synchronous step.

Post-validation: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 4. A sum of squares only grows
from rank to rank, so a rank whose partial sum requires clipping is right; only one whose partial sum does not may have
to roll back.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zbkern.pipeline.optimizer.clipping import check_max_norm, clip_coefficient, scale_gradients_, sum_of_squares
from zbkern.pipeline.optimizer.master_weights import (
    copy_masters_to_params,
    install_masters,
    masters_of,
    take_changes_,
)
from zbkern.pipeline.optimizer.params import check_whole, hyperparameters, kinds_of, parameters, same_kind
from zbkern.pipeline.optimizer.pending_step import PendingStep
from zbkern.pipeline.optimizer.undo import UNDO
from zbkern.pipeline.runtime.engine import Pipeline
from zbkern.pipeline.runtime.step_boundary import StepBoundary
from zbkern.pipeline.transport.base import Transport, check_timeout
from zbkern.pipeline.transport.connect import check_tied, closing_on_error, connect_neighbours, tied_names
from zbkern.pipeline.transport.norm_chain import NormChain
from zbkern.schedules.warmup import rank_order
from zbkern.wgrad.accumulation import gradient_of, main_grad_of

logger = logging.getLogger("zbkern")


_CHECKED = 2  # steps, the first ones, after which values are compared until they are validated
_REGISTER = tuple(
    f"register_{what}_{when}_hook" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)


class Optimizer(torch.optim.Optimizer):
    """Drives a torch optimizer of this rank's parameters as one with those of all other ranks of a pipeline.

    >>> optimizer = Optimizer(torch.optim.AdamW(chunk.parameters()), pipe, max_norm=1.0)    # doctest: +SKIP
    >>> optimizer.zero_grad()
    >>> loss = pipe.step(inputs, targets)
    >>> optimizer.step()

    It is a torch.optim.Optimizer itself, with the groups, state and hooks of the one it drives: learning-rate schedules
    take it, and a step that is done late or again uses the hyperparameters and gradients it was called with. Hooks on
    the step run once per step that counts (docs/pipeline.md).

    Args:
        optimizer: any torch optimizer whose `step()` needs no closure.
        pipe: the Pipeline; or its ranks in the order of the model, as a process group, a Transport, or None for all
            ranks: then call `validate()` before weights are read.
        max_norm: gradients are scaled down to this 2-norm over all ranks; None for never. A step with gradients that
            are not finite (or of a norm beyond fp32) is skipped.
        master_weights: parameters below fp32 get fp32 copies, which the torch optimizer updates in their place;
            gradients are read from `main_grad` where a parameter has one.
        undo: how a step is rolled back: "snapshot" (exact, any optimizer, memory of parameters and state once more),
            "inverse" (AdamW and SGD; no memory, equal up to rounding), or None: never step before validation. A
            `main_grad` is copied until the step is validated where the step may be done again with it.
        adaptive: after a step that was clipped or skipped, validate the next one before stepping, as norms of
            consecutive steps are alike.
        tied: {name: parameter} of weights that several ranks hold with equal gradients, which count once; by default
            those of which a Pipeline has made this the case.
        timeout: seconds to wait for a message; a Pipeline's by default.

    Raises TypeError or ValueError for arguments out of range, for an undo that does not fit the optimizer, and for an
    optimizer that has a parameter twice or a max_norm of its own. All ranks construct theirs together.

    Attributes: `last_norm`, the norm of the last validated step, before clipping (None at first); `undone`, how often
    this rank took a step back; `clipped`, `skipped`: how many validated steps were; `optimizer`: the torch optimizer;
    `masters`: (parameter, its fp32 copy) pairs.
    """

    _step_supports_amp_scaling = True  # has GradScaler.step call `step` on every rank, also where it found infinity

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pipe: Pipeline | Transport | dist.ProcessGroup | None = None,
        *,
        max_norm: float | None = None,
        master_weights: bool = False,
        undo: str | None = "snapshot",
        adaptive: bool = True,
        tied: Mapping[str, Tensor] | None = None,
        timeout: float | None = None,
    ) -> None:
        # torch.optim.Optimizer.__init__ is left out: it would make groups and state of its own
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, Optimizer):
            raise TypeError(
                "Optimizer: optimizer must be a torch.optim.Optimizer, not one within an Optimizer already; got "
                f"{type(optimizer).__name__}"
            )
        check_whole("Optimizer", optimizer)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(
                f"Optimizer: {type(optimizer).__name__}.step() computes losses by a closure, and one rank's is not "
                "the model's; use an optimizer that steps with the gradients that are there"
            )
        if max_norm is not None:
            check_max_norm("Optimizer", max_norm)
        if not master_weights and masters_of(optimizer):
            raise ValueError(
                f"Optimizer: {type(optimizer).__name__} has the fp32 masters of an Optimizer before this one, and "
                "without them the model's parameters would stay as they are; give master_weights=True"
            )
        pipeline = pipe if isinstance(pipe, Pipeline) else None
        if pipeline is not None and pipeline.optimizer is not None:
            raise ValueError(
                "Optimizer: this Pipeline has an Optimizer already, and gradients have one norm: give all parameters "
                "to one torch optimizer; call pipe.detach() on every rank to replace it"
            )
        check_tied("Optimizer", tied)
        if undo not in (*UNDO, None):
            raise ValueError(f"Optimizer: undo must be one of {(*UNDO, None)}; got {undo!r}")
        if timeout is not None:
            check_timeout("Optimizer", timeout)
        self.optimizer = optimizer
        for name in _REGISTER:
            setattr(self, name, getattr(optimizer, name))
        self.max_norm = max_norm
        self.adaptive = adaptive
        self.timeout = timeout if timeout is not None else 1800.0 if pipeline is None else pipeline.timeout
        self.last_norm: float | None = None
        self.undone = self.clipped = self.skipped = 0
        self.device = next((p.device for p in parameters(optimizer)), torch.device("cpu"))
        self.masters = masters_of(optimizer)
        self._check_unique()
        candidates = [*self._model_parameters(), *(() if pipeline is None else pipeline.tied.values())]
        shared = tied_names(candidates, tied)
        self._has_masters = master_weights
        if master_weights:
            install_masters(optimizer)
        self._undo: Any = UNDO[undo](optimizer) if undo is not None else None
        transport = connect_neighbours(pipe, self.device) if pipeline is None else pipeline.transport
        self._owned = transport if pipeline is None and transport is not pipe else None
        self._cautious = False
        with closing_on_error(transport, self._owned is not None, "its Optimizer"):
            ranks = [*range(transport.size)] if pipeline is None else rank_order(pipeline.schedule)
            cut = any(isinstance(p, DTensor) and p.requires_grad for p in self._model_parameters())
            self._chain = NormChain(transport, ranks, cut, shared.values(), max_norm, self.timeout)
            self._uncounted = self._counted_elsewhere(shared)
            self.boundary = StepBoundary(joint=False) if pipeline is None else pipeline.boundary
            self.boundary.take(self, self._chain, self._model_parameters())
            if pipeline is not None:
                self._warn_of_missing(pipeline)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the torch optimizer, whose lists a load replaces; schedules may change them right after `step`."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Settings of groups that name none of their own."""
        return self.optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the torch optimizer, as its last update left it."""
        return self.optimizer.state

    def __getstate__(self) -> Any:
        raise TypeError("Optimizer: is tied to the other ranks and cannot be copied or pickled; keep its state_dict()")

    # ---- what a training loop calls

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters, a `main_grad` always in place.

        A step that is not validated yet keeps what it needs of them.
        """
        gradients = [p.grad for p in self._model_parameters() if p.grad is not None]
        if not set_to_none:
            if self.boundary.pending is not None:
                with self.boundary.failing_together():
                    self.boundary.pending.copy_gradients(gradients)
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
        self.validate()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        boundary, chain = self.boundary, self._chain
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn of a late step
        with boundary.failing_together():
            number = boundary.begin()
            gradients = self._collect()
            total = self._pass_on(gradients, number)
            step = PendingStep(gradients, hyperparameters(self.optimizer))
            if chain.ends_here:
                boundary.pending = step
                chain.pass_back(number, total)
                boundary.conclude(total)
                return loss
            if self._may_step(total):
                with step.in_place(self.optimizer):
                    self._undo.save(self.optimizer)
                    self._update()
                step.has_stepped, step.after = True, hyperparameters(self.optimizer)
            if step.has_stepped and self.max_norm is None and not self._undo.needs_gradients:
                step.set_gradients([])  # it will be kept or skipped, never done again
            else:
                main_grads = map(main_grad_of, self._model_parameters())
                step.copy_gradients(main_grad for main_grad in main_grads if main_grad is not None)
            step.record_weights([*parameters(self.optimizer), *self._model_parameters()], number <= _CHECKED)
            boundary.pending = step
        return loss

    def validate(self) -> None:
        """Waits for the norm over all ranks and clips or skips the last step accordingly. No-op if that is done.

        Pipelines of these parameters call this in time; so does the next `step`, and `weights`. Call it before you read
        weights in any other way. Every rank must call it: the norm reaches a rank through the ranks after it.
        """
        self.boundary.validate()

    def weights(self) -> list[Tensor]:
        """This rank's parameters of the model, as the last step leaves them for good, in the torch optimizer's order.

        Read them so between steps: for an average, a copy, an inference engine. Validates the last step; on all ranks.
        """
        self.validate()
        return [*self._model_parameters()]

    @property
    def pending(self) -> bool:
        """True until the last step is validated."""
        return self.boundary.pending is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the torch optimizer's; validates the last step first. Other ranks call this or `validate`."""
        self.validate()
        self.optimizer.add_param_group(param_group)
        try:
            self._check_unique()
        except ValueError:
            self.optimizer.param_groups.pop()
            raise
        if self._has_masters:
            install_masters(self.optimizer)
            self._uncounted |= {id(master) for parameter, master in self.masters if id(parameter) in self._uncounted}
        if self._undo is not None:
            self._undo = type(self._undo)(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state and master weights; validates the last step first.

        As with torch, tensors are those that later steps change: copy what is to stay.
        """
        self.validate()
        return {
            "optimizer": self.optimizer.state_dict(),
            "kinds": kinds_of(self.optimizer),
            "masters": [master for _, master in self.masters],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, with the same parameters on this rank; on all ranks.

        Raises ValueError, with nothing changed, for other states and for those of other kinds of optimizers.
        """
        needed = {"optimizer", "kinds", "masters"}
        if not isinstance(state, Mapping) or needed - state.keys():
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(
                f"Optimizer.load_state_dict: state must be what Optimizer.state_dict() gave, with {sorted(needed)}; "
                f"got {got}; a torch optimizer's own state goes into Optimizer.optimizer.load_state_dict()"
            )
        saved = [list(master.shape) for master in state["masters"]]
        own = [list(master.shape) for _, master in self.masters]
        if not same_kind(self.optimizer, state["kinds"]) or saved != own:
            raise ValueError(
                f"Optimizer.load_state_dict: state must be that of {type(self.optimizer).__name__} with master weights "
                f"of shapes {own}; got that of {state['kinds'][0]} with {saved}; "
                "load it into the kind of optimizer that saved it, with its master_weights= and its parameters"
            )
        if self.boundary.broken:  # everything is loaded after a failure
            self.boundary.abandon()
        self.validate()
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for (_, master), value in zip(self.masters, state["masters"], strict=True):
                master.copy_(value)
        copy_masters_to_params(self.masters)

    def close(self) -> None:
        """Ends the connections that were made for a process group; call it on every rank."""
        if self._owned is not None:
            self._owned.close()

    # ---- the protocol

    def _warn_of_missing(self, pipeline: Pipeline) -> None:
        """Of one chunk of two, say, or of parameters from before `fully_shard`, which nothing but a loss shows."""
        known = set(map(id, self._model_parameters()))
        named = [each for module in pipeline.modules.values() for each in module.named_parameters()]
        missing = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in known]
        if missing:
            logger.warning(
                f"Optimizer: {len(missing)} of {len(named)} parameters of this rank's chunks are not in the torch "
                f"optimizer, {missing[0]} for one: it will not train them, or count them in the norm. Give it those of "
                "all chunks as they are now, as in torch.nn.ModuleList(chunks).parameters(), or freeze the others"
            )

    def _counted_elsewhere(self, shared: Mapping[int, str]) -> set[int]:
        """By id, the parameters of which another copy is in the norm, and their masters.

        shared: {id: name} of parameters that have copies, also of those that come with a later group.
        """
        counted, found = {*self._chain.counted}, set()
        for key, name in shared.items():
            if name in counted:
                found.add(key)
            counted.add(name)
        return found | {id(master) for parameter, master in self.masters if id(parameter) in found}

    def _pass_on(self, gradients: Sequence[tuple[Tensor, Tensor]], number: int) -> Tensor:
        """The sum of squares of this rank and of those whose sums it receives, fp64 []; sent to the next rank."""
        counted = [gradient for parameter, gradient in gradients if id(parameter) not in self._uncounted]
        uncounted = [gradient for parameter, gradient in gradients if id(parameter) in self._uncounted]
        received: list[Tensor] = []
        if self._chain.ends_here and any(isinstance(gradient, DTensor) for _, gradient in gradients):
            # with this rank's shards, other pipelines of its mesh learn what ranks without shards have found
            received = self._chain.receive_sums(number)
            uncounted += received
        total = sum_of_squares(counted, uncounted).to(self.device)
        total = sum(received or self._chain.receive_sums(number), total)
        self._chain.send_sum(number, total)
        return total

    def _may_step(self, total: Tensor) -> bool:
        """Whether to step before validation, given the sum of squares of this rank and those before it.

        A hook on the step may change gradients or weights, which could not be rolled back, and sees each step once. A
        rank that hears of the total after the one before it must not begin forwards, whose inputs that one might not
        send.
        """
        cautious = self.adaptive and self._cautious
        hooks = self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks
        if cautious or self._undo is None or self._chain.is_after_end or hooks:
            return False
        norm = math.sqrt(total.item())
        return math.isfinite(norm) and clip_coefficient(norm, self.max_norm) == 1

    def conclude(self, step: PendingStep, total: Tensor) -> bool:
        """Keeps, clips or skips a step, given the sum of squares of all ranks; whether forwards before it are void."""
        self.last_norm = norm = math.sqrt(total.item())
        finite, factor = math.isfinite(norm), clip_coefficient(norm, self.max_norm)
        good = finite and factor == 1
        self._cautious = not good
        if not (good and step.has_stepped):
            step.check_weights()
            with step.in_place(self.optimizer):
                if step.has_stepped:
                    self._undo.restore(self.optimizer)
                    copy_masters_to_params(self.masters)
                    self.undone += 1
                if finite:
                    scale_gradients_([gradient for _, gradient in step.gradients], factor)
                    self._update()
        self.skipped += not finite
        self.clipped += factor < 1
        return not good

    def _update(self) -> None:
        """The torch optimizer's step; hooks that run after it see, and may change, masters and parameters alike."""
        hooks, self.optimizer._optimizer_step_post_hooks = self.optimizer._optimizer_step_post_hooks, OrderedDict()
        try:
            self.optimizer.step()
        finally:
            self.optimizer._optimizer_step_post_hooks = hooks
        copy_masters_to_params(self.masters)
        for hook in list(hooks.values()):
            hook(self.optimizer, (self.optimizer,), {})
            copy_masters_to_params(self.masters)

    # ---- gradients

    def _collect(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, gradient) of what the torch optimizer is to see: fp32 for master weights."""
        for parameter, master in self.masters:
            take_changes_(parameter, master)
        pairs = zip(parameters(self.optimizer), self._model_parameters(), strict=True)
        return [(p, gradient.to(p.dtype)) for p, model_p in pairs if (gradient := gradient_of(model_p)) is not None]

    def _check_unique(self) -> None:
        seen: set[Tensor] = set()
        for parameter in self._model_parameters():
            if parameter in seen:
                raise ValueError(
                    f"Optimizer: {type(self.optimizer).__name__} has a parameter of shape {list(parameter.shape)} "
                    "twice and would update it twice, a weight that two chunks share for example; give it "
                    "torch.nn.ModuleList(chunks).parameters(), which has each parameter once"
                )
            seen.add(parameter)

    def _model_parameters(self) -> Iterator[Any]:  # tensors, some with a main_grad
        models = {id(master): parameter for parameter, master in self.masters}
        return (models.get(id(parameter), parameter) for parameter in parameters(self.optimizer))
