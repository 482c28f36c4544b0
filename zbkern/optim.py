"""torch's fused AdamW for the gradients that W leaves: `main_grad`, fp32 masters, clipping without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from zbkern.wgrad.accumulation import gradient_of, main_grad_of

_SMALL = frozenset((torch.bfloat16, torch.float16))  # dtypes of parameters that may have a master
_PORTION = 1 << 25  # elements of weights that are stepped at a time


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), with its arguments and state, for gradients in `main_grad` as well as in `.grad`.

    >>> optimizer = zbkern.optim.AdamW(model.bfloat16().parameters(), lr=3e-4, master_weights=True)  # doctest: +SKIP

    A parameter's gradient is its `main_grad` where it has one, else its `.grad`; of any floating dtype. A step reads it
    and leaves it as it is. foreach, fused and capturable are accepted and decide nothing.

    state: `exp_avg`, `exp_avg_sq`, `step` as in torch, but in fp32 for smaller parameters, and `step` on the device of
    the parameter. State dicts of torch.optim.AdamW load, and it loads these.
    master_weights (may differ by group): parameters below fp32 keep an fp32 copy, `master` in their state, which is
    what the step changes; they are its rounded values. What somebody else writes into a parameter, the next step takes
    into its master.
    max_norm: gradients count scaled down to this 2-norm over all parameters of this optimizer (`last_norm`, on the
    device, None before the first step); a step with gradients that are not finite, or whose squares add up beyond
    fp32, changes nothing. Over the ranks of a pipeline or over shards, give max_norm to zbkern.pipeline.Optimizer.

    step() never waits for the device. A torch.amp.GradScaler's `step(optimizer)` passes its scale and flag on the
    device, too; it finds gradients in `.grad` alone (for `main_grad` there is the scaler of zbkern.pipeline.Optimizer).
    A step can be captured in a CUDA graph after one that makes the state; of the numbers in a group only `lr` may
    change then, where it is a tensor on the device (schedulers write into it). A number is a constant of the graph.
    Raises ValueError for amsgrad, and as torch does for settings out of range.
    """

    reads_main_grad = True
    transient_attributes = frozenset(("last_norm",))  # whose value no later step depends on
    last_norm: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        *arguments: Any,
        master_weights: bool = False,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        if max_norm is not None:
            check_max_norm("AdamW", max_norm)
        self.max_norm, self._master_weights = max_norm, master_weights
        super().__init__(params, *arguments, **{**options, "fused": True, "foreach": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; returns what `closure` does, which is called before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [p for group in self.param_groups for p in group["params"] if gradient_of(p) is not None]
        rows = [[*self._rows(group)] for group in self.param_groups]
        scale, skip = self._scale_and_skip([gradient for _, gradient, *_ in chain(*rows)])
        for group, group_rows in zip(self.param_groups, rows, strict=True):
            for portion in _portions(group_rows):
                _step(group, portion, scale, skip)
        torch.autograd.graph.increment_version(stepped)  # which what is written into a DTensor's local part is not
        for parameter in stepped:
            if "master" in self.state[parameter]:
                mark_rounded(parameter, self.state[parameter]["master"])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; a `main_grad` is zeroed in place."""
        super().zero_grad(set_to_none)
        own = (main_grad_of(parameter) for group in self.param_groups for parameter in group["params"])
        if kept := [local_part(gradient) for gradient in own if gradient is not None]:
            torch._foreach_zero_(kept)

    # ---- what is stepped

    def _rows(self, group: dict[str, Any]) -> Iterator[list[Tensor]]:
        """Of each parameter with a gradient, what this rank has of: the weight that is stepped (its master, or itself),
        gradient, exp_avg, exp_avg_sq, step, and the parameter."""
        for parameter in group["params"]:
            gradient = gradient_of(parameter)
            if gradient is not None:
                gradient = self._placed_like(parameter, gradient)
                state = self._state_of(parameter, gradient, group["master_weights"])
                entries = state.get("master", parameter), gradient, state["exp_avg"], state["exp_avg_sq"], state["step"]
                yield [local_part(tensor) for tensor in (*entries, parameter)]

    def _state_of(self, parameter: Tensor, gradient: Tensor, keeps_master: bool) -> dict[str, Any]:
        state = self.state[parameter]
        begins_master = keeps_master and parameter.dtype in _SMALL and "master" not in state
        if gradient.is_sparse or gradient.shape != parameter.shape:
            raise ValueError(
                f"AdamW: gradients must be dense and of their parameter's shape; got {gradient.layout} "
                f"{list(gradient.shape)} for {list(parameter.shape)}"
            )
        begins = "step" not in state
        if (begins or begins_master) and parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("AdamW: a replay would start with new state every time; step once before the capture")
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if begins:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        if begins_master:
            state["master"] = parameter.detach().to(wide)
        elif "master" in state:
            take_changes_(parameter, state["master"])
        return state

    def _placed_like(self, parameter: Tensor, gradient: Any) -> Any:
        """The gradient where its parameter is: every rank then steps its local part, element by element.

        SequenceParallel leaves Partial gradients on replicated weights, whose local parts are only summands.
        """
        mesh, other = (getattr(tensor, "device_mesh", None) for tensor in (parameter, gradient))
        if other != mesh:
            raise ValueError(
                "AdamW: a gradient must be on the device mesh of its parameter, or both on none; for a parameter of "
                f"shape {list(parameter.shape)} on {mesh} got a gradient on {other}; distribute both over one mesh"
            )
        if mesh is None:
            return gradient
        if self.max_norm is not None:
            raise ValueError(
                "AdamW: max_norm needs whole parameters, not shards (DTensor); give it to zbkern.pipeline.Optimizer, "
                "or call torch.nn.utils.clip_grad_norm_ before the step"
            )
        return gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]

    def _scale_and_skip(self, gradients: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What gradients are divided by, and 1 where the step is skipped, else 0; on the device, None for neither."""
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if skip is not None:
            skip = (skip != 0).float()
        if self.max_norm is not None and gradients:
            norm = squared_norm(gradients).float().sqrt() / (1 if scale is None else scale)
            clip = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
            beyond = (~norm.isfinite()).float()
            scale = (1 if scale is None else scale) / clip
            skip = beyond if skip is None else torch.maximum(skip, beyond)
            self.last_norm = norm
        return scale, skip

    # ---- groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError for amsgrad, and for parameters of other than real floating dtypes."""
        self.defaults.setdefault("master_weights", self._master_weights)
        super().add_param_group(param_group)
        _refuse_amsgrad(param_group)
        for parameter in param_group["params"]:
            if not parameter.is_floating_point():
                raise ValueError(f"AdamW: parameters must be of a real floating dtype; got {parameter.dtype}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but what is wider than its parameter stays so, and `master_weights` as it was constructed.

        Raises TypeError or ValueError, with nothing changed, for what is not the state of an AdamW.
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
        return {**super().__getstate__(), "max_norm": self.max_norm, "_master_weights": self._master_weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            _refuse_amsgrad(group)
        super().__setstate__(state)
        self.last_norm = None


def check_max_norm(caller: str, max_norm: Any) -> None:
    """Raises TypeError for what is not a number, and ValueError for one that is not above 0."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
        raise TypeError(f"{caller}: max_norm must be a number above 0; got {max_norm!r}; pass the largest norm allowed")
    if not float(max_norm) > 0:
        raise ValueError(f"{caller}: max_norm must be above 0; got {max_norm}; pass math.inf to clip nothing")


def local_part(tensor: Any) -> Any:
    """What this rank holds of a DTensor; of other tensors all."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of all elements, fp64 [], on the first one's device.

    The norms of single tensors are taken in fp32 at least: infinite where one is beyond that.
    """
    alike: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
        alike.setdefault((gradient.device, torch.promote_types(gradient.dtype, torch.float32)), []).append(gradient)
    device, _ = next(iter(alike))
    norms = [torch.stack(torch._foreach_norm(found, 2, dtype=wide)) for (_, wide), found in alike.items()]
    return torch.cat([norm.to(device, torch.float64) for norm in norms]).square().sum()


def mark_rounded(parameter: Tensor, master: Tensor) -> None:
    """The parameter now has its master's rounded values: what is written into it from here is a change of its own."""
    master.rounded_into = parameter._version  # type: ignore[attr-defined]


@torch.no_grad()
def take_changes_(parameter: Tensor, master: Tensor) -> None:
    """A master takes what somebody else has written into its parameter; elsewhere it keeps what rounding hides."""
    if getattr(master, "rounded_into", None) != parameter._version:
        master.copy_(torch.where(parameter == master.to(parameter.dtype), master, parameter.to(master.dtype)))


def _step(group: dict[str, Any], rows: list[list[Tensor]], scale: Tensor | None, skip: Tensor | None) -> None:
    """torch's fused step, which takes one dtype, no strides, and writes scaled gradients back: in copies of what that
    would harm."""
    *kept, steps, parameters = map(list, zip(*rows, strict=True))
    dtypes = [torch.promote_types(weight.dtype, torch.float32) for weight in kept[0]]
    values = [[t.to(d).contiguous() for t, d in zip(tensors, dtypes, strict=True)] for tensors in kept]
    weights, gradients, exp_avgs, exp_avg_sqs = values
    if scale is not None:
        gradients = [new.clone() if new is old else new for new, old in zip(gradients, kept[1], strict=True)]
    (beta1, beta2), lr = map(float, group["betas"]), group["lr"]
    if isinstance(lr, Tensor):
        lr = float(lr) if lr.device.type == "cpu" else lr.float()
    adamw(
        weights, gradients, exp_avgs, exp_avg_sqs, [], steps, fused=True, grad_scale=scale, found_inf=skip,
        amsgrad=False, beta1=beta1, beta2=beta2, lr=lr, weight_decay=group["weight_decay"], eps=group["eps"],
        maximize=group["maximize"],
    )  # fmt: skip
    results = zip(chain(kept[0], kept[2], kept[3], parameters), chain(weights, *values[2:], weights), strict=True)
    if pairs := [(target, result) for target, result in results if target is not result]:
        torch._foreach_copy_([target for target, _ in pairs], [result for _, result in pairs])


def _portions(rows: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """The rows, so many together that copies of them are small beside the weights."""
    portion: list[list[Tensor]] = []
    elements = 0
    for row in rows:
        portion.append(row)
        elements += row[0].numel()
        if elements >= _PORTION:
            yield portion
            portion, elements = [], 0
    if portion:
        yield portion


def _adopted(saved: dict[str, Any], parameter: Tensor, master: bool) -> dict[str, Any]:
    """State from a state dict where it belongs: fp32 at least, on the parameter's device."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return {
        name: torch.as_tensor(value).to(parameter.device, torch.float32 if name == "step" else wide, copy=True)
        for name, value in saved.items()
        if name != "master" or (master and parameter.dtype in _SMALL)
    }


def _check_state(state_dict: dict[str, Any]) -> None:
    if not isinstance(state_dict, dict):
        raise TypeError(
            "AdamW.load_state_dict: state_dict must be that of an AdamW, as state_dict() gives it; got "
            f"{type(state_dict).__name__}"
        )
    needed: list[tuple[dict[str, Any], Sequence[str]]] = []
    needed += [(group, ("lr", "betas", "eps", "weight_decay")) for group in state_dict.get("param_groups", [{}])]
    needed += [(kept, ("exp_avg", "exp_avg_sq", "step")) for kept in state_dict.get("state", {}).values() if kept]
    for found, names in needed:
        if missing := [name for name in names if name not in found]:
            raise ValueError(
                f"AdamW.load_state_dict: state_dict must be that of an AdamW; got one without {', '.join(missing)} "
                f"(with {', '.join(map(str, found)) or 'no param_groups'}); load it into the kind of optimizer that "
                "saved it"
            )


def _refuse_amsgrad(group: dict[str, Any]) -> None:
    if group.get("amsgrad"):
        raise ValueError("AdamW: amsgrad is not supported; use torch.optim.AdamW")
