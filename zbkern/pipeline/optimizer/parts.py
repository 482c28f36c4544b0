"""The torch optimizers that an Optimizer drives: each with masters, a way to take its step back, and a norm."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from zbkern.pipeline.optimizer.clipping import check_max_norm
from zbkern.pipeline.optimizer.params import MASTERS, check_whole, copy_, kinds_of, parameters, same_kind
from zbkern.pipeline.optimizer.undo import UNDO
from zbkern.wgrad.accumulation import gradient_of

logger = logging.getLogger("zbkern")

Pairs = list[tuple[Tensor, Tensor]]  # a parameter below fp32, its fp32 master

_NEEDED = {"optimizer", "kinds", "masters"}


class Part:
    """One torch optimizer. norm: the number of the norm that its gradients count in, and are clipped by."""

    def __init__(self, optimizer: torch.optim.Optimizer, norm: int) -> None:
        self.optimizer, self.norm = optimizer, norm
        self.holder = cast(Any, optimizer)  # of hooks and of the state
        while not hasattr(self.holder, "_optimizer_step_post_hooks"):  # a wrapper, as accelerate's, without its own
            self.holder = self.holder.optimizer
        self.undo: Any = None

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def masters(self) -> Pairs:
        """The torch optimizer keeps the list itself: whoever drives it next has to know whose they are."""
        return vars(self.optimizer).setdefault(MASTERS, [])

    @property
    def has_hooks(self) -> bool:
        return bool(self.holder._optimizer_step_pre_hooks or self.holder._optimizer_step_post_hooks)

    def model_parameters(self) -> Iterator[Any]:  # tensors, some with a main_grad
        models = {id(master): parameter for parameter, master in self.masters}
        return (models.get(id(parameter), parameter) for parameter in parameters(self.optimizer))

    def install_masters(self) -> None:
        """Puts fp32 copies in the place of the optimizer's parameters below fp32, with their state, in fp32."""
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if not parameter.is_floating_point() or parameter.dtype.itemsize >= 4:
                    continue
                master = parameter.detach().float()
                group["params"][index] = master
                if parameter in self.optimizer.state:
                    state = self.optimizer.state.pop(parameter)
                    self.optimizer.state[master] = {name: _widened(value, parameter) for name, value in state.items()}
                self.masters.append((parameter, master))

    def collect(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, gradient) of what the torch optimizer is to see: fp32 for master weights."""
        for parameter, master in self.masters:
            _take_changes_(parameter, master)
        pairs = zip(parameters(self.optimizer), self.model_parameters(), strict=True)
        return [(p, gradient.to(p.dtype)) for p, model_p in pairs if (gradient := gradient_of(model_p)) is not None]

    def update(self) -> None:
        """The torch optimizer's step; hooks that run after it see, and may change, masters and parameters alike."""
        hooks, self.holder._optimizer_step_post_hooks = self.holder._optimizer_step_post_hooks, OrderedDict()
        try:
            self.optimizer.step()
        finally:
            self.holder._optimizer_step_post_hooks = hooks
        self._round_masters()
        for hook in list(hooks.values()):
            hook(self.holder, (self.holder,), {})
            self._round_masters()

    def _round_masters(self) -> None:
        """Rounds the masters into the model's parameters."""
        copy_([parameter for parameter, _ in self.masters], [master for _, master in self.masters])
        for parameter, master in self.masters:
            master.rounded_into = parameter._version  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Takes its last `update` back, before which `undo` has saved what it needs."""
        self.undo.restore(self.optimizer)
        self._round_masters()

    def forget_undo(self) -> None:
        """Frees the memory that its last update could be taken back with."""
        if self.undo is not None:
            self.undo = type(self.undo)(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "kinds": kinds_of(self.optimizer),
            "masters": [master for _, master in self.masters],
        }

    def check_state(self, state: Any) -> None:
        """Raises ValueError for what is not the `state_dict` of such a part."""
        if not isinstance(state, Mapping) or _NEEDED - state.keys():
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(
                f"Optimizer.load_state_dict: state must be what Optimizer.state_dict() gave, with {sorted(_NEEDED)}; "
                f"got {got}; a torch optimizer's own state goes into Optimizer.optimizer.load_state_dict()"
            )
        saved = [list(master.shape) for master in state["masters"]]
        own = [list(master.shape) for _, master in self.masters]
        if not same_kind(self.optimizer, state["kinds"]) or saved != own:
            raise ValueError(
                f"Optimizer.load_state_dict: state must be that of {self.name} with master weights "
                f"of shapes {own}; got that of {state['kinds'][0]} with {saved}; "
                "load it into the kind of optimizer that saved it, with its master_weights= and its parameters"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for (_, master), value in zip(self.masters, state["masters"], strict=True):
                master.copy_(value)
        self._round_masters()


def parts_of(
    given: Any, max_norm: Any, master_weights: bool, undo: str | None
) -> tuple[list[Part], list[float | None]]:
    """A part of each torch optimizer, and the largest norms; `given` and errors are those of an Optimizer."""
    each = [given] if isinstance(given, torch.optim.Optimizer) or not isinstance(given, Iterable) else [*given]
    paired = [isinstance(one, (tuple, list)) and len(one) == 2 for one in each]
    if any(paired) and (not all(paired) or max_norm is not None):
        raise TypeError(
            "Optimizer: optimizer must be torch optimizers with max_norm= for the norm of all, or only pairs "
            "(torch optimizer, its own max_norm) without it"
        )
    optimizers, norms = [*zip(*each, strict=True)] if any(paired) else (each or [given], [max_norm])
    for optimizer in optimizers:
        _check(optimizer, master_weights)
    for norm in norms:
        if norm is not None:
            check_max_norm("Optimizer", norm)
    if undo not in (*UNDO, None):
        raise ValueError(f"Optimizer: undo must be one of {(*UNDO, None)}; got {undo!r}")
    parts = [Part(optimizer, number % len(norms)) for number, optimizer in enumerate(optimizers)]
    check_unique(parts)
    for part in parts if master_weights else ():
        part.install_masters()
    prepare_undo(parts, undo)
    return parts, [None if norm is None else float(norm) for norm in norms]


def prepare_undo(parts: list[Part], undo: str | None) -> None:
    """Gives every part what takes its steps back. Where one part has none, none has: a rank steps with all or waits.

    Raises ValueError where there is no other part.
    """
    if undo is None:
        return
    for part in parts:
        try:
            part.undo = UNDO[undo](part.optimizer)
        except ValueError as error:
            if len(parts) == 1:
                raise
            logger.warning("%s. Until then steps of this rank wait for the norm of all ranks", error)
            for other in parts:
                other.undo = None
            return


def check_unique(parts: Iterable[Part]) -> None:
    """Raises ValueError where a parameter comes twice."""
    names = " and ".join(part.name for part in parts)
    seen: set[Tensor] = set()
    for parameter in (parameter for part in parts for parameter in part.model_parameters()):
        if parameter in seen:
            raise ValueError(
                f"Optimizer: {names} has a parameter of shape {list(parameter.shape)} "
                "twice and would update it twice, a weight that two chunks share for example; give it "
                "torch.nn.ModuleList(chunks).parameters(), which has each parameter once"
            )
        seen.add(parameter)


def _check(optimizer: Any, master_weights: bool) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "_boundary"):
        raise TypeError(
            "Optimizer: optimizer must be a torch.optim.Optimizer, not one within an Optimizer already; got "
            f"{type(optimizer).__name__}; several go into a list, of them or of pairs (torch optimizer, max_norm)"
        )
    check_whole("Optimizer", optimizer)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"Optimizer: {type(optimizer).__name__}.step() computes losses by a closure, and one rank's is not "
            "the model's; use an optimizer that steps with the gradients that are there"
        )
    if not master_weights and getattr(optimizer, MASTERS, None):
        raise ValueError(
            f"Optimizer: {type(optimizer).__name__} has the fp32 masters of an Optimizer before this one, and "
            "without them the model's parameters would stay as they are; give master_weights=True"
        )


def _widened(value: Any, parameter: Tensor) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == parameter.dtype else value


@torch.no_grad()
def _take_changes_(parameter: Tensor, master: Tensor) -> None:
    """A master takes what somebody else has written into its parameter; elsewhere it keeps what rounding hides."""
    if getattr(master, "rounded_into", None) != parameter._version:
        master.copy_(torch.where(parameter == master.to(parameter.dtype), master, parameter.to(master.dtype)))
