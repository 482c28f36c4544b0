"""TransformerEngine: W of its modules with `delay_wgrad_compute=True` waits in zbkern's queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from zbkern import wgrad

Model = TypeVar("Model", bound=torch.nn.Module)


def use_queue(model: Model) -> Model:
    """Gives all modules of `model` made with delay_wgrad_compute=True a store that puts their W into zbkern's queue.

    Inside `WGradQueue.defer`, a backward then leaves W there, under the queue's key; elsewhere it runs W itself.
    `queue.run` takes the place of the module's `backward_dw`. With fuse_wgrad_accumulation W goes to `main_grad`, as
    TransformerEngine adds it, and its hooks of the gradient run then. Returns `model`, changed in place. Raises
    ValueError where no module delays its W, for weights in parts (parameters_split), for modules of `te.ops`, for
    distributed weights, whose gradients are reduced in B alone, and for a GroupedLinear without
    fuse_wgrad_accumulation, whose backward gives autograd gradients that W has not written yet.
    """
    delaying = {name: module for name, module in model.named_modules() if delays(module)}
    if not delaying:
        raise ValueError("use_queue: model must have modules made with delay_wgrad_compute=True; it has none")
    for name, module in delaying.items():
        one = any(hasattr(module, part) for part in ("weight", "fc1_weight", "num_gemms"))
        if not one or not hasattr(module, "fuse_wgrad_accumulation"):
            raise ValueError(
                f"use_queue: module {name!r} must be a Linear, LayerNormLinear, LayerNormMLP or GroupedLinear without "
                f"parameters_split; got a {type(module).__module__}.{type(module).__name__}: make it with "
                "delay_wgrad_compute=False"
            )
        if any(getattr(weight, "is_distributed_weight", False) for weight in module.parameters()):
            raise ValueError(
                f"use_queue: module {name!r} has distributed weights (is_distributed_weight), whose gradients "
                "TransformerEngine reduces in B alone; make it with delay_wgrad_compute=False"
            )
        if hasattr(module, "num_gemms") and not module.fuse_wgrad_accumulation:
            raise ValueError(
                f"use_queue: module {name!r} must be made with fuse_wgrad_accumulation=True: without, a "
                f"{type(module).__name__} gives autograd gradients before W has written them"
            )
        module.wgrad_store = QueueStore(module)
    return model


def delays(module: Any) -> bool:
    """Whether it is a module of TransformerEngine's made with delay_wgrad_compute=True."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


Make = Callable[[Iterator[Tensor]], Any]


class QueueStore:
    """In the place of TransformerEngine's WeightGradStore of one module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module: Any = module
        self._of_fc2: list[_Product] = []  # of a LayerNormMLP, whose backward puts it before that of fc1

    def delay_wgrad_compute(self) -> bool:
        """What TransformerEngine asks before it puts a W here."""
        return True

    def put(self, tensors: Sequence[Any], function: Callable[..., Any]) -> None:
        """Defers function(*tensors), which returns the gradients of weight and bias; or adds the weight's itself.

        The bias's is None where B has computed it, as in FP8, whose tensors are TransformerEngine's own storages. A
        GroupedLinear's tensors are lists, of which the third are the `main_grad`s. Both W of a LayerNormMLP are one.
        """
        module = self.module
        is_first = getattr(function, "__name__", "").startswith("fc2")
        products = [*([] if is_first else self._of_fc2), _product(module, tensors, function)]
        self._of_fc2 = products if is_first and module.fc1_weight.requires_grad else []
        if self._of_fc2:
            return
        fused = module.fuse_wgrad_accumulation

        def run(segments: Sequence[wgrad.Segment], outputs: Sequence[Tensor | None], accumulate: bool) -> None:
            for segment in segments:  # one: each task has functions of its own
                left = iter(segment)
                gradients = [gradient for product in products for gradient in product.run(left)]
                for output, gradient in zip(outputs, gradients, strict=False):
                    if output is not None and gradient is not None and gradient.numel():
                        output.add_(gradient) if accumulate else output.copy_(gradient)
                    elif output is not None and not accumulate:
                        output.zero_()
            if fused:
                for product in products:
                    for weight in product.weights:
                        weight.grad_added_to_main_grad = True
                module._trigger_wgrad_accumulation_and_reduce_hooks()

        flat = tuple([tensor for product in products for tensor in product.tensors])
        each = [(*([None] * len(p.weights) if fused else p.weights), *p.biases) for p in products]
        parameters = tuple(parameter for both in each for parameter in both)
        if not any(parameter is not None for parameter in parameters):
            parameters = ()
        task = wgrad.WGradTask(run, flat, parameters, name=f"{type(module).__name__} of TransformerEngine")
        scope = wgrad.current()
        wgrad.run_in_backward(task) if scope is None else scope[0].add(task, scope[1])

    def pop(self) -> NoReturn:
        """Called by the module's `backward_dw`, which has nothing to do."""
        raise RuntimeError("the W of this module waits in a zbkern queue: call queue.run() instead of backward_dw()")


class _Product(NamedTuple):
    """A product that a module has put. run(tensors) takes those that it needs from `tensors`, or copies of them where
    they were offloaded, and returns the gradients of weights and biases."""

    tensors: list[Tensor]
    run: Callable[[Iterator[Tensor]], Sequence[Tensor | None]]
    weights: list[Any]
    biases: list[Any]


def _product(module: Any, given: Sequence[Any], function: Callable[..., Any]) -> _Product:
    tensors: list[Tensor] = []
    if hasattr(module, "num_gemms"):  # GroupedLinear
        inputs, gradients, outputs = given
        make = _taken_apart([inputs, gradients], tensors)
        weights = module._get_weight_tensors()
        in_b = not _is_plain([inputs, gradients]) or not module.use_bias or getattr(module, "bias", None) is not None
        biases = [] if in_b else [_trained(module, f"bias{i}") for i in range(module.num_gemms)]

        def run(left: Iterator[Tensor]) -> Sequence[Tensor | None]:
            return *[None] * len(weights), *function(*make(left), outputs)[1]

        return _Product(tensors, run, weights, biases)
    make = _taken_apart(given, tensors)
    part = function.__name__[:4] if hasattr(module, "fc1_weight") else ""  # "fc1_" or "fc2_"
    weight, bias = getattr(module, f"{part}weight"), _trained(module, f"{part}bias")
    added_apart = not getattr(module, "apply_bias", True) or getattr(module, "gemm_bias_unfused_add", False)
    in_b = getattr(module, "bias_gelu_nvfusion", False) if part == "fc1_" else added_apart
    comes = _is_plain(given) and not in_b
    return _Product(tensors, lambda left: function(*make(left))[:2], [weight], [bias if comes else None])


def _is_plain(given: Any) -> bool:
    """Whether these are torch's own tensors: W of others leaves the gradient of the bias to B."""
    return (
        all(map(_is_plain, given)) if isinstance(given, (list, tuple)) else type(given) in (Tensor, torch.nn.Parameter)
    )


def _trained(module: Any, name: str) -> Tensor | None:
    """A bias that takes a gradient; none is an empty tensor."""
    bias = getattr(module, name, None)
    return bias if bias is not None and bias.numel() > 0 and bias.requires_grad else None


def _taken_apart(given: Any, tensors: list[Tensor]) -> Make:
    """Adds the tensors in `given` to `tensors`: a tensor, a list, or a storage such as that of FP8 numbers and their
    scales. Returns what makes the same of as many other tensors."""
    if isinstance(given, Tensor):
        tensors.append(given.detach())
        return next
    if isinstance(given, (list, tuple)):
        makes = [_taken_apart(each, tensors) for each in given]
        return lambda left: [make(left) for make in makes]
    kind, fields = type(given), dict(vars(given))
    parts = {name: _taken_apart(fields.pop(name), tensors) for name in [*fields] if isinstance(fields[name], Tensor)}

    def made(left: Iterator[Tensor]) -> Any:
        storage = object.__new__(kind)
        storage.__dict__.update(fields, **{name: make(left) for name, make in parts.items()})
        return storage

    return made
