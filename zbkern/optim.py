"""AdamW in one launch for all tensors of a group, straight from the gradients that W leaves, in whatever dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from zbkern.kernels import dispatch
from zbkern.kernels.spec import AdamWOptions
from zbkern.wgrad.accumulation import gradient_of, main_grad_of

_PLAIN = frozenset((Tensor, nn.Parameter))  # of other tensors (DTensor) each rank steps its local part
_SMALL = frozenset((torch.bfloat16, torch.float16))  # dtypes of parameters that may have a master


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with its arguments and state, for gradients in `main_grad` as well as in `.grad`.

    >>> optimizer = zbkern.optim.AdamW(model.bfloat16().parameters(), lr=3e-4, master_weights=True)  # doctest: +SKIP

    A parameter's gradient is its `main_grad` where it has one, else its `.grad`; of any floating dtype, read as it is.
    On CUDA with the compiled extension a step is one launch per dtype of parameters and gradients in a group, and one
    that counts it; elsewhere it is torch's fused step. Both are equal up to rounding. impl: "auto", "cuda" or "torch";
    a named one that cannot run raises UnavailableError. foreach, fused and capturable are accepted and decide nothing.

    state: `exp_avg`, `exp_avg_sq`, `step` as in torch, but in fp32 for smaller parameters, and `step` on the device of
    the parameter. State dicts of torch.optim.AdamW load, and it loads these.
    master_weights (may differ by group): parameters below fp32 keep an fp32 copy, `master` in their state, which is
    what the step changes; they are its rounded values.
    max_norm: gradients count scaled down to this 2-norm over all parameters of this optimizer (`last_norm`, on the
    device); a step with gradients that are not finite, or whose squares add up beyond fp32, changes nothing. Over the
    ranks of a pipeline or over shards, give max_norm to zbkern.pipeline.Optimizer instead.

    step() never waits for the device. A torch.amp.GradScaler's `step(optimizer)` passes its scale and flag on the
    device, too; it finds gradients in `.grad` alone (for `main_grad` there is the scaler of zbkern.pipeline.Optimizer).
    A step can be captured in a CUDA graph after one that makes the state. Step numbers, clipping and skipping are
    computed anew in each replay; of the numbers in a group only `lr` may change, where it is a tensor on the device (as
    with torch's capturable=True; schedulers write into it). A number is a constant of the graph.
    Raises ValueError for amsgrad and differentiable, and for settings out of range.
    """

    reads_main_grad = True
    transient_attributes = frozenset(("_memory", "_buffer", "_control"))  # whose values no step depends on
    _buffer: Tensor | None
    _control: Tensor | None
    _step_supports_amp_scaling = True  # what GradScaler asks for before it passes `grad_scale` and `found_inf`

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        max_norm: float | None = None,
        impl: str = "auto",
    ) -> None:
        if differentiable:
            raise ValueError("AdamW: differentiable is not supported; use torch.optim.AdamW")
        if max_norm is not None and (isinstance(max_norm, bool) or not isinstance(max_norm, Real)):
            raise TypeError(f"AdamW: max_norm must be a number above 0, or None to clip nothing; got {max_norm!r}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"AdamW: max_norm must be above 0, or None to clip nothing; got {max_norm}")
        self.max_norm, self.impl = max_norm, impl
        self._forget()
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": _two_numbers(betas),
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "master_weights": master_weights,
            },
        )

    @property
    def last_norm(self) -> Tensor | None:
        """The norm of the last step's gradients before clipping, fp32 [] on their device; None without max_norm."""
        if self.max_norm is None or self._control is None:
            return None
        return self._control[0].sqrt() / self._control[2]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; returns what `closure` does, which is called before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._batches()
        self._control = self._measure(batches)
        for batch in batches:
            batch.backend.adamw(*batch.tensors, batch.options, control=self._control, memory=batch.memory)
        self._count_change()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; a `main_grad` is zeroed in place."""
        super().zero_grad(set_to_none)
        own = (main_grad_of(parameter) for group in self.param_groups for parameter in group["params"])
        if kept := [gradient for gradient in own if gradient is not None]:
            torch._foreach_zero_([_local(gradient) for gradient in kept])

    @torch.no_grad()
    def undo_step(self) -> None:
        """Takes the last step back by arithmetic, equal up to rounding; its gradients and settings must be in place.

        State that came into being with the step stays, as zeros up to rounding. Raises ValueError where a step loses
        information: of parameters below fp32 without masters, with a beta of 0 or lr x weight_decay of 1.
        """
        batches = self._batches()
        for batch in batches:
            (params, *_, masters), options = batch.tensors, batch.options
            bare = masters is None and params[0].dtype in _SMALL
            decay = 0.0 if isinstance(options.lr, Tensor) else options.lr * options.weight_decay  # not read: would wait
            if bare or 0 in options.betas or decay == 1:
                raise ValueError(
                    "AdamW.undo_step: needs parameters in fp32 or with master_weights, betas above 0 and lr x "
                    f"weight_decay other than 1; got {params[0].dtype}, {options}"
                )
        for batch in batches:
            batch.backend.adamw(*batch.tensors, batch.options, control=self._control, undo=True, memory=batch.memory)
        self._count_change()

    def _count_change(self) -> None:
        """Tells autograd, and W that is still to run, that parameters changed: neither sees what a kernel writes, nor
        what a DTensor's local part is given."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        torch.autograd.graph.increment_version([p for p in parameters if gradient_of(p) is not None])

    def _batches(self) -> list[_Batch]:
        """What is stepped together: of one group, device, dtype of parameters and of gradients."""
        found = []
        for number, group in enumerate(self.param_groups):
            rows: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
            masters = group["master_weights"]
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is None:
                    continue
                plain = type(parameter) in _PLAIN and type(gradient) in _PLAIN
                if not plain:
                    gradient = self._placed_like(parameter, gradient)
                state, dtype = self.state[parameter], parameter.dtype
                if "step" not in state or (masters and dtype in _SMALL and "master" not in state):
                    self._begin(parameter, gradient, masters)
                row: tuple[Any, ...] = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"])
                row += (state.get("master"),)
                if not plain:
                    row = tuple(map(_local, row))
                fit = row[0].is_contiguous() and row[1].is_contiguous()
                rows.setdefault((parameter.device, dtype, gradient.dtype, row[-1] is None, fit), []).append(row)
            options = self._options(group)
            for key, alike in rows.items():
                *columns, kept = map(list, zip(*alike, strict=True))
                device, *dtypes, bare, fit = key
                backend = self._resolve(device, dtypes, fit)
                memory = self._memory.setdefault((number, *key), {})
                found.append(_Batch(backend, (*columns, None if bare else kept), options, memory))
        return found

    def _resolve(self, device: torch.device, dtypes: list[torch.dtype], fit: bool) -> ModuleType:
        """fit: memory is contiguous, as the extension needs it."""
        if self.impl != "auto":
            return dispatch.resolve("adamw", self.impl, device, dtypes[0])
        found = {dispatch.resolve("adamw", "auto", device, dtype) for dtype in dtypes}
        return found.pop() if fit and len(found) == 1 else dispatch.resolve("adamw", "torch", device)

    def _options(self, group: dict[str, Any]) -> AdamWOptions:
        max_norm = math.inf if self.max_norm is None else self.max_norm
        numbers = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
        return AdamWOptions(**numbers, max_norm=max_norm)

    def _begin(self, parameter: Tensor, gradient: Tensor, master: bool) -> None:
        if gradient.is_sparse or gradient.shape != parameter.shape:
            raise ValueError(
                f"AdamW: gradients must be dense and of their parameter's shape; got {gradient.layout} "
                f"{list(gradient.shape)} for {list(parameter.shape)}"
            )
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("AdamW: a replay would start with new state every time; step once before the capture")
        state, wide = self.state[parameter], torch.promote_types(parameter.dtype, torch.float32)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        if master and parameter.dtype in _SMALL and "master" not in state:
            state["master"] = parameter.detach().to(wide)

    def _placed_like(self, parameter: Tensor, gradient: Any) -> Any:
        """The gradient where its parameter is: every rank then steps its local part, element by element.

        SequenceParallel leaves Partial gradients on replicated weights, whose local parts are only summands.
        """
        mesh = getattr(parameter, "device_mesh", None)
        expected = "Tensor" if mesh is None else "DTensor"
        if hasattr(parameter, "to_local") != hasattr(gradient, "to_local"):
            raise ValueError(
                f"AdamW: a gradient must be a {expected} like its parameter of shape {list(parameter.shape)}; got "
                f"{type(gradient).__name__}; distribute both over one device mesh, or neither"
            )
        if mesh is None:
            return gradient
        if self.max_norm is not None:
            raise ValueError(
                "AdamW: max_norm needs whole parameters, not shards (DTensor); give it to zbkern.pipeline.Optimizer, "
                "or call torch.nn.utils.clip_grad_norm_ before the step"
            )
        if gradient.device_mesh != mesh:
            raise ValueError(
                f"AdamW: a gradient must be on the device mesh of its parameter of shape {list(parameter.shape)}, "
                f"{mesh}; got {gradient.device_mesh}; redistribute the gradient before the step"
            )
        return gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]

    def _measure(self, batches: list[_Batch]) -> Tensor | None:
        """What the kernels read on the device of all gradients together (spec.py); None where they need nothing."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if not batches or (self.max_norm is None and scale is None and found is None):
            return None
        devices = {batch.tensors[0][0].device for batch in batches}
        if len(devices) > 1:
            raise ValueError(f"AdamW: max_norm and loss scaling need all parameters on one device; got {devices}")
        control = self._buffer
        if control is None or control.device not in devices:
            control = self._buffer = torch.ones(3, device=devices.pop())
        if self.max_norm is None:
            control[:2].zero_()
        else:
            for index, batch in enumerate(batches):
                batch.backend.squared_norm(batch.tensors[1], control, accumulate=index > 0, memory=batch.memory)
        if found is not None:
            control[1:2].add_(found)
        control[2:3].fill_(1) if scale is None else control[2:3].copy_(scale)
        return control

    # ---- groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError for settings out of range, UnavailableError where `impl` cannot run."""
        if isinstance(param_group, dict) and "params" not in param_group:
            raise ValueError(f"AdamW: a group must have its parameters under 'params'; got only {list(param_group)}")
        super().add_param_group(param_group)
        _check(self.param_groups[-1])
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"AdamW: parameters must be of a real floating dtype; got {parameter.dtype}")
            if self.impl != "auto":
                dispatch.resolve("adamw", self.impl, parameter.device, parameter.dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but what is wider than its parameter stays so, and `master_weights` as it was constructed.

        Raises TypeError or ValueError, with nothing changed, for a state that is not of an AdamW.
        """
        _check_state(state_dict)
        masters = [group["master_weights"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        saved = (index for group in state_dict["param_groups"] for index in group["params"])
        for group, master in zip(self.param_groups, masters, strict=True):
            group["master_weights"] = master
            for parameter, index in zip(group["params"], saved, strict=False):
                if parameter in self.state:
                    self.state[parameter] = _adopted(state_dict["state"][index], parameter, master)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_norm": self.max_norm, "impl": self.impl}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            _check(group)
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        self._memory: dict[tuple[Any, ...], dict[str, Any]] = {}  # of each batch, what its kernels keep
        self._buffer = self._control = None


@dataclass(frozen=True)
class _Batch:
    """What one kernel launch steps: parameters, gradients, exp_avg, exp_avg_sq, step, and masters or None."""

    backend: ModuleType
    tensors: tuple[Any, ...]  # lists of tensors
    options: AdamWOptions
    memory: dict[str, Any]


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _adopted(saved: dict[str, Any], parameter: Tensor, master: bool) -> dict[str, Any]:
    """State from a state dict where it belongs: fp32 at least, on the parameter's device."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    state = {
        name: (value if isinstance(value, Tensor) else torch.tensor(value)).to(
            device=parameter.device, dtype=torch.float32 if name == "step" else wide, copy=True
        )
        for name, value in saved.items()
    }
    if not (master and parameter.dtype in _SMALL):
        state.pop("master", None)
    return state


def _check_state(state_dict: dict[str, Any]) -> None:
    if not isinstance(state_dict, dict):
        raise TypeError(
            "AdamW.load_state_dict: state_dict must be that of an AdamW, as state_dict() gives it; got "
            f"{type(state_dict).__name__}"
        )
    groups, states = state_dict.get("param_groups", [{}]), state_dict.get("state", {}).values()
    settings, moments = ("lr", "betas", "eps", "weight_decay"), ("exp_avg", "exp_avg_sq", "step")
    needed: list[tuple[dict[str, Any], tuple[str, ...]]] = [(group, settings) for group in groups]
    needed += [(entries, moments) for entries in states if entries]
    for found, names in needed:
        if missing := [name for name in names if name not in found]:
            raise ValueError(
                f"AdamW.load_state_dict: state_dict must be that of an AdamW; got one without {', '.join(missing)} "
                f"(with {', '.join(map(str, found)) or 'no param_groups'}); load it into the kind of optimizer that "
                "saved it"
            )


def _check(group: dict[str, Any]) -> None:
    if group.get("amsgrad"):
        raise ValueError("AdamW: amsgrad is not supported; use torch.optim.AdamW")
    if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
        raise ValueError(f"AdamW: lr must be a number or one element; got {list(group['lr'].shape)}")
    for name in ("lr", "eps", "weight_decay"):
        if not _is_number(group[name]):
            raise TypeError(f"AdamW: {name} must be a number; got {group[name]!r}")
        if not group[name] >= 0:
            raise ValueError(f"AdamW: {name} must be at least 0; got {group[name]}")
    if not all(0 <= beta < 1 for beta in _two_numbers(group["betas"])):
        raise ValueError(f"AdamW: betas must be at least 0 and below 1; got {group['betas']}")


def _two_numbers(betas: Any) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(map(_is_number, betas)):
        raise TypeError(f"AdamW: betas must be two numbers, such as (0.9, 0.999); got {betas!r}")
    return float(betas[0]), float(betas[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (Real, Tensor)) and not isinstance(value, bool)
