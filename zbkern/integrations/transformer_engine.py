"""TransformerEngine: W of its modules with `delay_wgrad_compute=True` waits in zbkern's queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from zbkern import wgrad

Model = TypeVar("Model", bound=torch.nn.Module)


def use_queue(model: Model) -> Model:
    """Gives all modules of `model` made with delay_wgrad_compute=True a store that puts their W into zbkern's queue.

    Inside `WGradQueue.defer`, a backward then leaves W there, under the queue's key; elsewhere it runs W itself.
    `queue.run` takes the place of the module's `backward_dw`. With fuse_wgrad_accumulation W goes to `main_grad`, as
    TransformerEngine adds it, and its hooks of the gradient run then. Returns `model`, changed in place. Raises
    ValueError where no module delays its W, and for modules with more than one weight (LayerNormMLP, GroupedLinear),
    of which nothing tells whose W it is.
    """
    delaying = {name: module for name, module in model.named_modules() if _delays(module)}
    if not delaying:
        raise ValueError("use_queue: model must have modules made with delay_wgrad_compute=True; it has none")
    for name, module in delaying.items():
        if not isinstance(getattr(module, "weight", None), Tensor):
            raise ValueError(
                f"use_queue: module {name!r} must have one weight; {type(module).__name__} has several: make it with "
                "delay_wgrad_compute=False"
            )
        module.wgrad_store = QueueStore(module)
    return model


def _delays(module: Any) -> bool:
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


class QueueStore:
    """In the place of TransformerEngine's WeightGradStore of one module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module: Any = module

    def delay_wgrad_compute(self) -> bool:
        """What TransformerEngine asks before it puts a W here."""
        return True

    def put(self, tensors: Sequence[Any], function: Callable[..., Any]) -> None:
        """Defers function(*tensors), which returns the gradients of weight and bias; or adds the weight's itself.

        The bias's is None where B has computed it, as in FP8, whose tensors are TransformerEngine's own storages.
        """
        module = self.module
        fused = module.fuse_wgrad_accumulation
        parts = [_Parts(tensor) for tensor in tensors]

        def run(segments: Sequence[wgrad.Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
            for segment in segments:  # one: each task has a function of its own
                left = iter(segment)
                for output, gradient in zip(outputs, function(*[part.whole(left) for part in parts]), strict=False):
                    if output is not None and gradient is not None:
                        output.add_(gradient) if accumulate else output.copy_(gradient)
                    elif output is not None and not accumulate:
                        output.zero_()
            if fused:
                module.weight.grad_added_to_main_grad = True
                module._trigger_wgrad_accumulation_and_reduce_hooks()

        name = f"{type(module).__name__} of TransformerEngine"
        flat = tuple([tensor for part in parts for tensor in part.tensors])
        bias = self._bias(tensors)
        parameters = (module.weight, bias) if not fused else () if bias is None else (None, bias)
        task = wgrad.WGradTask(run, flat, parameters, name=name)
        scope = wgrad.current()
        wgrad.run_in_backward(task) if scope is None else scope[0].add(task, scope[1])

    def _bias(self, tensors: Sequence[Any]) -> Tensor | None:
        """The bias, where its gradient comes with W: neither in FP8, nor of one that is added after the product."""
        bias, module = getattr(self.module, "bias", None), self.module
        apart = not getattr(module, "apply_bias", True) or getattr(module, "gemm_bias_unfused_add", False)
        plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
        has_one = bias is not None and bias.numel() > 0 and bias.requires_grad  # none is an empty one
        return bias if has_one and plain and not apart else None

    def pop(self) -> NoReturn:
        """Called by the module's `backward_dw`, which has nothing to do."""
        raise RuntimeError("the W of this module waits in a zbkern queue: call queue.run() instead of backward_dw()")


class _Parts:
    """What W is given: a tensor, or a storage that holds some, such as those of FP8 numbers and their scales."""

    def __init__(self, given: Any) -> None:
        self._kind, self._fields = type(given), {} if isinstance(given, Tensor) else dict(vars(given))
        self._names = [name for name, value in self._fields.items() if isinstance(value, Tensor)]
        held = [given] if isinstance(given, Tensor) else [self._fields[name] for name in self._names]
        self.tensors = [tensor.detach() for tensor in held]

    def whole(self, tensors: Iterator[Tensor]) -> Any:
        """It again, with the next of these tensors, which are copies where they have been offloaded."""
        if not self._fields:
            return next(tensors)
        made = object.__new__(self._kind)
        made.__dict__.update(self._fields, **dict(zip(self._names, tensors, strict=False)))
        return made
