"""Optimizer: steps without waiting for the other stages, and takes the step back when it should have waited.

The norm of all gradients and the check for non-finite values need every stage, and an all-reduce before the step would
have every stage wait for the slowest. Instead each rank receives the sum of squares of the ranks before it, adds its
own and sends it on; when that does not speak against a plain step, it steps at once. The last rank of the chain knows
the whole sum; its verdict travels back while the forwards of the next step begin. Where it says that gradients should
have been clipped, or hold a value that is not finite, the ranks that have stepped undo it and step again with scaled
gradients, or not at all. The result is that of a synchronous step.

Post-validation: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 4. A sum of squares only grows
along the chain, so a rank that sees reason to clip is right; only one that sees none can be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbkern.pipeline.connection import connect_row
from zbkern.pipeline.delegating import Delegating
from zbkern.pipeline.mailbox import PipelineError
from zbkern.pipeline.mixed_precision import Gradients, install_masters, load_gradients, publish, unscale, update_scale
from zbkern.pipeline.norms import coefficient, scale_, squares
from zbkern.pipeline.undo import UNDO, Call, gradient_of, hyperparameters, parameters
from zbkern.pipeline.warmup import chain


class Message(NamedTuple):
    """A tag: the squares of the ranks `before` on their way down the chain, or of `all` of them on their way back."""

    number: int
    what: str

    def __str__(self) -> str:
        return f"the squared gradient norm of {self.what} stages, optimizer step {self.number}"


class Optimizer(Delegating):
    """Drives a torch optimizer of this rank's parameters as one with those of all other ranks of a pipeline.

    >>> optimizer = Optimizer(torch.optim.AdamW(chunk.parameters()), pipe, max_norm=1.0)    # doctest: +SKIP
    >>> optimizer.zero_grad()
    >>> loss = pipe.step(inputs, targets)
    >>> optimizer.step()

    It is a torch.optim.Optimizer itself, with the groups, state and hooks of the one it drives: learning-rate schedules
    take it, and a step that is done late or again has the settings it was called with.

    optimizer: any torch optimizer whose `step()` needs no closure. pipe: the Pipeline; or its ranks in the order of the
    model, as a process group, a Transport, or None for all ranks: then call `validate()` before weights are read.
    max_norm: gradients are scaled down to this 2-norm over all ranks; None for never. A step with gradients that are
    not finite (or of a norm beyond fp32) is skipped. scaler: the torch.amp.GradScaler that has scaled the loss: step()
    does what its `unscale_`, `step` and `update` would do. master_weights: parameters below fp32 get fp32 copies, which
    the torch optimizer updates in their place; gradients are read from `main_grad` where a parameter has one. Not for a
    torch optimizer that keeps such copies itself, as zbkern.optim.AdamW(master_weights=True) does. undo: how a wrong
    step is taken back: "snapshot" (exact, any optimizer, memory of parameters and state once more), "inverse" (torch's
    AdamW and SGD, zbkern.optim.AdamW; no memory, equal up to rounding), or None: never step before the verdict.
    adaptive: after a step that was clipped or skipped, wait for the next one's verdict instead of undoing every time;
    norms of consecutive steps are alike. tied: {name: parameter} of weights that several ranks hold with equal
    gradients, which count once; taken from a Pipeline. timeout: seconds to wait for a message; a Pipeline's by default.
    Raises ValueError for an undo that does not fit the optimizer, and for an optimizer with a max_norm of its own. All
    ranks construct theirs together.

    Attributes: `last_norm`, the norm of the last validated step, before clipping (None at first); `undone`, how often
    this rank took a step back; `clipped`, `skipped`: how many validated steps were; `optimizer`: the torch optimizer;
    `masters`: (parameter, its fp32 copy) pairs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pipe: Any = None,
        *,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        master_weights: bool = False,
        undo: str | None = "snapshot",
        adaptive: bool = True,
        tied: Mapping[str, Tensor] | None = None,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, Delegating):
            raise TypeError(
                "Optimizer: optimizer must be a torch.optim.Optimizer, not one within an Optimizer already; got "
                f"{type(optimizer).__name__}"
            )
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(f"Optimizer: scaler must be a torch.amp.GradScaler or None; got {type(scaler).__name__}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"Optimizer: max_norm must be above 0, or None to clip nothing; got {max_norm}")
        if (own := getattr(optimizer, "max_norm", None)) is not None:
            raise ValueError(
                f"Optimizer: {type(optimizer).__name__}(max_norm={own}) clips by the norm of its own "
                "parameters, not of all ranks'; give max_norm to Optimizer"
            )
        if getattr(pipe, "optimizer", None) is not None:
            raise ValueError(
                "Optimizer: this Pipeline has an Optimizer already, and gradients have one norm: give all parameters "
                "to one torch optimizer; set pipe.optimizer = None to replace it"
            )
        if undo is not None and undo not in UNDO:
            raise ValueError(f"Optimizer: undo must be one of {(*UNDO, None)}; got {undo!r}")
        super().__init__(optimizer)
        self.max_norm = max_norm
        self.adaptive = adaptive
        self.timeout = getattr(pipe, "timeout", 1800.0) if timeout is None else timeout
        self.last_norm: float | None = None
        self.undone = self.clipped = self.skipped = 0
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._unscaled = Gradients([])
        self._reads_main_grad = getattr(optimizer, "reads_main_grad", False)
        self._device = next((p.device for p in parameters(optimizer)), torch.device("cpu"))
        tied = getattr(pipe, "tied", {}) if tied is None else tied
        self._has_masters = master_weights
        self.masters = install_masters(optimizer) if master_weights else []
        self._undo: Any = UNDO[undo](optimizer) if undo is not None else None
        planned = hasattr(pipe, "schedule")
        self._transport = pipe.transport if planned else connect_row(pipe, self._device)
        # the order in which the sum travels is that in which the model meets the ranks
        ranks = chain(pipe.schedule) if planned else list(range(self._transport.size))
        self._owned = self._transport if not planned and self._transport is not pipe else None
        place = ranks.index(self._transport.rank)
        self._previous = ranks[place - 1] if place > 0 else None
        self._next = ranks[place + 1] if place + 1 < len(ranks) else None
        self._uncounted = self._held_by(ranks[:place], dict(tied))
        self._number = self._settled = self._taken = 0
        self._total: Tensor | None = None
        self._pending: Call | None = None
        self._wary = False
        self._pipe = pipe if planned else None
        if self._pipe is not None:
            self._pipe.optimizer = self

    # ---- what a training loop calls

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters; those of a step without a verdict are kept aside for it."""
        for parameter in self._model_parameters():
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)
            main_grad = getattr(parameter, "main_grad", None)
            if main_grad is not None:
                if self._pending is None:
                    main_grad.zero_()
                else:
                    parameter.main_grad = torch.zeros_like(main_grad)

    def step(self) -> None:  # type: ignore[override]  # no closure
        """Steps at once when nothing speaks against it yet; `validate` puts right what turns out to be wrong."""
        if self.__dict__.pop("found_inf", None) is not None:
            raise TypeError(
                "Optimizer.step: was called by a GradScaler, which sees the gradients of this rank only; give it to "
                "Optimizer(scaler=...), and call optimizer.step() instead of its unscale_, step and update"
            )
        self.validate()
        self._number += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn of a late step
        with self._failing_together():
            gradients = self._collect()
            total = self._pass_on(squares([g for p, g in gradients if id(p) not in self._uncounted]))
            before = hyperparameters(self.optimizer)
            if self._next is None:
                self._pending = Call(gradients, before, before, stepped=False)
                self._pass_back(total)
                self._conclude(total)
                return
            stepped = self._undo is not None and not (self.adaptive and self._wary) and self._harmless(total)
            if stepped:
                self._undo.save(self.optimizer)
                self._update()
            after = hyperparameters(self.optimizer) if stepped else before
            self._pending = Call(gradients, before, after, stepped)

    def validate(self) -> None:
        """Waits for the verdict on the last step and sees that it is done as it says. Free when that has happened.

        A Pipeline calls this in time; so does the next `step`. Call it before you read weights in any other way: to
        evaluate, to save. Every rank must get there: a rank's verdict comes through the ranks behind it.
        """
        if self._pending is None:
            return
        with self._failing_together():
            assert self._next is not None  # the last rank of the chain has its verdict at once
            total = self._transport.receive(self._next, Message(self._number, "all"), self.timeout)
            self._pass_back(total)
            self._conclude(total)

    def poll(self) -> bool:
        """Validates if that is possible without waiting; True when no step is without its verdict."""
        if self._pending is not None and self._transport.ready(Message(self._number, "all")):
            self.validate()
        return self._pending is None

    @property
    def waits(self) -> bool:
        """True while the last step is without its verdict."""
        return self._pending is not None

    def take_setbacks(self) -> int:
        """How many verdicts since the last call were other than "step as you are", the same on all ranks.

        Forwards that any rank began before such a verdict are void.
        """
        new, self._taken = self.clipped + self.skipped - self._taken, self.clipped + self.skipped
        return new

    @property
    def stepped(self) -> bool:
        """True when the weights are those of the last step, as far as this rank can tell."""
        return self._pending is None or self._pending.stepped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the torch optimizer's; waits for the verdict on the last step. Other ranks call this or `validate`."""
        self.validate()
        self.optimizer.add_param_group(param_group)
        if self._has_masters:
            new = install_masters(self.optimizer)
            self.masters += new
            self._uncounted |= {id(master) for parameter, master in new if id(parameter) in self._uncounted}
        if self._undo is not None:
            self._undo = type(self._undo)(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state, master weights and the scaler's; waits for the verdict on the last step.

        As with torch, tensors are those that later steps change: copy what is to stay.
        """
        self.validate()
        masters = [master for _, master in self.masters]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters, "common": self.common_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave, with the same parameters on this rank; on all ranks."""
        self.abandon()
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for (_, master), saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)
        publish(self.masters)
        self.load_common_state(state["common"])

    def common_state(self) -> dict[str, Any]:
        """The part of the state that is the same on all ranks."""
        return {"scaler": self._scaler.state_dict() if self._scaler is not None else {}, "wary": self._wary}

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `common_state` gave; what is missing (it was another kind of optimizer) stays as it is."""
        if self._scaler is not None and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])
        self._wary = state.get("wary", self._wary)

    def abandon(self) -> None:
        """Gives up a step without verdict, because everything is about to be loaded; on all ranks."""
        self._pending, self._settled = None, self._number
        self._taken = self.clipped + self.skipped

    def recover(self) -> None:
        """Settles the last step after a failure, over a transport that works again; collective.

        Raises PipelineError on all ranks where that cannot be: some have stepped, and others did not get that far.
        """
        mine = None if self._settled == self._number else "waits" if self._pending is not None else "broken"
        total = None if self._total is None else self._total.tolist()
        ranks = self._transport.gather((self._number, mine, total), self.timeout)
        newest = max(number for number, _, _ in ranks)
        known = [total for number, state, total in ranks if (number, state) == (newest, None)]
        if not known or "broken" in {state for _, state, _ in ranks}:  # nobody knows it before all ranks have begun it
            raise PipelineError(
                f"optimizer step {newest} may have been done on some ranks only when a rank failed; load a checkpoint, "
                "or start again where there is none yet"
            )
        if self._pending is not None:
            self._conclude(torch.tensor(known[0], dtype=torch.float64, device=self._device))
        self._number = self._settled = newest
        self._taken = self.clipped + self.skipped

    def close(self) -> None:
        """Ends the connections that were made for a process group; call it on every rank."""
        if self._owned is not None:
            self._owned.close()

    # ---- the protocol

    def _pass_on(self, own: Tensor) -> Tensor:
        """The squares of this rank and of all before it, fp64 []; the next rank is told."""
        own = own.to(self._device)
        if self._previous is not None:
            message = Message(self._number, "previous")
            own = self._transport.receive(self._previous, message, self.timeout) + own
        if self._next is not None:
            self._transport.send(self._next, Message(self._number, "previous"), own)
        return own

    def _pass_back(self, total: Tensor) -> None:
        if self._previous is not None:
            self._transport.send(self._previous, Message(self._number, "all"), total)

    def _harmless(self, total: Tensor) -> bool:
        """True when gradients with this sum of squares are finite and need no clipping."""
        norm = math.sqrt(total.item())
        return math.isfinite(norm) and coefficient(norm, self.max_norm) == 1

    def _conclude(self, total: Tensor) -> None:
        """All squares are known: makes the step what it should have been."""
        step, self._pending, self._total = self._pending, None, total
        assert step is not None
        self.last_norm = norm = math.sqrt(total.item())
        finite, factor = math.isfinite(norm), coefficient(norm, self.max_norm)
        self._wary = not (finite and factor == 1)
        if not (finite and factor == 1 and step.stepped):
            with step.in_place(self.optimizer):
                if step.stepped:
                    self._undo.restore(self.optimizer)
                    publish(self.masters)
                    self.undone += 1
                if finite:
                    scale_([gradient for _, gradient in step.gradients], factor)
                    self._update()
        self.skipped += not finite
        self.clipped += factor < 1
        if self._scaler is not None:
            update_scale(self._scaler, self._unscaled, not finite, self._device)
        for _, master in self.masters:
            master.grad = None
        self._settled = self._number

    def _update(self) -> None:
        self.optimizer.step()
        publish(self.masters)

    # ---- gradients

    def _collect(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, gradient) of what the torch optimizer is to see: fp32 for master weights, without loss scale."""
        load_gradients(self.masters)
        found = []
        for parameter in parameters(self.optimizer):
            gradient = gradient_of(parameter)
            if gradient is not None:
                found.append((parameter, gradient))
                if not self._reads_main_grad:
                    parameter.grad = gradient
        if self._scaler is not None:
            self._unscaled = unscale(self._scaler, [gradient for _, gradient in found], self._device)
        return found

    def _model_parameters(self) -> Iterator[Any]:  # tensors, some with a main_grad
        models = {id(master): parameter for parameter, master in self.masters}
        return (models.get(id(parameter), parameter) for parameter in parameters(self.optimizer))

    def _held_by(self, ranks: Sequence[int], tied: Mapping[str, Tensor]) -> set[int]:
        """Ids of the parameters that one of these ranks holds, too."""
        names = self._transport.gather(sorted(tied))
        earlier = {name for rank in ranks for name in names[rank]}
        held = {id(parameter) for name, parameter in tied.items() if name in earlier}
        return held | {id(master) for parameter, master in self.masters if id(parameter) in held}

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._pipe is not None:
                self._pipe.abandon()
            if isinstance(error, PipelineError):
                raise
            reason = f"rank {self._transport.rank}, optimizer step {self._number}: {type(error).__name__}: {error}"
            self._transport.fail(reason)
            if not isinstance(error, Exception):  # Ctrl-C, sys.exit: news for the others, here what it is
                raise
            raise PipelineError(reason) from error
